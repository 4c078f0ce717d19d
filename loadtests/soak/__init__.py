"""Mixed load on the real router while its replicas fail at random: does every request end once, truly and in time, and is
everything given back?

`python -m loadtests.soak --help`. The simulated engines answer the same request with the same words, so each answer is compared
with what a reference engine says that no fault ever meets.
"""
