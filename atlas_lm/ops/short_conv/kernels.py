"""A program takes a stretch of tokens of one row, and a stretch of channels.

Columns are counted as in [tail, x]: column m is tail[m] below SIZE - 1, then x[m - SIZE + 1]; token t
mixes columns t to t + SIZE - 1. A part's channels begin at `first` in weight and tail [.., TOTAL].
"""

import triton
import triton.language as tl


@triton.jit
def stretch(columns, C, TOKENS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """Row, first column, channels and which of them there are, of this program."""
    tiles = tl.cdiv(columns, TOKENS)
    tile = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    channel = tl.program_id(1) * STEP + lane
    return (
        (tile // tiles).to(tl.int64),
        tile % tiles * TOKENS,
        channel,
        (lane < STEP) & (channel < C),
    )


@triton.jit
def columns_at(
    x, tail, b, m0, i, channel, inside, T, C, first, TOTAL, reaches_tail, SIZE: tl.constexpr
):  # fmt: skip
    """Columns m0 + i of these channels in fp32; zero beyond the ends, and before a stream. i: [TOKENS]"""
    t = m0 + i - (SIZE - 1)
    there = ((t >= 0) & (t < T))[:, None] & inside[None, :]
    place = x + (b * T + m0 - (SIZE - 1)) * C + i[:, None] * C + channel[None, :]
    value = tl.load(place, mask=there, other=0.0).to(tl.float32)
    if tail is not None:
        if reaches_tail:
            before = ((m0 + i >= 0) & (t < 0))[:, None] & inside[None, :]
            old = tail + (b * (SIZE - 1) + m0 + i[:, None]) * TOTAL + first + channel[None, :]
            value += tl.load(old, mask=before, other=0.0).to(tl.float32)
    return value


@triton.jit
def tap(weight, j, channel, inside, first, TOTAL):
    """Weights of column t + j, [1, WIDTH] in fp32"""
    w = tl.load(weight + j * TOTAL + first + channel, mask=inside, other=0.0)
    return w.to(tl.float32)[None, :]


@triton.jit
def mixed(
    x, weight, tail, b, t0, channel, inside, T, C, first, TOTAL,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The convolution itself, [TOKENS, WIDTH] from token t0 on."""
    i = tl.arange(0, TOKENS)
    z = tl.zeros([TOKENS, WIDTH], tl.float32)
    for j in tl.static_range(SIZE):
        found = columns_at(
            x, tail, b, t0, i + j, channel, inside, T, C, first, TOTAL, t0 < SIZE - 1, SIZE
        )
        z += tap(weight, j, channel, inside, first, TOTAL) * found
    return z


@triton.jit
def forward_kernel(
    x, weight, tail, count, y, after, T, C, first, TOTAL,
    SIZE: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    b, t0, channel, inside = stretch(T, C, TOKENS, STEP, WIDTH)
    z = mixed(x, weight, tail, b, t0, channel, inside, T, C, first, TOTAL, TOKENS, WIDTH, SIZE)
    s = z * tl.sigmoid(z)
    if UNIT:
        length = tl.sqrt(tl.sum(s * s, 1))
        s = s / tl.maximum(length, EPS)[:, None]
    i = tl.arange(0, TOKENS)
    place = y + (b * T + t0) * C + i[:, None] * C + channel[None, :]
    there = (t0 + i < T)[:, None] & inside[None, :]
    tl.store(place, s.to(y.dtype.element_ty), mask=there)
    if t0 == 0:  # the first program of a row also hands on the row's last columns that count
        end = T
        if count is not None:
            end = tl.load(count + b)
        one = tl.arange(0, 1)
        for j in tl.static_range(SIZE - 1):
            last = columns_at(
                x, tail, b, end + j, one, channel, inside, T, C, first, TOTAL, True, SIZE
            )
            kept = after + (b * (SIZE - 1) + j) * TOTAL + first + channel[None, :]
            tl.store(kept, last.to(after.dtype.element_ty), mask=inside[None, :])


@triton.jit
def dz_kernel(
    x, weight, tail, dy, dz, shares, T, C, first, TOTAL,
    SIZE: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradient of the sums before SiLU, and this program's share in that of the weight."""
    b, t0, channel, inside = stretch(T, C, TOKENS, STEP, WIDTH)
    z = mixed(x, weight, tail, b, t0, channel, inside, T, C, first, TOTAL, TOKENS, WIDTH, SIZE)
    i = tl.arange(0, TOKENS)
    there = (t0 + i < T)[:, None] & inside[None, :]
    place = (b * T + t0) * C + i[:, None] * C + channel[None, :]
    slope = tl.load(dy + place, mask=there, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z)
    if UNIT:
        s = z * gate
        length = tl.sqrt(tl.sum(s * s, 1))[:, None]
        along = tl.sum(slope * s, 1)[:, None]
        floor = tl.maximum(length, EPS)
        # below the floor the length is no longer divided by, and has no slope
        slope = (slope - tl.where(length > EPS, s * along / (floor * floor), 0.0)) / floor
    slope = slope * gate * (1.0 + z * (1.0 - gate))
    tl.store(dz + place, slope.to(dz.dtype.element_ty), mask=there)
    for j in tl.static_range(SIZE):
        found = columns_at(
            x, tail, b, t0, i + j, channel, inside, T, C, first, TOTAL, t0 < SIZE - 1, SIZE
        )
        share = shares + (tl.program_id(0).to(tl.int64) * SIZE + j) * C + channel
        tl.store(share, tl.sum(slope * found, 0), mask=inside)


@triton.jit
def dx_kernel(
    dz, weight, dafter, count, dx, dtail, T, C, first, TOTAL,
    SIZE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradient of every column: of the tokens that mix it, and of the next tail if it went there."""
    b, m0, channel, inside = stretch(T + SIZE - 1, C, TOKENS, STEP, WIDTH)
    i = tl.arange(0, TOKENS)
    slope = tl.zeros([TOKENS, WIDTH], tl.float32)
    for j in tl.static_range(SIZE):
        t = m0 + i - j
        there = ((t >= 0) & (t < T))[:, None] & inside[None, :]
        place = dz + (b * T + m0 - j) * C + i[:, None] * C + channel[None, :]
        asked = tl.load(place, mask=there, other=0.0).to(tl.float32)
        slope += tap(weight, j, channel, inside, first, TOTAL) * asked
    end = T
    if count is not None:
        end = tl.load(count + b)
    if (m0 + TOKENS > end) & (m0 < end + SIZE - 1):
        k = m0 + i - end
        kept = ((k >= 0) & (k < SIZE - 1))[:, None] & inside[None, :]
        asked_after = dafter + (b * (SIZE - 1) + k[:, None]) * TOTAL + first + channel[None, :]
        slope += tl.load(asked_after, mask=kept, other=0.0).to(tl.float32)
    t = m0 + i - (SIZE - 1)
    there = ((t >= 0) & (t < T))[:, None] & inside[None, :]
    place = dx + (b * T + m0 - (SIZE - 1)) * C + i[:, None] * C + channel[None, :]
    tl.store(place, slope.to(dx.dtype.element_ty), mask=there)
    if dtail is not None:
        if m0 < SIZE - 1:
            before = (t < 0)[:, None] & inside[None, :]
            asked_before = (
                dtail + (b * (SIZE - 1) + m0 + i[:, None]) * TOTAL + first + channel[None, :]
            )
            tl.store(asked_before, slope.to(dtail.dtype.element_ty), mask=before)
