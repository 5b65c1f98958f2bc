"""Parts of `benchmarks/kernels.py`: a case is a record, and everything else works on records."""
