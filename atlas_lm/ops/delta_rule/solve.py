"""Kernels forward: solve a tile's errors for any memory before it, and read that memory.

Tokens t of a tile and places j of their windows make ROWS rows (t, j), CP places per token, C of them used.
With X, V the pairs of the rows, p the share of the memory before the tile that a row's slope sees and
N[(t, j), (s, j')] = point[t, s] gamma_{s,j'} X.X', the errors are E = T (diag(p) X M^T - V) with
T = (I + N)^{-1}. PRECISION is for dots of inputs, SHARP for dots of fp32 on the way to T.
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
def load_rows(base, first, row, there, column, H: tl.constexpr, h, WIDTH: tl.constexpr):
    """Rows first + row of a flat tensor [rows, H, WIDTH], zero where not `there`. -> [rows, columns]

    first is 64 bits wide and alone, row 32: an address per number in 64 bits would fill the registers."""
    base += (first * H + h) * WIDTH
    mask = there[:, None] & (column < WIDTH)[None, :]
    place = (row * (H * WIDTH))[:, None] + column[None, :]
    return tl.load(base + place, mask=mask, other=0.0)


@triton.jit
def store_rows(base, value, first, row, there, column, H: tl.constexpr, h, WIDTH: tl.constexpr):
    base += (first * H + h) * WIDTH
    mask = there[:, None] & (column < WIDTH)[None, :]
    place = (row * (H * WIDTH))[:, None] + column[None, :]
    tl.store(base + place, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def row_gates(gamma, row0, h, t, j, there, H: tl.constexpr, C: tl.constexpr):
    """gamma of each row, zero where there is no pair."""
    if C == 1:
        g = there.to(tl.float32)
    else:
        g = tl.load(gamma + (row0 * H + h) * C + t * (H * C) + j, mask=there, other=0.0)
    return g


@triton.jit
def write_weights(mix, t, CHUNK: tl.constexpr):
    """[CHUNK, ROWS]: the weight of each row's token in every memory of the tile, zero in earlier ones.
    mix: at the tile"""
    token = tl.arange(0, CHUNK)
    weight = tl.load(mix + token[:, None] * CHUNK + t[None, :])
    return tl.where(t[None, :] <= token[:, None], weight, 0.0)  # unwritten elsewhere


@triton.jit
def slope_weights(mix, t, CHUNK: tl.constexpr, AFTER: tl.constexpr):
    """point [ROWS, ROWS]: the same in the memory at which each row takes its slope."""
    at = t if AFTER else tl.maximum(t - 1, 0)
    weight = tl.load(mix + at[:, None] * CHUNK + t[None, :])
    return tl.where(t[:, None] > t[None, :], weight, 0.0)


@triton.jit
def key_products(
    x, k, pair0, pair, there,
    H: tl.constexpr, h, F: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X X^T [ROWS, ROWS]; x: the first block of X."""
    total = tl.dot(x, tl.trans(x), input_precision=PRECISION)
    for block in tl.static_range(1, (F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        more = load_rows(k, pair0, pair, there, f, H, h, F)
        total = tl.dot(more, tl.trans(more), total, input_precision=PRECISION)
    return total


@triton.jit
def query_products(
    x, q, k, row0, token, valid, pair0, pair, there,
    H: tl.constexpr, h, F: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q X^T [CHUNK, ROWS]; x: the first block of X."""
    reads = load_rows(q, row0, token, valid, tl.arange(0, BF), H, h, F)
    total = tl.dot(reads, tl.trans(x), input_precision=PRECISION)
    for block in tl.static_range(1, (F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        reads = load_rows(q, row0, token, valid, f, H, h, F)
        more = load_rows(k, pair0, pair, there, f, H, h, F)
        total = tl.dot(reads, tl.trans(more), total, input_precision=PRECISION)
    return total


@triton.jit
def doubled(d, n, r, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses of I + N's diagonal blocks of SIZE to those of 2 SIZE; r: numbers of the rows.

    [[A, 0], [B, C]]^{-1} = D - D B D with D = diag(A, C)^{-1}: no powers of N, which would grow."""
    row, column = r[:, None] // SIZE, r[None, :] // SIZE
    near = (row // 2 == column // 2) & (row != column)
    half = tl.dot(d, tl.where(near, n, 0.0), input_precision=PRECISION)
    return d - tl.dot(half, d, input_precision=PRECISION)


@triton.jit
def unit_inverse(n, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + N)^{-1} for N [ROWS, ROWS] strictly lower, from blocks of 2 up; those of 16 side by side."""
    BLOCKS: tl.constexpr = ROWS // 16
    block, r = tl.arange(0, BLOCKS), tl.arange(0, 16)
    own = block[:, None, None, None] == block[None, None, :, None]
    small = tl.sum(tl.where(own, tl.reshape(n, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    d = tl.where(r[:, None] == r[None, :], 1.0, 0.0)[None, :, :]
    d -= tl.where((r[:, None] // 2 == r[None, :] // 2)[None, :, :], small, 0.0)
    d = doubled(d, small, r, 2, PRECISION)
    d = doubled(d, small, r, 4, PRECISION)
    d = doubled(d, small, r, 8, PRECISION)
    d = tl.reshape(tl.where(own, d[:, :, None, :], 0.0), [ROWS, ROWS])
    d = doubled(d, n, tl.arange(0, ROWS), 16, PRECISION)
    return doubled(d, n, tl.arange(0, ROWS), 32, PRECISION)


@triton.jit
def solve_kernel(
    q, k, v, gamma, mix, keep,
    left, right, queries, own, inverse,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr, SHARP: tl.constexpr,
):  # fmt: skip
    """What a tile does to any memory M before it: M' = a M - (left M^T - right)^T X and
    y = queries M^T + own, with left, right per distinct pair of the tile."""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    ROWS: tl.constexpr = CHUNK * CP
    NF: tl.constexpr = (F + BF - 1) // BF
    LAG: tl.constexpr = 0 if AFTER else 1
    tokens, row0, pair0, oldest = find_tile(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if tokens <= 0:
        return
    r, token = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    t, j = r // CP, r % CP
    pair = t - j
    there, valid = (t < tokens) & (j < C) & (pair >= oldest), token < tokens
    at = i * H + h
    mix += at * CHUNK * CHUNK
    keep += at * CHUNK
    g = row_gates(gamma, row0, h, t, j, there, H, C)
    p = tl.load(keep + t - LAG, mask=t >= LAG, other=1.0)
    x = load_rows(k, pair0, pair, there, tl.arange(0, BF), H, h, F)
    coupling = key_products(x, k, pair0, pair, there, H, h, F, BF, PRECISION)
    coupling *= slope_weights(mix, t, CHUNK, AFTER) * g[None, :]
    solved = unit_inverse(coupling, ROWS, SHARP)
    store_rows(inverse, solved, at * ROWS, r, r < ROWS, r, 1, 0, ROWS)
    read = query_products(x, q, k, row0, token, valid, pair0, pair, there, H, h, F, BF, PRECISION)
    read *= write_weights(mix, t, CHUNK) * g[None, :]
    read = tl.dot(read, solved, input_precision=SHARP)
    last = tl.load(mix + (CHUNK - 1) * CHUNK + t) * g
    write = last[:, None] * solved
    N: tl.constexpr = HALO + CHUNK
    m = tl.arange(0, PAIRS)
    if C > 1:
        of_pair = (m[:, None] - HALO == pair[None, :]) & there[None, :]
        write = tl.dot(of_pair.to(tl.float32), write, input_precision=SHARP)
    inside = m < N
    by_feature = (write * p[None, :]).to(k.dtype.element_ty)
    read_feature = (read * p[None, :]).to(k.dtype.element_ty)
    a = tl.load(keep + token)
    for block in tl.static_range(NF):
        f = block * BF + tl.arange(0, BF)
        reads = load_rows(q, row0, token, valid, f, H, h, F)
        if NF > 1:
            x = load_rows(k, pair0, pair, there, f, H, h, F)
        moved = tl.dot(by_feature, x, input_precision=PRECISION)
        store_rows(left, moved, at * N, m, inside, f, 1, 0, F)
        moved = a[:, None] * reads - tl.dot(read_feature, x, input_precision=PRECISION)
        store_rows(queries, moved, row0, token, valid, f, H, h, F)
    by_value, read_value = write.to(v.dtype.element_ty), read.to(v.dtype.element_ty)
    for block in tl.static_range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        values = load_rows(v, pair0, pair, there, column, H, h, V)
        target = tl.dot(by_value, values, input_precision=PRECISION)
        store_rows(right, target, at * N, m, inside, column, 1, 0, V)
        target = tl.dot(read_value, values, input_precision=PRECISION)
        store_rows(own, target, row0, token, valid, column, H, h, V)


@triton.jit
def read_kernel(
    queries, borders, y,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr, SHARP: tl.constexpr,
):  # fmt: skip
    """y += queries M^T for one block of values; borders: [NC, H, F, V]."""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    tokens, row0, _, _ = find_tile(i, start, pair_start, length, past, first_chunk, sequence, CHUNK)
    if tokens <= 0:
        return
    token = tl.arange(0, CHUNK)
    valid = token < tokens
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    total = load_rows(y, row0, token, valid, column, H, h, V).to(tl.float32)
    for block in tl.static_range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        reads = load_rows(queries, row0, token, valid, f, H, h, F)
        memory = load_rows(borders, (i * H + h) * F, f, f < F, column, 1, 0, V)
        total = tl.dot(reads, memory, total, input_precision=PRECISION)
    store_rows(y, total, row0, token, valid, column, H, h, V)
