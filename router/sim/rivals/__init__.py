"""How other routers place requests, on the interface of ours, so that all of them can be measured on the same traffic.

Each is written from its project's published rule and constants, not from its code; a docstring names both. They count in
blocks and tokens where the originals count in characters.
"""
