"""From a block's projections to the memory's token in one launch: convolution, SiLU, lengths, gates."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atlas_lm.ops.memory_step.rule import Columns


@dataclass(frozen=True, eq=False)
class Prepared:
    """A token on its way into the memory, fp32."""

    x: Tensor  # [B, H, 2, K]: k and q
    k: Tensor  # [B, H, K]
    v: Tensor  # [B, H, V]
    gates: dict[str, Tensor]  # [B, H, values]


def prepare(
    layout: Columns,
    columns: Tensor,
    tail: Tensor,
    conv: Tensor,
    ups: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    tail_out: Tensor,
) -> Prepared:
    """columns: [B, n] contiguous   tail, tail_out: [B, size-1, 2 H K + H V]   conv: [size, 2 H K + H V]
    ups: [H values, rank] and biases: [H, values] fp32 of each gate, in the layout's order
    """
    rows, heads, wide = columns.shape[0], layout.heads, triton.next_power_of_2

    def empty(*shape: int) -> Tensor:
        return columns.new_empty(rows, heads, *shape, dtype=torch.float32)

    made = Prepared(
        x=empty(2, layout.key),
        k=empty(layout.key),
        v=empty(layout.value),
        gates={
            name: empty(values) for name, values in zip(layout.gates, layout.values, strict=True)
        },
    )
    prepare_kernel[rows, heads, 3 + len(layout.gates)](
        columns,
        columns.shape[1],
        tail,
        conv,
        ups or (None,),
        biases or (None,),
        tail_out,
        made.x,
        made.k,
        made.v,
        tuple(made.gates.values()) or (None,),
        HEADS=heads,
        K=layout.key,
        V=layout.value,
        KEY=wide(layout.key),
        VALUE=wide(layout.value),
        CONV=conv.shape[0],
        RANK=layout.rank,
        INNER=wide(layout.rank),
        GATES=layout.gates,
        VALUES=layout.values,
        WINDOW=layout.window,
        MARGIN=layout.margin,
        STEP=layout.step,
        UNIT_KEYS=layout.unit_keys,
        UNIT_FEATURES=layout.unit_features,
        num_warps=1,
    )
    return made


@triton.jit(do_not_specialize=["width"])
def prepare_kernel(
    columns, width, tail, conv, ups, biases, tail_out, x, k, v, gates,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    CONV: tl.constexpr, RANK: tl.constexpr, INNER: tl.constexpr, GATES: tl.constexpr,
    VALUES: tl.constexpr, WINDOW: tl.constexpr, MARGIN: tl.constexpr, STEP: tl.constexpr,
    UNIT_KEYS: tl.constexpr, UNIT_FEATURES: tl.constexpr,
):  # fmt: skip
    """One program per row, head and part: query, key, value, and each gate, so that none waits for what
    another loads."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n = row * HEADS + head
    WIDE: tl.constexpr = HEADS * (2 * K + V)
    here, past = columns + row * width, row * (CONV - 1) * WIDE
    tail, tail_out = tail + past, tail_out + past

    if part == 0:
        query = convolved(here, tail, conv, tail_out, head * K, WIDE, K, KEY, CONV)
        if UNIT_KEYS:
            query = unit(query)
        if UNIT_FEATURES:
            query = unit(query)
        store_row(x + (2 * n + 1) * K, query, K)
    elif part == 1:
        key = convolved(here, tail, conv, tail_out, (HEADS + head) * K, WIDE, K, KEY, CONV)
        if UNIT_KEYS:
            key = unit(key)
        store_row(k + n * K, key, K)
        if UNIT_FEATURES:
            key = unit(key)
        store_row(x + 2 * n * K, key, K)
    elif part == 2:
        first = 2 * HEADS * K + head * V
        store_row(v + n * V, convolved(here, tail, conv, tail_out, first, WIDE, V, VALUE, CONV), V)
    for i in tl.static_range(len(GATES)):
        if part == 3 + i:
            store_gate(
                here + WIDE + i * RANK, ups[i], biases[i], gates[i] + n * VALUES[i], head,
                tl.constexpr(GATES[i]), tl.constexpr(VALUES[i]), RANK, INNER, WINDOW,
                MARGIN, STEP,
            )  # fmt: skip


@triton.jit
def store_row(out, value, WIDTH: tl.constexpr):
    c = tl.arange(0, value.shape[0])
    tl.store(out + c, value, mask=c < WIDTH)


@triton.jit
def store_gate(
    low, up, bias, gate, head,
    NAME: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr, INNER: tl.constexpr,
    WINDOW: tl.constexpr, MARGIN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One gate of a head, COUNT values, from its inner values."""
    inner, value = (
        tl.arange(0, INNER)[None, :],
        tl.arange(0, triton.next_power_of_2(COUNT))[:, None],
    )
    mask = (value < COUNT) & (inner < RANK)
    w = tl.load(up + (head * COUNT + value) * RANK + inner, mask=mask, other=0.0)
    z = tl.load(low + inner, mask=inner < RANK, other=0.0)
    z = tl.sum(w.to(tl.float32) * z.to(tl.float32), axis=1, keep_dims=True)
    z = z.to(low.dtype.element_ty).to(tl.float32)  # as a layer between would have it
    b = tl.load(bias + head * COUNT + value, mask=value < COUNT, other=0.0)
    tl.store(gate + value, squash(z, b, NAME, WINDOW, MARGIN, STEP), mask=value < COUNT)


@triton.jit
def convolved(
    columns, tail, conv, tail_out, first,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CONV: tl.constexpr,
):  # fmt: skip
    """SiLU of the short convolution of some channels, in fp32; their tail moves on by one token."""
    c = first + tl.arange(0, PADDED)
    inside = tl.arange(0, PADDED) < WIDTH
    newest = tl.load(columns + c, mask=inside, other=0.0)
    weight = tl.load(conv + (CONV - 1) * WIDE + c, mask=inside, other=0.0)
    total = newest.to(tl.float32) * weight.to(tl.float32)
    for t in tl.static_range(CONV - 1):
        old = tl.load(tail + t * WIDE + c, mask=inside, other=0.0)
        weight = tl.load(conv + t * WIDE + c, mask=inside, other=0.0)
        total += old.to(tl.float32) * weight.to(tl.float32)
    for t in tl.static_range(CONV - 2):  # stored last: a store holds up the loads behind it
        old = tl.load(tail + (t + 1) * WIDE + c, mask=inside, other=0.0)
        tl.store(tail_out + t * WIDE + c, old, mask=inside)
    if CONV > 1:
        tl.store(tail_out + (CONV - 2) * WIDE + c, newest, mask=inside)
    return total * tl.sigmoid(total)


@triton.jit
def unit(x):
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, axis=0)), 1e-6)


@triton.jit
def squash(
    z, bias,
    NAME: tl.constexpr, WINDOW: tl.constexpr, MARGIN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """As `layers.gates` does."""
    if NAME == "log_alpha":
        return -tl.maximum(softplus(z + bias) - MARGIN, 0.0)
    elif NAME == "eta":
        if MARGIN > 0:
            return STEP / (1.0 - MARGIN) * tl.maximum(tl.sigmoid(z + bias) - MARGIN, 0.0)
        else:
            return 2.0 * tl.sigmoid(z) * tl.exp(bias)
    elif NAME == "theta":
        return 0.9999 * tl.sigmoid(z + bias)
    elif NAME == "gamma":
        return tl.sigmoid(z + bias) / WINDOW
    else:
        return softplus(z + bias)


@triton.jit
def softplus(x):
    """log(1 + e^x), exact for small e^x too: Kahan's log1p."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.maximum(x, 0.0) + small
