"""Modules around the memory: each takes what a stream left behind and returns what it leaves."""
