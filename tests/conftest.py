"""One thread per test process: sizes are tiny, and workers run side by side.

Without a GPU, Triton kernels run under its interpreter, which must be said before Triton is imported; with
TRITON_INTERPRET=0 the tests of compiled kernels (tests/hopper) run instead.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
