"""The local stack: one router and N replicas on this machine, started, watched and stopped together."""
