"""Folders of runs: what a run is, what it found so far, and the look of its pictures."""
