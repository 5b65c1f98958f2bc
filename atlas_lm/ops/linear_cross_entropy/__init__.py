"""Cross-entropy of a linear head over a vocabulary, without all of its logits at once."""

from typing import Literal

import torch
from torch import Tensor

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.checks import check_shapes
from atlas_lm.ops.linear_cross_entropy.parallel import linear_cross_entropy_parallel
from atlas_lm.ops.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = [
    "linear_cross_entropy",
    "linear_cross_entropy_parallel",
    "linear_cross_entropy_reference",
]

FORMS = ("reference", "parallel", "fused")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    form: Literal["auto", "reference", "parallel", "fused"] = "auto",
) -> tuple[Tensor, Tensor]:
    """The summed loss of softmax(hidden weight^T) at the labels, and how many labels there are.

    hidden: [R, W]   weight: [V, W]   labels: [R] int64, `ignore_index` where none is wanted: such rows
    have neither loss nor gradient, and cost as much as others: leave them out where they are known.
    Returns the sum in fp32 (fp64 for fp64 products) and the count, int64. Under autocast products are
    in its dtype.

    "parallel" and "fused" hold the logits of a block of rows at a time, with the loss and the gradients
    of hidden and weight made at once: no product is taken twice. The gradient of the weight is summed
    over blocks in fp32. First derivatives only. "fused" makes softmax and its gradient of a block in
    one kernel.

    >>> import torch
    >>> hidden, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    >>> loss, count = linear_cross_entropy(hidden, weight, torch.tensor([1, -100, 4]))
    >>> round(loss.exp().item()), count.item()
    (25, 2)
    """
    check_shapes({"hidden": (hidden, "R W"), "weight": (weight, "V W"), "labels": (labels, "R")})
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}, wanted torch.int64; pass labels.long()")
    chosen = choose(
        "linear_cross_entropy", form, FORMS, hidden, lambda: why_not_triton(hidden, weight)
    )
    if chosen == "fused":
        from atlas_lm.ops.linear_cross_entropy.fused import linear_cross_entropy_fused

        loss = linear_cross_entropy_fused(hidden, weight, labels, ignore_index)
    elif chosen == "parallel":
        loss = linear_cross_entropy_parallel(hidden, weight, labels, ignore_index)
    else:
        loss = linear_cross_entropy_reference(hidden, weight, labels, ignore_index)
    return loss, (labels != ignore_index).sum()
