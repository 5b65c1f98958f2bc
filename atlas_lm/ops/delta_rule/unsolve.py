"""Kernels backward: from the memory before each tile and what is asked of the memory after it.

Letters as in `solve`; with errors E = T (diag(p) X M^T - V), w the last row of weights times gamma and
P = weights gamma Q X^T, the tile is y = a Q M^T - P E and M' = a_b M - E^T diag(w) X. T needs no gradient of
its own: with A = T^T dE, dN = -A E^T. Through E, not through left, right and queries: where a memory predicts
well, E is small and what those would add up to cancels.
"""

import triton
import triton.language as tl

from atlas_lm.ops.delta_rule.solve import (
    find_tile,
    key_products,
    load_rows,
    query_products,
    row_gates,
    slope_weights,
    store_rows,
    write_weights,
)


@triton.jit
def store_pairs(
    base, halo, value, of_pair, pair0, at, m, tokens, column, H: tl.constexpr, h, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the rows of each distinct pair; pairs of this tile go to their rows in [rows, H, WIDTH],
    pairs of the tile before to `halo` [NC, H, C - 1, WIDTH]."""
    if C > 1:
        narrow: tl.constexpr = base.dtype.element_ty
        value = tl.dot(of_pair.to(narrow), value.to(narrow), input_precision=PRECISION)
    pair = m - HALO
    own = (pair >= 0) & (pair < CHUNK) & (pair < tokens)
    store_rows(base, value, pair0, pair, own, column, H, h, WIDTH)
    if C > 1:
        place = pair + C - 1
        store_rows(halo, value, at * (C - 1), place, (pair < 0) & (pair > -C), column, 1, 0, WIDTH)


@triton.jit
def per_token(rows, CHUNK: tl.constexpr, CP: tl.constexpr):
    """Sum the places of each token: [n, CHUNK * CP] -> [n, CHUNK]."""
    if CP > 1:
        rows = tl.sum(tl.reshape(rows, [rows.shape[0], CHUNK, CP]), 2)
    return rows


@triton.jit
def read_gates(
    mix, g, dread, cross, dlast, t, CHUNK: tl.constexpr, CP: tl.constexpr, narrow: tl.constexpr
):  # fmt: skip
    """From dP [CHUNK, ROWS] and dw [ROWS] to the gradients of Q X^T, of mix [CHUNK, CHUNK] and of gamma."""
    token = tl.arange(0, CHUNK)
    weight = write_weights(mix, t, CHUNK)
    through = tl.where(token[:, None] >= t[None, :], dread * cross, 0.0)
    through += tl.where((token == CHUNK - 1)[:, None], dlast[None, :], 0.0)
    dcross = (dread * weight * g[None, :]).to(narrow)
    return dcross, per_token(through * g[None, :], CHUNK, CP), tl.sum(through * weight, 0)


@triton.jit
def slope_gates(
    mix, g, dg, dcoupling, gram, t,
    CHUNK: tl.constexpr, CP: tl.constexpr, AFTER: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """From dN [ROWS, ROWS], not masked yet, to the gradients of X X^T, both sides added, of the weights at
    which rows take their slopes [ROWS, CHUNK], and of gamma, added to dg."""
    point = slope_weights(mix, t, CHUNK, AFTER)
    through = tl.where(t[:, None] > t[None, :], dcoupling * gram, 0.0)
    dg += tl.sum(through * point, 0)
    dgram = dcoupling * point * g[None, :]
    dgram = (dgram + tl.trans(dgram)).to(narrow)
    return dgram, per_token(through * g[None, :], CHUNK, CP), dg


@triton.jit
def unsolve_kernel(
    q, k, v, gamma, mix, keep, inverse, borders, dy, dborders, dkeep_last,
    dq, dk, dv, dmix, dkeep, dgamma, halo_k, halo_v,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr, SHARP: tl.constexpr,
):  # fmt: skip
    """All gradients of a tile, those of q and k for one block of features. borders: M before the tile,
    dborders: the gradient of M', both [NC, H, F, V]; dkeep_last: [NC, H], of the last keep, through M';
    dkeep: [NC, H, blocks, CHUNK], to be summed.
    What does not depend on the block is stored by every block alike. Registers are short: four warps
    hold what the value blocks add up to and little else, so some products are made twice."""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    ROWS: tl.constexpr = CHUNK * CP
    NF: tl.constexpr = (F + BF - 1) // BF
    LAG: tl.constexpr = 0 if AFTER else 1
    narrow: tl.constexpr = k.dtype.element_ty
    tokens, row0, pair0, oldest = find_tile(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if tokens <= 0:
        return
    r, token, m = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, PAIRS)
    t, j = r // CP, r % CP
    pair = t - j
    there, valid = (t < tokens) & (j < C) & (pair >= oldest), token < tokens
    of_pair = (m[:, None] - HALO == pair[None, :]) & there[None, :]
    at = i * H + h
    mix += at * CHUNK * CHUNK
    keep += at * CHUNK
    g = row_gates(gamma, row0, h, t, j, there, H, C)
    p = tl.load(keep + t - LAG, mask=t >= LAG, other=1.0)
    last = tl.load(mix + (CHUNK - 1) * CHUNK + t) * g
    x = load_rows(k, pair0, pair, there, tl.arange(0, BF), H, h, F)
    read = query_products(x, q, k, row0, token, valid, pair0, pair, there, H, h, F, BF, PRECISION)
    read = (read * write_weights(mix, t, CHUNK) * g[None, :]).to(narrow)
    solved = load_rows(inverse, at * ROWS, r, r < ROWS, r, 1, 0, ROWS)
    mine = tl.program_id(1) * BF + tl.arange(0, BF)
    dread = tl.zeros([CHUNK, ROWS], tl.float32)
    dcoupling = tl.zeros([ROWS, ROWS], tl.float32)
    dpairs = tl.zeros([ROWS, BF], tl.float32)
    dlast = tl.zeros([ROWS], tl.float32)
    dp = tl.zeros([ROWS], tl.float32)
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        memory = load_rows(borders, at * F, mine, mine < F, column, 1, 0, V)
        dmemory = load_rows(dborders, at * F, mine, mine < F, column, 1, 0, V)
        values = load_rows(v, pair0, pair, there, column, H, h, V)
        out = load_rows(dy, row0, token, valid, column, H, h, V)
        if NF == 1:
            seen = tl.dot(x, memory, input_precision=PRECISION)  # X M^T
            asked = tl.dot(x, dmemory, input_precision=PRECISION)
        else:
            seen = tl.zeros([ROWS, BV], tl.float32)
            asked = tl.zeros([ROWS, BV], tl.float32)
            for part in range(NF):
                f = part * BF + tl.arange(0, BF)
                some = load_rows(k, pair0, pair, there, f, H, h, F)
                state = load_rows(borders, at * F, f, f < F, column, 1, 0, V)
                seen = tl.dot(some, state, seen, input_precision=PRECISION)
                state = load_rows(dborders, at * F, f, f < F, column, 1, 0, V)
                asked = tl.dot(some, state, asked, input_precision=PRECISION)
        known = (p[:, None] * seen - values).to(narrow)
        error = tl.dot(solved, known, input_precision=PRECISION)
        dlast -= tl.sum(error * asked, 1)
        derror = -last[:, None] * asked - tl.dot(tl.trans(read), out, input_precision=PRECISION)
        through = tl.dot(tl.trans(solved), derror.to(narrow), input_precision=PRECISION)  # A
        dp += tl.sum(through * seen, 1)
        flat = tl.trans(error.to(narrow))
        dread = tl.dot(out, flat, dread, input_precision=PRECISION)
        dcoupling = tl.dot(through.to(narrow), flat, dcoupling, input_precision=PRECISION)
        pull = (p[:, None] * through).to(narrow)
        dpairs = tl.dot(pull, tl.trans(memory), dpairs, input_precision=PRECISION)
        pull = (-last[:, None] * error).to(narrow)
        dpairs = tl.dot(pull, tl.trans(dmemory), dpairs, input_precision=PRECISION)
        store_pairs(
            dv, halo_v, -through, of_pair, pair0, at, m, tokens, column, H, h, V,
            CHUNK, HALO, C, PRECISION,
        )  # fmt: skip
    cross = query_products(x, q, k, row0, token, valid, pair0, pair, there, H, h, F, BF, PRECISION)
    dcross, total, dg = read_gates(mix, g, -dread, cross, dlast, t, CHUNK, CP, narrow)
    gram = key_products(x, k, pair0, pair, there, H, h, F, BF, PRECISION)
    dgram, more, dg = slope_gates(mix, g, dg, -dcoupling, gram, t, CHUNK, CP, AFTER, narrow)
    seen_at = token[:, None] == (t - LAG)[None, :]  # the memory at which a row takes its slope
    if C == 1 and AFTER:
        total += more
    else:
        total += tl.dot(seen_at.to(tl.float32), more, input_precision=SHARP)
    tl.store(dmix + at * CHUNK * CHUNK + token[:, None] * CHUNK + token[None, :], total)
    if C > 1:
        tl.store(dgamma + (row0 * H + h) * C + t * (H * C) + j, dg, mask=(t < tokens) & (j < C))
    reads = load_rows(q, row0, token, valid, mine, H, h, F)
    if NF > 1:
        x = load_rows(k, pair0, pair, there, mine, H, h, F)
    dpairs = tl.dot(tl.trans(dcross), reads, dpairs, input_precision=PRECISION)
    dpairs = tl.dot(dgram, x, dpairs, input_precision=PRECISION)
    store_pairs(
        dk, halo_k, dpairs, of_pair, pair0, at, m, tokens, mine, H, h, F, CHUNK, HALO, C, PRECISION
    )
    dreads = tl.zeros([CHUNK, BF], tl.float32)
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        memory = load_rows(borders, at * F, mine, mine < F, column, 1, 0, V)
        out = load_rows(dy, row0, token, valid, column, H, h, V)
        dreads = tl.dot(out, tl.trans(memory), dreads, input_precision=PRECISION)
    dkept = tl.sum(dreads * reads.to(tl.float32), 1)
    if tl.program_id(1) == 0:  # what does not depend on the block counts once
        dkept += tl.where(token == CHUNK - 1, tl.load(dkeep_last + at), 0.0)
        dkept += tl.sum(tl.where(seen_at, dp[None, :], 0.0), 1)
    tl.store(dkeep + (at * NF + tl.program_id(1)) * CHUNK + token, dkept)
    dreads *= tl.load(keep + token)[:, None]
    dreads = tl.dot(dcross, x, dreads, input_precision=PRECISION)
    store_rows(dq, dreads, row0, token, valid, mine, H, h, F)


@triton.jit
def halo_kernel(
    dk, dv, halo_k, halo_v,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr, SHARP: tl.constexpr,
):  # fmt: skip
    """Add what a tile asks of the C - 1 pairs before it: each pair is before one tile only."""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    tokens, _, pair0, oldest = find_tile(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if tokens <= 0:
        return
    m = tl.arange(0, 4)
    pair = m - C + 1
    there = (pair < 0) & (pair >= oldest)
    place = (i * H + h) * (C - 1)
    f, column = tl.arange(0, BF), tl.arange(0, BV)
    total = load_rows(dk, pair0, pair, there, f, H, h, F).to(tl.float32)
    total += load_rows(halo_k, place, m, there, f, 1, 0, F).to(tl.float32)
    store_rows(dk, total, pair0, pair, there, f, H, h, F)
    total = load_rows(dv, pair0, pair, there, column, H, h, V).to(tl.float32)
    total += load_rows(halo_v, place, m, there, column, 1, 0, V).to(tl.float32)
    store_rows(dv, total, pair0, pair, there, column, H, h, V)
