"""Examine models: the benchmarks of this field, for our models and any causal language model."""
