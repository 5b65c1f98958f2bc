"""What models are trained and examined on: files, where they are, and samples drawn from them.

The same seed gives the same samples, byte for byte, on every machine. Knows nothing of models.
"""
