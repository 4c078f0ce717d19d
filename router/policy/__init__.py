"""Placement policies: pure functions of what is known, with time and randomness as arguments."""
