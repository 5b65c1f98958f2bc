"""Kernels backward: through the walk's inputs and reads at each border, then through the solution.

Letters as in `solve`; with U = T diag(p) X and Y = T V the forward pass is left = R^T diag(w) U,
right = R^T diag(w) Y, queries = a Q - P U, own = P Y, R the 0/1 map from rows to distinct pairs, w the last
row of weights times gamma, P = weights gamma Q X^T. Then dT enters only by dN = -(T^T dU) U^T - (T^T dY) Y^T.
"""

import triton
import triton.language as tl

from atlas_lm.ops.delta_rule.solve import find_tile, load_rows, store_rows, tile_gates


@triton.jit
def borders_kernel(
    k, left, right, dy, borders, dborders,
    dqueries, dleft, dright, dx, ddecay,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = queries M^T + own and M' = a M - (left M^T - right)^T X back to their inputs, for one block of
    features; borders: M, dborders: the gradient of M', both [NC, H, F, V]; ddecay: [NC, H, blocks]."""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    tokens, row0, pair0, oldest = find_tile(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if tokens <= 0:
        return
    NF: tl.constexpr = (F + BF - 1) // BF
    N: tl.constexpr = HALO + CHUNK
    at = i * H + h
    token, m = tl.arange(0, CHUNK), tl.arange(0, PAIRS)
    valid, inside = token < tokens, m < N
    there = (m - HALO < tokens) & (m - HALO >= oldest) & inside
    mine = tl.program_id(1) * BF + tl.arange(0, BF)
    if NF == 1:
        x = load_rows(k, pair0 + m - HALO, there, mine, H, h, F)
        weights = load_rows(left, at * N + m, inside, mine, 1, 0, F)
    dreads = tl.zeros([CHUNK, BF], tl.float32)
    dpairs = tl.zeros([PAIRS, BF], tl.float32)
    dweights = tl.zeros([PAIRS, BF], tl.float32)
    total = tl.zeros([BF], tl.float32)
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        out = load_rows(dy, row0 + token, valid, column, H, h, V)
        memory = load_rows(borders, at * F + mine, mine < F, column, 1, 0, V)
        dmemory = load_rows(dborders, at * F + mine, mine < F, column, 1, 0, V)
        error = -load_rows(right, at * N + m, inside, column, 1, 0, V).to(tl.float32)
        if NF == 1:
            error = tl.dot(weights, memory, error, input_precision=PRECISION)
            asked = tl.dot(x, dmemory, input_precision=PRECISION)
        else:
            asked = tl.zeros([PAIRS, BV], tl.float32)
            for part in range(NF):
                f = part * BF + tl.arange(0, BF)
                weights = load_rows(left, at * N + m, inside, f, 1, 0, F)
                state = load_rows(borders, at * F + f, f < F, column, 1, 0, V)
                error = tl.dot(weights, state, error, input_precision=PRECISION)
                x = load_rows(k, pair0 + m - HALO, there, f, H, h, F)
                state = load_rows(dborders, at * F + f, f < F, column, 1, 0, V)
                asked = tl.dot(x, state, asked, input_precision=PRECISION)
        dreads = tl.dot(out, tl.trans(memory), dreads, input_precision=PRECISION)
        narrow = error.to(x.dtype)
        dpairs = tl.dot(narrow, tl.trans(dmemory), dpairs, input_precision=PRECISION)
        narrow = asked.to(x.dtype)
        dweights = tl.dot(narrow, tl.trans(memory), dweights, input_precision=PRECISION)
        total += tl.sum(memory.to(tl.float32) * dmemory.to(tl.float32), 1)
        if tl.program_id(1) == 0:
            store_rows(dright, asked, at * N + m, inside, column, 1, 0, V)
    store_rows(dqueries, dreads, row0 + token, valid, mine, H, h, F)
    store_rows(dleft, -dweights, at * N + m, inside, mine, 1, 0, F)
    store_rows(dx, -dpairs, at * N + m, inside, mine, 1, 0, F)
    tl.store(ddecay + at * NF + tl.program_id(1), tl.sum(total))


@triton.jit
def to_pairs(value, of_pair, narrow: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Sum the rows of each distinct pair, [ROWS, columns] -> [PAIRS, columns]."""
    if C == 1:
        return value
    return tl.dot(of_pair.to(narrow), value.to(narrow), input_precision=PRECISION)


@triton.jit
def store_pairs(
    base, halo, value, pair0, at, m, tokens, column, H: tl.constexpr, h, WIDTH: tl.constexpr,
    HALO: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Pairs of this tile to their rows; of the tile before, to `halo` [NC, H, C - 1, WIDTH]."""
    pair = m - HALO
    store_rows(
        base, value, pair0 + pair, (pair >= 0) & (pair < CHUNK) & (pair < tokens), column, H, h, WIDTH
    )
    if C > 1:
        place = at * (C - 1) + pair + C - 1
        store_rows(halo, value, place, (pair < 0) & (pair > -C), column, 1, 0, WIDTH)


@triton.jit
def per_token(rows, CHUNK: tl.constexpr, CP: tl.constexpr):
    """Sum the places of each token: [n, CHUNK * CP] -> [n, CHUNK]."""
    if CP == 1:
        return rows
    return tl.sum(tl.reshape(rows, [rows.shape[0], CHUNK, CP]), 2)


@triton.jit
def store_gates(
    dmix, dkeep, dgamma, weight, cross, dread, point, gram, dcoupling, g, dlast, dkept, dp, ddecay,
    row0, h, t, j, tokens,
    H: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Gradients of the tile's coefficients and window gates. dmix, dkeep: at the tile."""
    LAG: tl.constexpr = 0 if AFTER else 1
    token = tl.arange(0, CHUNK)
    end = token == CHUNK - 1
    causal = token[:, None] >= t[None, :]
    through_read = tl.where(causal, dread * cross, 0.0)
    through_point = dcoupling * gram
    total = through_read * g[None, :] + tl.where(end[:, None], (dlast * g)[None, :], 0.0)
    total = per_token(total, CHUNK, CP)
    earlier = per_token(through_point * g[None, :], CHUNK, CP)
    seen = token[:, None] == (t - LAG)[None, :]  # the memory that a row's slope is taken at
    if C == 1 and AFTER:
        total += earlier
    else:
        total += tl.dot(seen.to(tl.float32), earlier, input_precision="tf32x3")
    tl.store(dmix + token[:, None] * CHUNK + token[None, :], total)
    dkept += tl.sum(tl.where(seen, dp[None, :], 0.0), 1)
    tl.store(dkeep + token, dkept + tl.where(end, ddecay, 0.0))
    if C > 1:
        final = tl.sum(tl.where(end[:, None], weight, 0.0), 0)
        dg = dlast * final + tl.sum(through_read * weight, 0) + tl.sum(through_point * point, 0)
        tl.store(dgamma + ((row0 + t) * H + h) * C + j, dg, mask=(t < tokens) & (j < C))


@triton.jit
def unsolve_kernel(
    q, k, v, gamma, mix, keep, inverse, dy, dqueries, dleft, dright, dx, ddecay,
    dq, dk, dv, dmix, dkeep, dgamma, halo_k, halo_v,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    ROWS: tl.constexpr = CHUNK * CP
    NF: tl.constexpr = (F + BF - 1) // BF
    N: tl.constexpr = HALO + CHUNK
    narrow: tl.constexpr = k.dtype.element_ty
    tokens, row0, pair0, oldest = find_tile(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if tokens <= 0:
        return
    r, token, m = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, PAIRS)
    t, j = r // CP, r % CP
    there, valid = (t < tokens) & (j < C) & (t - j >= oldest), token < tokens
    of_pair = (m[:, None] - HALO == (t - j)[None, :]) & there[None, :]
    at = i * H + h
    place = at * N + HALO + t - j
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
    solved = tl.load(inverse + (at * ROWS + r)[:, None] * ROWS + r[None, :])
    read = tl.trans((weight * g[None, :] * cross).to(narrow))  # P^T [ROWS, CHUNK]
    last = tl.load(mix + (CHUNK - 1) * CHUNK + t) * g
    dread = tl.zeros([CHUNK, ROWS], tl.float32)
    dcoupling = tl.zeros([ROWS, ROWS], tl.float32)
    dlast = tl.zeros([ROWS], tl.float32)
    for block in tl.static_range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        values = load_rows(v, pair0 + t - j, there, column, H, h, V)
        out = load_rows(dy, row0 + token, valid, column, H, h, V)
        target = load_rows(dright, place, there, column, 1, 0, V).to(tl.float32)
        y = tl.dot(solved, values, input_precision=PRECISION)
        dlast += tl.sum(target * y, 1)
        y = tl.trans(y.to(narrow))
        asked = tl.dot(read, out, last[:, None] * target, input_precision=PRECISION)
        asked = tl.dot(tl.trans(solved), asked.to(narrow), input_precision=PRECISION)
        dread = tl.dot(out, y, dread, input_precision=PRECISION)
        dcoupling = tl.dot(asked.to(narrow), y, dcoupling, input_precision=PRECISION)
        asked = to_pairs(asked, of_pair, narrow, C, PRECISION)
        store_pairs(
            dv, halo_v, asked, pair0, at, m, tokens, column, H, h, V, HALO, C, CHUNK
        )
    dkept = tl.zeros([CHUNK], tl.float32)
    dp = tl.zeros([ROWS], tl.float32)
    for block in tl.static_range(NF):
        f = block * BF + tl.arange(0, BF)
        if NF > 1:
            x = load_rows(k, pair0 + t - j, there, f, H, h, F)
            reads = load_rows(q, row0 + token, valid, f, H, h, F)
        moved = load_rows(dqueries, row0 + token, valid, f, H, h, F)
        target = load_rows(dleft, place, there, f, 1, 0, F).to(tl.float32)
        u = tl.dot(solved, (p[:, None] * x).to(narrow), input_precision=PRECISION)
        dlast += tl.sum(target * u, 1)
        u = tl.trans(u.to(narrow))
        asked = last[:, None] * target - tl.dot(read, moved, input_precision=PRECISION)
        asked = tl.dot(tl.trans(solved), asked.to(narrow), input_precision=PRECISION)
        dread -= tl.dot(moved, u, input_precision=PRECISION)
        dcoupling = tl.dot(asked.to(narrow), u, dcoupling, input_precision=PRECISION)
        dkept += tl.sum(moved.to(tl.float32) * reads.to(tl.float32), 1)
        dp += tl.sum(asked * x.to(tl.float32), 1)
    dcoupling = tl.where(t[:, None] > t[None, :], -dcoupling, 0.0)
    store_gates(
        dmix + at * CHUNK * CHUNK, dkeep + at * CHUNK, dgamma,
        weight, cross, dread, point, gram, dcoupling, g, dlast, dkept, dp, tl.load(ddecay + at),
        row0, h, t, j, tokens, H, CHUNK, C, CP, AFTER,
    )  # fmt: skip
    dgram = dcoupling * point * g[None, :]
    dgram = (dgram + tl.trans(dgram)).to(narrow)
    dcross = (dread * weight * g[None, :]).to(narrow)
    a = tl.load(keep + token)
    for block in tl.static_range(NF):
        f = block * BF + tl.arange(0, BF)
        if NF > 1:
            x = load_rows(k, pair0 + t - j, there, f, H, h, F)
            reads = load_rows(q, row0 + token, valid, f, H, h, F)
            moved = load_rows(dqueries, row0 + token, valid, f, H, h, F)
            target = load_rows(dleft, place, there, f, 1, 0, F).to(tl.float32)
            asked = last[:, None] * target - tl.dot(read, moved, input_precision=PRECISION)
            asked = tl.dot(tl.trans(solved), asked.to(narrow), input_precision=PRECISION)
        grad = tl.dot(dcross, x, a[:, None] * moved, input_precision=PRECISION)
        store_rows(dq, grad, row0 + token, valid, f, H, h, F)
        grad = tl.dot(tl.trans(dcross), reads, p[:, None] * asked, input_precision=PRECISION)
        grad = tl.dot(dgram, x, grad, input_precision=PRECISION)
        grad = to_pairs(grad, of_pair, narrow, C, PRECISION)
        grad += load_rows(dx, at * N + m, m < N, f, 1, 0, F).to(tl.float32)
        store_pairs(dk, halo_k, grad, pair0, at, m, tokens, f, H, h, F, HALO, C, CHUNK)


@triton.jit
def halo_kernel(
    dk, dv, halo_k, halo_v,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    PAIRS: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
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
    place = (i * H + h) * (C - 1) + m
    f, column = tl.arange(0, BF), tl.arange(0, BV)
    total = load_rows(dk, pair0 + pair, there, f, H, h, F).to(tl.float32)
    total += load_rows(halo_k, place, there, f, 1, 0, F).to(tl.float32)
    store_rows(dk, total, pair0 + pair, there, f, H, h, F)
    total = load_rows(dv, pair0 + pair, there, column, H, h, V).to(tl.float32)
    total += load_rows(halo_v, place, there, column, 1, 0, V).to(tl.float32)
    store_rows(dv, total, pair0 + pair, there, column, H, h, V)
