"""The gated norm as it is written."""

from torch import Tensor


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `gated_norm` documents."""
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype)
    return normed * gate / (1 + (-gate).exp())
