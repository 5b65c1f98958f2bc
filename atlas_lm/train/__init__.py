"""Training: a run as a record, the one loop, and what makes it scale, restart and tell of itself."""
