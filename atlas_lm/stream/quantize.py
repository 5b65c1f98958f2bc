"""Memories in few bits: the fast weights of a stream at 8 or 4 bits per entry, one scale per output row.

    scale = max |row| / limit, rounded up to 17 bits      limit: 127 at 8 bits, 7 at 4
    stored = round(row / scale)                           opened again: stored * scale

With 17 bits in the scale every product stored * scale is exact in fp32, so quantising what was opened gives
the same integers and scales again.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from atlas_lm.models.state import StreamState
from atlas_lm.stream.reading import Reading

LIMITS = {8: 127, 4: 7}
SPARE = 7  # bits of fp32's 24 that products with 127 need


@dataclass(frozen=True)
class Packed:
    """A tensor [..., O, I] in few bits."""

    values: Tensor  # 8 bits: [..., O, I] int8.  4 bits: [..., O, ceil(I / 2)] uint8, two of them plus 8 each
    scale: Tensor  # [..., O] fp32


def quantize(reading: Reading, bits: int) -> Reading:
    """The reading as it comes back from a file that stores its fast weights in so many bits.

    Windows, tails, positions and pending tokens are kept as they are.
    """
    leaves = reading.state.leaves()
    for name in to_quantize(reading.state):
        given = leaves[name]
        packed = pack(given, bits)
        leaves[name] = unpack(packed, bits, given.shape[-1]).to(given)
    specs = [None if one.memory is None else one.memory.spec for one in reading.state.layers]
    return replace(reading, state=StreamState.from_leaves(specs, leaves))


def fast_weights(state: StreamState) -> list[str]:
    """Names of the leaves that are weights of memories, [B, H, O, I]: memory, anchor, momentum, and the
    memory from before a segment that mac keeps. Kept pairs are no weights."""
    names = []
    for i, layer in enumerate(state.layers):
        if layer.memory is None or layer.memory.spec.keeps_pairs:
            continue
        memory = layer.memory
        for group in ("memory", "anchor", "momentum"):
            names += [f"layers.{i}.memory.{group}.{key}" for key in getattr(memory, group)]
        starts = [f"start.{key}" for key in memory.memory if f"start.{key}" in layer.tails]
        names += [f"layers.{i}.tails.{start}" for start in starts]
    return names


def to_quantize(state: StreamState) -> list[str]:
    """The fast weights, of which there must be some."""
    names = fast_weights(state)
    if not names:
        raise ValueError(
            "this model has no fast weights to quantise: its memory is kept pairs or attention; save it "
            "without bits"
        )
    return names


def pack(x: Tensor, bits: int) -> Packed:
    """x: [..., O, I] of any float dtype; the result lies on the CPU."""
    limit = _limit(bits)
    x = x.detach().cpu()
    largest = x.abs().amax(-1).float()
    if not bool((2 * largest).isfinite().all()):
        raise ValueError(
            "the memory holds NaN, infinity or numbers near the end of fp32, which cannot be quantised; save "
            "it in full, or go back to a memory from before it diverged"
        )
    scale = _round_up(largest / limit)
    divisor = torch.where(scale == 0, 1, scale).unsqueeze(-1)
    values = (x / divisor).round().clamp(-limit, limit).to(torch.int8)
    return Packed(values if bits == 8 else _two_per_byte(values), scale)


def unpack(packed: Packed, bits: int, width: int) -> Tensor:
    """The stored integers times their scales, exactly. width: I.  -> [..., O, I] fp32"""
    limit = _limit(bits)
    values = packed.values if bits == 8 else _one_per_byte(packed.values)[..., :width]
    if bool((values < -limit).any()):
        raise ValueError(
            f"a quantised memory holds integers below {-limit}, wanted {-limit} to {limit}"
        )
    return values.float() * packed.scale.unsqueeze(-1)


def relative_error(given: Tensor, stored: Tensor) -> float:
    """|stored - given| / |given|, 0 where both are zero."""
    given = given.detach().cpu().double()
    norm = float(given.norm())
    return float((stored.double() - given).norm()) / norm if norm else 0.0


def _limit(bits: int) -> int:
    if bits not in LIMITS:
        raise ValueError(f"bits is {bits}, wanted 8 or 4")
    return LIMITS[bits]


def _round_up(scale: Tensor) -> Tensor:
    """To the next number with 17 significant bits; what is below the normal range of fp32 becomes zero."""
    mask = (1 << SPARE) - 1
    rounded = ((scale.view(torch.int32) + mask) & ~mask).view(torch.float32)
    return torch.where(scale >= torch.finfo(torch.float32).tiny, rounded, 0)


def _two_per_byte(values: Tensor) -> Tensor:
    """[..., I] in -7 to 7 -> [..., ceil(I / 2)] uint8, the even entries in the low halves."""
    shifted = (pad(values, (0, values.shape[-1] % 2)) + 8).to(torch.uint8)
    return shifted[..., 0::2] | (shifted[..., 1::2] << 4)


def _one_per_byte(packed: Tensor) -> Tensor:
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return pairs.to(torch.int8) - 8
