"""Checks of the simulator: against a real engine's times, and against the real router over HTTP."""
