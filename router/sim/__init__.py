"""Placement policies on virtual time: the real policy and admission, rivals' policies, and engines that are only modelled."""
