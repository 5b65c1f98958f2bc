"""A program takes whole rows [ROWS, V] of x and of its gate."""

import triton
import triton.language as tl


@triton.jit
def block(row0, rows, V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the entries of ROWS rows stand, and which of them there are."""
    row, value = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = (row0 + row < rows)[:, None] & (value < V)[None, :]
    return row0.to(tl.int64) * V + row[:, None] * V + value[None, :], there


@triton.jit
def weights(weight, V: tl.constexpr, WIDTH: tl.constexpr):
    value = tl.arange(0, WIDTH)
    return tl.load(weight + value, mask=value < V, other=0.0).to(tl.float32)[None, :]


@triton.jit
def scale(x, eps, V: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each row, [ROWS, 1]"""
    return (1.0 / tl.sqrt(tl.sum(x * x, 1) / V + eps))[:, None]


@triton.jit
def forward_kernel(
    x, gate, weight, y, rows, eps, V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place, there = block(tl.program_id(0) * ROWS, rows, V, ROWS, WIDTH)
    given = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=there, other=0.0).to(tl.float32)
    normed = given * scale(given, eps, V) * weights(weight, V, WIDTH)
    tl.store(y + place, (normed * g * tl.sigmoid(g)).to(y.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(
    x, gate, weight, dy, dx, dgate, shares, rows, eps,
    V: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of x and gate, and this program's share in that of the weight."""
    w = weights(weight, V, WIDTH)
    share = tl.zeros([ROWS, WIDTH], tl.float32)
    for turn in range(TURNS):
        place, there = block((tl.program_id(0) * TURNS + turn) * ROWS, rows, V, ROWS, WIDTH)
        given = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        g = tl.load(gate + place, mask=there, other=0.0).to(tl.float32)
        asked = tl.load(dy + place, mask=there, other=0.0).to(tl.float32)
        each = scale(given, eps, V)
        normed, opened = given * each, tl.sigmoid(g)
        slope = asked * normed * w * opened * (1.0 + g * (1.0 - opened))
        tl.store(dgate + place, slope.to(dgate.dtype.element_ty), mask=there)
        asked = asked * g * opened
        share += asked * normed
        asked = asked * w
        slope = each * (asked - normed * (tl.sum(asked * normed, 1) / V)[:, None])
        tl.store(dx + place, slope.to(dx.dtype.element_ty), mask=there)
    value = tl.arange(0, WIDTH)
    tl.store(shares + tl.program_id(0).to(tl.int64) * V + value, tl.sum(share, 0), mask=value < V)
