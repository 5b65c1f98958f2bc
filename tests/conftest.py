"""One thread per test process: sizes are tiny, and workers run side by side."""

import torch

torch.set_num_threads(1)
