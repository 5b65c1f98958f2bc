"""One thread per test process: sizes are tiny, and workers run side by side.

Without a GPU, Triton kernels run under its interpreter, which must be said before Triton is imported.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
