"""The softmax of a block by PyTorch."""

import torch
from torch import Tensor

from atlas_lm.ops.linear_cross_entropy.blocks import walk


def linear_cross_entropy_parallel(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100
) -> Tensor:
    """What `linear_cross_entropy` documents, on any device and dtype."""
    return walk(_softmax, hidden, weight, labels, ignore_index)


def _softmax(
    logits: Tensor, labels: Tensor, ignored: Tensor, gradient: bool
) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(logits.dtype, torch.float32)
    logs = torch.log_softmax(logits, dim=-1, dtype=exact)
    place = labels.unsqueeze(1)
    losses = -logs.gather(1, place)[:, 0].masked_fill(ignored, 0.0)
    if not gradient:
        return losses, logits
    slopes = logs.exp_()
    slopes.scatter_add_(1, place, slopes.new_full(place.shape, -1.0))
    return losses, slopes.masked_fill_(ignored.unsqueeze(1), 0.0).to(logits.dtype)
