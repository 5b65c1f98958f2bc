"""The tasks, one kind per file."""
