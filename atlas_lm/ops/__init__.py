"""Tensors in, tensors out: each op is a folder with a plain `reference` and a `parallel` form."""
