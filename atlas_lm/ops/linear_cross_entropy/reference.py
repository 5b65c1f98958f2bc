"""The loss by all logits at once."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100
) -> Tensor:
    """What `linear_cross_entropy` documents, with all derivatives."""
    logits = linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
