"""A program takes a stretch of tokens of one row and one head, x [ROWS, K] of them.

Factors of a monomial are columns of x; -1 stands for none. With UNIT, x is brought to unit length first.
Which columns and which coefficients: `tables.py`.
"""

import triton
import triton.language as tl


@triton.jit
def stretch(T, H, ROWS: tl.constexpr):
    """Row b, tokens t [ROWS] and head h of this program, in int64, and which of the tokens there are."""
    tiles = tl.cdiv(T, ROWS)
    tile, h = tl.program_id(0) // H, tl.program_id(0) % H
    t = tile % tiles * ROWS + tl.arange(0, ROWS)
    return (tile // tiles).to(tl.int64), t.to(tl.int64), h.to(tl.int64), t < T


@triton.jit
def lengths(begins, there, K: tl.constexpr, KEYS: tl.constexpr):
    """The vectors [ROWS, KEYS] in fp32, and how long they are [ROWS, 1]."""
    k = tl.arange(0, KEYS)
    found = tl.load(begins[:, None] + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
    found = found.to(tl.float32)
    return found, tl.sqrt(tl.sum(found * found, 1))[:, None]


@triton.jit
def forward_kernel(
    x, amplitudes, columns, totals, roots, y, T, H, row, token, head, width,
    EPS: tl.constexpr, K: tl.constexpr, F: tl.constexpr, DEGREE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, width], zero from feature F on. row, token, head: strides of x"""
    b, t, h, there = stretch(T, H, ROWS)
    begins = x + b * row + t * token + h * head
    scale = tl.full([ROWS, 1], 1.0, tl.float32)
    if UNIT:
        _, length = lengths(begins, there, K, KEYS)
        scale = 1.0 / tl.maximum(length, EPS)
    made = y + ((b * T + t) * H + h) * width
    for first in range(0, width, FEATURES):
        f = first + tl.arange(0, FEATURES)
        known = f < F
        root = tl.load(roots + f, mask=known, other=0.0)
        total = tl.load(totals + f, mask=known, other=0)
        root *= tl.load(amplitudes + h * (DEGREE + 1) + total)
        value = tl.zeros([ROWS, FEATURES], tl.float32) + root[None, :]
        for i in tl.static_range(DEGREE):
            column = tl.load(columns + i * F + f, mask=known, other=-1)
            used = there[:, None] & (column >= 0)[None, :]
            factor = tl.load(begins[:, None] + column[None, :], mask=used, other=0.0)
            value *= tl.where(used, factor.to(tl.float32) * scale, 1.0)
        tl.store(
            made[:, None] + f[None, :],
            value.to(y.dtype.element_ty),
            mask=there[:, None] & (f < width)[None, :],
        )


@triton.jit
def backward_kernel(
    x, amplitudes, lower, raised, slopes, dy, dx, shares,
    T, H, row, token, head, width,
    EPS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, DEGREE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, dx [B, T, H, K], and this program's share in that of its head's amplitudes.

    The slope in x_k of a monomial is a number times the monomial with one x_k less: so run over those of
    lower degree, and for each and all k read dy of what x_k raises it to. Of degree d, the slopes' inner
    product with x is d times the features' with dy (Euler), which the amplitude's gradient needs.
    """
    b, t, h, there = stretch(T, H, ROWS)
    begins = x + b * row + t * token + h * head
    value, length = lengths(begins, there, K, KEYS)
    scale = tl.full([ROWS, 1], 1.0, tl.float32)
    if UNIT:
        scale = 1.0 / tl.maximum(length, EPS)
        value *= scale
    k = tl.arange(0, KEYS)
    inside = there[:, None] & (k < K)[None, :]
    asked = dy + ((b * T + t) * H + h) * width
    share = shares + tl.program_id(0).to(tl.int64) * (DEGREE + 1)
    tl.store(share, tl.sum(tl.load(asked, mask=there, other=0.0).to(tl.float32), 0))
    slope = tl.zeros([ROWS, KEYS], tl.float32)
    first, last = 0, 1  # monomials of degree d - 1 in the table
    for d in tl.static_range(1, DEGREE + 1):
        found = tl.zeros([ROWS, KEYS], tl.float32)
        for m in range(first, last):
            f = tl.load(raised + m * K + k, mask=k < K, other=0)
            seen = tl.load(asked[:, None] + f[None, :], mask=inside, other=0.0).to(tl.float32)
            seen *= tl.load(slopes + m * K + k, mask=k < K, other=0.0)[None, :]
            for i in tl.static_range(d - 1):
                column = tl.load(lower + i * M + m)
                factor = tl.load(begins + column, mask=there, other=0.0).to(tl.float32)
                seen *= factor[:, None] * scale
            found += seen
        tl.store(share + d, tl.sum(tl.sum(found * value, 1), 0) / d)
        slope += tl.load(amplitudes + h * (DEGREE + 1) + d) * found
        first, last = last, last * (K + d) // d
    if UNIT:
        along = tl.sum(slope * value, 1)[:, None]
        # below the floor the length is no longer divided by, and has no slope
        slope = (slope - tl.where(length > EPS, value * along, 0.0)) * scale
    place = dx + ((b * T + t) * H + h) * K
    tl.store(place[:, None] + k[None, :], slope.to(dx.dtype.element_ty), mask=inside)
