"""What the router remembers: synchronous, one owner each, no I/O."""
