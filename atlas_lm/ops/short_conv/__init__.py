"""The short convolution before a memory: every channel mixes its own last few tokens, then SiLU."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.checks import check_shapes
from atlas_lm.ops.short_conv.parallel import short_conv_parallel
from atlas_lm.ops.short_conv.reference import short_conv_reference

__all__ = ["short_conv", "short_conv_parallel", "short_conv_reference"]

FORMS = ("reference", "parallel", "fused")
Parts = Sequence[Tensor]
Units = Sequence[int | None]


def short_conv(
    parts: Parts,
    weight: Tensor,
    tail: Tensor | None,
    count: Tensor | None = None,
    *,
    units: Units | None = None,
    form: Literal["auto", "reference", "parallel", "fused"] = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """y_t = silu(sum_j w_j x_{t-size+1+j}) per channel, and where asked for each head of it at unit length.

    parts: each [B, T, C_i], of one dtype; their channels stand side by side in weight and tail
    weight: [size, C]   tail: [B, size-1, C], the tokens before; None: zeros, a stream begins
    count: [B], tokens of each row that count, the first ones; None: all
    units: of each part, how many channels make a head that is brought to unit length; None: none
    Returns the parts [B, T, C_i] in their dtype, and the next tail [B, size-1, C].

    A head of zeros stays zero, with finite gradients. "fused" reckons in fp32 and rounds once.

    >>> import torch
    >>> x, weight = torch.tensor([[[0.0, 3.0], [4.0, 0.0]]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    >>> (y,), tail = short_conv([x], weight, None, units=[2])
    >>> y.norm(dim=-1), tail
    (tensor([[1.0000, 1.0000]]), tensor([[[4., 0.]]]))
    """
    units = [None] * len(parts) if units is None else units
    _check(parts, weight, tail, count, units)
    chosen = choose(
        "short_conv", form, FORMS, parts[0], lambda: _why_not_fused(parts, weight, units)
    )
    if chosen == "fused":
        from atlas_lm.ops.short_conv.fused import short_conv_fused

        return short_conv_fused(parts, weight, tail, count, units)
    if chosen == "parallel":
        return short_conv_parallel(parts, weight, tail, count, units)
    return short_conv_reference(parts, weight, tail, count, units)


def _check(
    parts: Parts, weight: Tensor, tail: Tensor | None, count: Tensor | None, units: Units
) -> None:
    first = parts[0]
    sizes = check_shapes({"parts[0]": (first, "B T C_0"), "weight": (weight, "S C")})
    for i, part in enumerate(parts):
        check_shapes({f"parts[{i}]": (part, f"B T C_{i}")}, B=sizes["B"], T=sizes["T"])
    channels = sum(part.shape[2] for part in parts)
    if channels != sizes["C"]:
        raise ValueError(
            f"parts have {channels} channels, weight has {sizes['C']}; pass the weight of these channels"
        )
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(
            f"parts are {[p.dtype for p in parts]}, wanted one dtype; cast some of them"
        )
    if tail is not None:
        check_shapes(
            {"tail": (tail, "B before C")}, B=sizes["B"], before=sizes["S"] - 1, C=channels
        )
    if count is not None:
        check_shapes({"count": (count, "B")}, B=sizes["B"])
    if len(units) != len(parts):
        raise ValueError(f"units are {len(units)}, parts are {len(parts)}; pass one unit per part")
    for part, unit in zip(parts, units, strict=True):
        if unit is not None and part.shape[2] % unit:
            raise ValueError(
                f"a part has {part.shape[2]} channels, which heads of {unit} do not fill; pass their size"
            )


def _why_not_fused(parts: Parts, weight: Tensor, units: Units) -> str | None:
    reason = why_not_triton(*parts, weight)
    if reason is None:
        from atlas_lm.ops.short_conv.fused import declines

        reason = declines(weight, units)
    return reason
