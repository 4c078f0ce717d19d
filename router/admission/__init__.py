"""Whether a request, or another try of it, may go on: pure, with time as an argument."""
