"""Wirings of memory and attention: one per file."""
