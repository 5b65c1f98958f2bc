"""What is read from a memory, normed per head and gated by the input."""

from typing import Literal

from torch import Tensor

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.checks import check_shapes
from atlas_lm.ops.gated_norm.parallel import gated_norm_parallel
from atlas_lm.ops.gated_norm.reference import gated_norm_reference

__all__ = ["gated_norm", "gated_norm_parallel", "gated_norm_reference"]

FORMS = ("reference", "parallel", "fused")


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    form: Literal["auto", "reference", "parallel", "fused"] = "auto",
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), the mean over the last axis.

    x, gate: [..., V]   weight: [V]; returns [..., V] in the wider dtype of x and gate.
    "fused" reckons in fp32 and rounds once; first derivatives only.

    >>> import torch
    >>> gated_norm(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), torch.ones(2), 1e-6)
    tensor([[0., 0.]])
    """
    check_shapes({"weight": (weight, "V")}, V=x.shape[-1])
    if gate.shape != x.shape:
        raise ValueError(
            f"gate has shape {list(gate.shape)}, wanted {list(x.shape)}, that of x; unflatten its heads"
        )
    chosen = choose("gated_norm", form, FORMS, x, lambda: _why_not_fused(x, gate, weight))
    if chosen == "fused":
        from atlas_lm.ops.gated_norm.fused import gated_norm_fused

        return gated_norm_fused(x, gate, weight, eps)
    if chosen == "parallel":
        return gated_norm_parallel(x, gate, weight, eps)
    return gated_norm_reference(x, gate, weight, eps)


def _why_not_fused(x: Tensor, gate: Tensor, weight: Tensor) -> str | None:
    reason = why_not_triton(x, gate, weight)
    if reason is None:
        from atlas_lm.ops.gated_norm.fused import declines

        reason = declines(x)
    return reason
