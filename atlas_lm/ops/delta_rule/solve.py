"""Kernels forward: solve a tile's errors for any memory before it, and read that memory.

Tokens t of a tile and places j of their windows make ROWS rows (t, j), CP places per token, C of them used.
With X, V the pairs of the rows, p the share of the memory before the tile that a row's slope sees and
N[(t, j), (s, j')] = point[t, s] gamma_{s,j'} X.X', the errors are E = T (diag(p) X M^T - V), T = (I + N)^{-1}.
"""

import triton
import triton.language as tl


@triton.jit
def find_tile(
    i, start, pair_start, length, past, first_chunk, sequence, CHUNK: tl.constexpr
):  # fmt: skip
    """Tokens left from the tile's first on, its rows in q and k, and its oldest pair counted from it."""
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    left = tl.load(length + n) - t0
    return left, tl.load(start + n) + t0, tl.load(pair_start + n) + t0, -tl.load(past + n) - t0


@triton.jit
def load_rows(base, row, there, column, H: tl.constexpr, h, WIDTH: tl.constexpr):
    """Rows of a flat tensor [rows, H, WIDTH], zero where `there` is false. -> [rows, columns]"""
    mask = there[:, None] & (column < WIDTH)[None, :]
    place = (row.to(tl.int64) * H + h) * WIDTH
    return tl.load(base + place[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, value, row, there, column, H: tl.constexpr, h, WIDTH: tl.constexpr):
    mask = there[:, None] & (column < WIDTH)[None, :]
    place = (row.to(tl.int64) * H + h) * WIDTH
    pointers = base + place[:, None] + column[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def tile_gates(
    mix, keep, gamma, row0, h, t, j, there,
    H: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """point [ROWS, ROWS] and p [ROWS] where slopes are taken, gamma of the rows, and the weights
    [CHUNK, ROWS] of their tokens in every memory of the tile. mix, keep: at the tile."""
    LAG: tl.constexpr = 0 if AFTER else 1
    before = t[:, None] > t[None, :]
    point = tl.load(mix + (t - LAG)[:, None] * CHUNK + t[None, :], mask=before, other=0.0)
    p = tl.load(keep + t - LAG, mask=t >= LAG, other=1.0)
    token = tl.arange(0, CHUNK)
    causal = token[:, None] >= t[None, :]
    weight = tl.load(mix + token[:, None] * CHUNK + t[None, :], mask=causal, other=0.0)
    g = there.to(tl.float32)
    if C > 1:
        g = tl.load(gamma + ((row0 + t) * H + h) * C + j, mask=there, other=0.0)
    return point, p, g, weight


@triton.jit
def unit_inverse(n, ROWS: tl.constexpr):
    """(I + N)^{-1}, N [ROWS, ROWS] strictly lower: blocks of 16 by substitution, then twice doubled.

    [[A, 0], [B, C]]^{-1} = D - D B D with D = diag(A, C)^{-1}: no powers of N, which would grow.
    """
    BLOCKS: tl.constexpr = ROWS // 16
    block, r = tl.arange(0, BLOCKS), tl.arange(0, 16)
    own = block[:, None, None, None] == block[None, None, :, None]
    small = tl.sum(tl.where(own, tl.reshape(n, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    unit = tl.where(r[:, None] == r[None, :], 1.0, 0.0)[None, :, :]
    inverse = unit - tl.where(r[None, None, :] == 0, small, 0.0)
    for i in tl.static_range(1, 15):
        column = tl.sum(tl.where(r[None, None, :] == i, small, 0.0), 2)
        row = tl.sum(tl.where(r[None, :, None] == i, inverse, 0.0), 1)
        inverse -= column[:, :, None] * row[:, None, :]
    d = tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), [ROWS, ROWS])
    b = tl.arange(0, ROWS) // 16
    near = (b[:, None] // 2 == b[None, :] // 2) & (b[:, None] != b[None, :])
    half = tl.dot(d, tl.where(near, n, 0.0), input_precision="tf32x3")
    d -= tl.dot(half, d, input_precision="tf32x3")
    far = b[:, None] // 2 != b[None, :] // 2
    half = tl.dot(d, tl.where(far, n, 0.0), input_precision="tf32x3")
    return d - tl.dot(half, d, input_precision="tf32x3")


@triton.jit
def solve_kernel(
    q, k, v, gamma, mix, keep,
    left, right, queries, own, inverse,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a tile does to any memory M before it: M' = a M - (left M^T - right)^T X and
    y = queries M^T + own, with left, right per distinct pair of the tile."""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    ROWS: tl.constexpr = CHUNK * CP
    NF: tl.constexpr = (F + BF - 1) // BF
    tokens, row0, pair0, oldest = find_tile(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if tokens <= 0:
        return
    r, token = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    t, j = r // CP, r % CP
    there, valid = (t < tokens) & (j < C) & (t - j >= oldest), token < tokens
    at = i * H + h
    gram = tl.zeros([ROWS, ROWS], tl.float32)
    cross = tl.zeros([CHUNK, ROWS], tl.float32)
    for block in tl.static_range(NF):
        f = block * BF + tl.arange(0, BF)
        x = load_rows(k, pair0 + t - j, there, f, H, h, F)
        reads = load_rows(q, row0 + token, valid, f, H, h, F)
        gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        cross = tl.dot(reads, tl.trans(x), cross, input_precision=PRECISION)
    mix += at * CHUNK * CHUNK
    keep += at * CHUNK
    point, p, g, weight = tile_gates(mix, keep, gamma, row0, h, t, j, there, H, CHUNK, C, AFTER)
    solved = unit_inverse(point * g[None, :] * gram, ROWS)
    tl.store(
        inverse + (at * ROWS + r)[:, None] * ROWS + r[None, :],
        solved.to(inverse.dtype.element_ty),
    )
    read = tl.dot(weight * g[None, :] * cross, solved, input_precision=PRECISION)
    last = tl.load(mix + (CHUNK - 1) * CHUNK + t) * g
    write = last[:, None] * solved
    N: tl.constexpr = HALO + CHUNK
    m = tl.arange(0, PAIRS)
    if C > 1:
        of_pair = (m[:, None] - HALO == (t - j)[None, :]) & there[None, :]
        write = tl.dot(of_pair.to(tl.float32), write, input_precision=PRECISION)
    out, inside = at * N + m, m < N
    by_feature = (write * p[None, :]).to(k.dtype.element_ty)
    read_feature = (read * p[None, :]).to(k.dtype.element_ty)
    a = tl.load(keep + token)
    for block in tl.static_range(NF):
        f = block * BF + tl.arange(0, BF)
        if NF > 1:
            x = load_rows(k, pair0 + t - j, there, f, H, h, F)
            reads = load_rows(q, row0 + token, valid, f, H, h, F)
        store_rows(left, tl.dot(by_feature, x, input_precision=PRECISION), out, inside, f, 1, 0, F)
        moved = a[:, None] * reads - tl.dot(read_feature, x, input_precision=PRECISION)
        store_rows(queries, moved, row0 + token, valid, f, H, h, F)
    by_value, read_value = write.to(v.dtype.element_ty), read.to(v.dtype.element_ty)
    for block in tl.static_range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        values = load_rows(v, pair0 + t - j, there, column, H, h, V)
        target = tl.dot(by_value, values, input_precision=PRECISION)
        store_rows(right, target, out, inside, column, 1, 0, V)
        target = tl.dot(read_value, values, input_precision=PRECISION)
        store_rows(own, target, row0 + token, valid, column, H, h, V)


@triton.jit
def read_kernel(
    queries, borders, y,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y += queries M^T for one block of values; borders: [NC, H, F, V]."""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    tokens, row0, _, _ = find_tile(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if tokens <= 0:
        return
    token = tl.arange(0, CHUNK)
    valid = token < tokens
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    total = load_rows(y, row0 + token, valid, column, H, h, V).to(tl.float32)
    for block in tl.static_range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        reads = load_rows(queries, row0 + token, valid, f, H, h, F)
        memory = load_rows(borders, (i * H + h) * F + f, f < F, column, 1, 0, V)
        total = tl.dot(reads, memory, total, input_precision=PRECISION)
    store_rows(y, total, row0 + token, valid, column, H, h, V)
