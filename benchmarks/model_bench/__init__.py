"""Parts of `benchmarks/models.py`: a model is a family, and a measurement of it is a job."""
