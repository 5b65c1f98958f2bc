"""What the kernels of a two-layer memory share: where tiles lie, the activation, the slopes of a chunk's pairs.

The pairs of a chunk stand in one tile of N rows, a power of two: its own in the last CHUNK rows, those before
it that its windows still hold above. Tensors by chunk, [NC, H, PAIRS, ...], leave out the first N - PAIRS rows.
Weights are [D, F] (w0, gate) and [V, D] (w1); D, the hidden units, is cut into blocks of BD, F into blocks of BF.
"""

import triton
import triton.language as tl


@triton.jit
def activation(a, KIND: tl.constexpr, FAST: tl.constexpr):
    """s(a), s'(a), s''(a)"""
    if KIND == "gelu":
        bell = tl.exp(-0.5 * a * a)
        if FAST:
            # 1 - erf by Abramowitz and Stegun 7.1.26, off by 1.5e-7: its exponential is the bell's
            t = 1.0 / (1.0 + 0.23164190 * tl.abs(a))
            tail = (0.5 * 1.061405429 * t - 0.5 * 1.453152027) * t + 0.5 * 1.421413741
            tail = ((tail * t - 0.5 * 0.284496736) * t + 0.5 * 0.254829592) * t * bell
            below = tl.where(a > 0, 1.0 - tail, tail)
        else:
            below = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))
        density = bell * 0.3989422804014327
        return a * below, below + a * density, density * (2.0 - a * a)
    else:
        s = tl.sigmoid(a)
        slope = s * (1.0 - s)
        return a * s, s + a * slope, slope * (2.0 + a * (1.0 - 2.0 * s))


@triton.jit
def weight_tile(base, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of a weight [ROWS, WIDTH]; zero outside."""
    mask = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_weight(base, value, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    mask = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    tl.store(
        base + row[:, None] * WIDTH + column[None, :], value.to(base.dtype.element_ty), mask=mask
    )


@triton.jit
def chunk_tile(base, place, r, column, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a tensor by chunk, [NC, H, PAIRS, WIDTH], as the tile of pairs has them. place: chunk * H + h"""
    row = r - (r.shape[0] - PAIRS)
    mask = (row >= 0)[:, None] & (column < WIDTH)[None, :]
    here = base + place * (PAIRS * WIDTH)
    return tl.load(here + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_chunk(base, value, place, r, column, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    row = r - (r.shape[0] - PAIRS)
    mask = (row >= 0)[:, None] & (column < WIDTH)[None, :]
    here = base + place * (PAIRS * WIDTH)
    tl.store(here + row[:, None] * WIDTH + column[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def chunk_row(base, place, r, PAIRS: tl.constexpr):
    """One number per pair, of a tensor [places, PAIRS]."""
    row = r - (r.shape[0] - PAIRS)
    return tl.load(base + place * PAIRS + row, mask=row >= 0, other=0.0)


@triton.jit
def pair_rows(
    base, first, t0, bound, end, h, column,
    N: tl.constexpr, CHUNK: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The pairs of the chunk that begins at t0, [N, columns] of a flat tensor; zero before `bound` and from `end` on."""
    r = tl.arange(0, N)
    pair = t0 + CHUNK - N + r
    mask = ((pair >= bound) & (pair < end))[:, None] & (column < WIDTH)[None, :]
    here = base + ((first + t0 + CHUNK - N) * H + h) * WIDTH
    return tl.load(here + r[:, None] * (H * WIDTH) + column[None, :], mask=mask, other=0.0)


@triton.jit
def hidden_units(
    x, borders, first, t0, bound, end, h, place, d,
    N: tl.constexpr, CHUNK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BF: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pre-activations of some hidden units at the memory before the chunk, and their gates, [N, len d]."""
    a = tl.zeros([N, d.shape[0]], tl.float32)
    g = a
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        tile = pair_rows(x, first, t0, bound, end, h, f, N, CHUNK, H, F)
        w = weight_tile(borders[0] + place * (D * F), d, f, D, F)
        a += tl.dot(tile, tl.trans(w), input_precision=PRECISION)
        if GATED:
            w = weight_tile(borders[2] + place * (D * F), d, f, D, F)
            g += tl.dot(tile, tl.trans(w), input_precision=PRECISION)
    return a, g


@triton.jit
def gathered(
    part, mail, arrived, group, slot, k, SLICES: tl.constexpr, N: tl.constexpr, BV: tl.constexpr
):
    """The sum of `part` [N, BV] over the programs that share a head, in their order, the same in all.

    mail: [groups, 2, SLICES, N, BV]; rounds k take turns with two boxes, so nobody writes where another still reads.
    arrived: [groups], how often programs have posted."""
    place = tl.arange(0, N)[:, None] * BV + tl.arange(0, BV)[None, :]
    box = mail + (group * 2 + k % 2) * (SLICES * N * BV)
    tl.store(box + slot * (N * BV) + place, part)
    tl.debug_barrier()
    tl.atomic_add(arrived + group, 1, sem="release")
    while tl.atomic_add(arrived + group, 0, sem="acquire") < (k + 1) * SLICES:
        pass
    tl.debug_barrier()
    total = tl.load(box + place, cache_modifier=".cg")
    for other in range(1, SLICES):
        total += tl.load(box + other * (N * BV) + place, cache_modifier=".cg")
    return total
