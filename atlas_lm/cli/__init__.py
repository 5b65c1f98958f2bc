"""The command `atlas`: one verb per file, each parses, calls and prints."""
