"""Values that cross a process boundary or rest in a file: wire shapes, errors, headers, replica status, checkpoints.

Standard library and msgspec only, so that every other package, and a client, can import it at no cost.
"""
