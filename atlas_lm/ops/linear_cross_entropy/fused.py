"""The softmax of a block by one kernel, which turns logits into their gradient where they lie."""

import torch
import triton
from torch import Tensor

from atlas_lm.ops.linear_cross_entropy.blocks import walk
from atlas_lm.ops.linear_cross_entropy.kernels import softmax_kernel

BLOCK, WARPS = 4096, 8  # logits that a program holds at a time


def linear_cross_entropy_fused(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100
) -> Tensor:
    """The parallel form with logits read twice and written once."""
    return walk(_softmax, hidden, weight, labels, ignore_index)


def _softmax(
    logits: Tensor, labels: Tensor, ignored: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    # gathered by PyTorch, which stops at a label that the vocabulary does not have
    said = logits.gather(1, labels.unsqueeze(1))
    softmax_kernel[(len(logits),)](
        logits, said, labels, ignored, losses, logits.shape[1],
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])), GRADIENT=gradient,
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return losses, logits
