"""What a chunk computes beside the walk, all chunks at once.

With P = mix * (Q X^T) and the memory M before the chunk, reads are y = Qe M^T + P V with effective queries
Qe = keep Q - P X: the errors X M^T - V are never formed in the forward pass. Tiles as in `chunk_walk`.
"""

import triton
import triton.language as tl

from atlas_lm.ops.chunk_walk.kernels import load_state, pair_tile


@triton.jit
def mix_tile(mix, at0, t, COUNT: tl.constexpr, PLACE: tl.constexpr, N: tl.constexpr):
    """Columns PLACE .. + COUNT of a chunk's weights, [b, COUNT]."""
    return tl.load(mix + (at0 + t)[:, None] * N + PLACE + tl.arange(0, COUNT)[None, :])


@triton.jit
def store_rows(base, value, row, there, column, WIDTH: tl.constexpr):
    """value [n, columns] into rows `row` of a tensor [rows, WIDTH]."""
    mask = there[:, None] & (column < WIDTH)[None, :]
    pointer = base + row[:, None] * WIDTH + column[None, :]
    tl.store(pointer, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    q, x, v, mix, keep, push, borders, momentum_borders, y, queries,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, OFF: tl.constexpr, HALO: tl.constexpr,
    FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    end, oldest = tl.load(length + n), -tl.load(past + n)
    if t0 >= end:
        return
    token, first = tl.load(start + n), tl.load(pair_start + n)
    N: tl.constexpr = CHUNK + OFF + HALO
    t, f, at0 = tl.arange(0, CHUNK), tl.arange(0, BF), (i * H + h) * CHUNK
    query = pair_tile(q, token, t0, 0, end, h, f, CHUNK, H, F)
    main = pair_tile(x, first, t0 - OFF, oldest, end, h, f, ROWS, H, F)
    score = tl.dot(query, tl.trans(main), input_precision=PRECISION)
    p = (score * mix_tile(mix, at0, t, ROWS, HALO, N)).to(query.dtype)
    effective = query * tl.load(keep + at0 + t)[:, None]
    if FEEDBACK:
        effective -= tl.dot(p, main, input_precision=PRECISION)
    if HALO > 0:
        halo = pair_tile(x, first, t0 - HALO, oldest, end, h, f, HALO, H, F)
        score_h = tl.dot(query, tl.trans(halo), input_precision=PRECISION)
        p_h = (score_h * mix_tile(mix, at0, t, HALO, 0, N)).to(query.dtype)
        if FEEDBACK:
            effective -= tl.dot(p_h, halo, input_precision=PRECISION)
    effective = effective.to(query.dtype)
    row, there = (token + t0 + t) * H + h, t0 + t < end
    store_rows(queries, effective, row, there, f, F)
    if MOMENTUM:
        query = (query * tl.load(push + at0 + t)[:, None]).to(query.dtype)
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        m = load_state(borders + (i * H + h) * F * V, f, column, V, 1, F, V)
        out = tl.dot(effective, m, input_precision=PRECISION)
        if MOMENTUM:
            s = load_state(momentum_borders + (i * H + h) * F * V, f, column, V, 1, F, V)
            out += tl.dot(query, s, input_precision=PRECISION)
        values = pair_tile(v, first, t0 - OFF, oldest, end, h, column, ROWS, H, V)
        out += tl.dot(p, values, input_precision=PRECISION)
        if HALO > 0:
            values_h = pair_tile(v, first, t0 - HALO, oldest, end, h, column, HALO, H, V)
            out += tl.dot(p_h, values_h, input_precision=PRECISION)
        store_rows(y, out, row, there, column, V)


@triton.jit
def block_backward(
    tile, values, p, dy, m, s, dm, ds, w, u, dx, dp, dw, du,
    FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of pairs in one block of value columns: adds to dx, dp, dw, du and returns dvalues."""
    error = -values.to(tl.float32)
    if FEEDBACK:
        error += tl.dot(tile, m, input_precision=PRECISION)
    asked = tl.dot(tile, dm, input_precision=PRECISION)
    dw -= tl.sum(error * asked, axis=1)
    asked *= w[:, None]
    dx -= tl.dot((error * w[:, None]).to(tile.dtype), tl.trans(dm), input_precision=PRECISION)
    if MOMENTUM:
        pushed = tl.dot(tile, ds, input_precision=PRECISION)
        du -= tl.sum(error * pushed, axis=1)
        asked += pushed * u[:, None]
        dx -= tl.dot((error * u[:, None]).to(tile.dtype), tl.trans(ds), input_precision=PRECISION)
    if FEEDBACK:
        dx -= tl.dot(asked.to(tile.dtype), tl.trans(m), input_precision=PRECISION)
    dp += tl.dot(dy, tl.trans(values), input_precision=PRECISION)
    dvalues = asked + tl.dot(tl.trans(p), dy, input_precision=PRECISION)
    return dx, dp, dw, du, dvalues


@triton.jit
def tile_end(
    tile, query, score, weight, p, dqe, dq, dx, dp, dw, last,
    FEEDBACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What is left after all value blocks: through P = mix * (Q X^T). Returns dq, dx, dmix."""
    if FEEDBACK:
        dp -= tl.dot(dqe, tl.trans(tile), input_precision=PRECISION)
        dx -= tl.dot(tl.trans(p), dqe, input_precision=PRECISION)
    dscore = (dp * weight).to(tile.dtype)
    dq += tl.dot(dscore, tile, input_precision=PRECISION)
    dx += tl.dot(tl.trans(dscore), query, input_precision=PRECISION)
    dmix = dp * score + tl.where(last[:, None], dw[None, :], 0.0)
    return dq, dx, dmix


@triton.jit
def backward_kernel(
    q, x, v, mix, tail_mix, keep, push, borders, momentum_borders, dborders, dmomentum_borders, dy,
    dq, dx, dv, dx_halo, dv_halo, dmix, dkeep, dpush, dtail_mix, dtail_keep,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, OFF: tl.constexpr, HALO: tl.constexpr,
    FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    end, oldest = tl.load(length + n), -tl.load(past + n)
    if t0 >= end:
        return
    token, first = tl.load(start + n), tl.load(pair_start + n)
    N: tl.constexpr = CHUNK + OFF + HALO
    t, f, at0 = tl.arange(0, CHUNK), tl.arange(0, BF), (i * H + h) * CHUNK
    r, last = tl.arange(0, ROWS), t == CHUNK - 1
    edge: tl.constexpr = OFF + HALO  # pairs before the chunk
    query = pair_tile(q, token, t0, 0, end, h, f, CHUNK, H, F)
    main = pair_tile(x, first, t0 - OFF, oldest, end, h, f, ROWS, H, F)
    weight = mix_tile(mix, at0, t, ROWS, HALO, N)
    score = tl.dot(query, tl.trans(main), input_precision=PRECISION)
    p = (score * weight).to(query.dtype)
    w = tl.load(mix + (at0 + CHUNK - 1) * N + HALO + r)
    u, du = w, tl.zeros([ROWS], tl.float32)
    dqe, dqs = tl.zeros([CHUNK, BF], tl.float32), tl.zeros([CHUNK, BF], tl.float32)
    dmain, dp = tl.zeros([ROWS, BF], tl.float32), tl.zeros([CHUNK, ROWS], tl.float32)
    dw = tl.zeros([ROWS], tl.float32)
    if HALO > 0:
        rh = tl.arange(0, HALO)
        halo = pair_tile(x, first, t0 - HALO, oldest, end, h, f, HALO, H, F)
        weight_h = mix_tile(mix, at0, t, HALO, 0, N)
        score_h = tl.dot(query, tl.trans(halo), input_precision=PRECISION)
        p_h = (score_h * weight_h).to(query.dtype)
        w_h = tl.load(mix + (at0 + CHUNK - 1) * N + rh)
        u_h, du_h = w_h, tl.zeros([HALO], tl.float32)
        dhalo, dp_h = tl.zeros([HALO, BF], tl.float32), tl.zeros([CHUNK, HALO], tl.float32)
        dw_h = tl.zeros([HALO], tl.float32)
    if MOMENTUM:
        u = tl.load(tail_mix + (i * H + h) * N + HALO + r)
        if HALO > 0:
            u_h = tl.load(tail_mix + (i * H + h) * N + rh)
    ddecay, dpush_last, dcarry = 0.0, 0.0, 0.0
    state, edges = (i * H + h) * F * V, (i * H + h) * edge
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        m = load_state(borders + state, f, column, V, 1, F, V)
        dm = load_state(dborders + state, f, column, V, 1, F, V)
        out = pair_tile(dy, token, t0, 0, end, h, column, CHUNK, H, V)
        dqe += tl.dot(out, tl.trans(m), input_precision=PRECISION)
        ddecay += tl.sum(dm.to(tl.float32) * m)
        s, ds = m, dm
        if MOMENTUM:
            s = load_state(momentum_borders + state, f, column, V, 1, F, V)
            ds = load_state(dmomentum_borders + state, f, column, V, 1, F, V)
            dqs += tl.dot(out, tl.trans(s), input_precision=PRECISION)
            dpush_last += tl.sum(dm.to(tl.float32) * s)
            dcarry += tl.sum(ds.to(tl.float32) * s)
        values = pair_tile(v, first, t0 - OFF, oldest, end, h, column, ROWS, H, V)
        dmain, dp, dw, du, dvalues = block_backward(
            main, values, p, out, m, s, dm, ds, w, u, dmain, dp, dw, du, FEEDBACK, MOMENTUM, PRECISION
        )
        pair = t0 - OFF + r
        store_rows(dv, dvalues, (first + pair) * H + h, (r >= OFF) & (pair < end), column, V)
        if OFF > 0:
            store_rows(dv_halo, dvalues, edges + r, r < OFF, column, V)
        if HALO > 0:
            values = pair_tile(v, first, t0 - HALO, oldest, end, h, column, HALO, H, V)
            dhalo, dp_h, dw_h, du_h, dvalues = block_backward(
                halo, values, p_h, out, m, s, dm, ds, w_h, u_h, dhalo, dp_h, dw_h, du_h,
                FEEDBACK, MOMENTUM, PRECISION,
            )  # fmt: skip
            store_rows(dv_halo, dvalues, edges + rh, rh < HALO, column, V)
    keeps = tl.load(keep + at0 + t)
    dquery = dqe * keeps[:, None]
    tl.store(dkeep + at0 + t, tl.sum(dqe * query, axis=1) + tl.where(last, ddecay, 0.0))
    if MOMENTUM:
        dquery += dqs * tl.load(push + at0 + t)[:, None]
        tl.store(dpush + at0 + t, tl.sum(dqs * query, axis=1) + tl.where(last, dpush_last, 0.0))
        tl.store(dtail_keep + i * H + h, dcarry)
        tl.store(dtail_mix + (i * H + h) * N + HALO + r, du)
    narrow = dqe.to(query.dtype)
    dquery, dmain, dweight = tile_end(
        main, query, score, weight, p, narrow, dquery, dmain, dp, dw, last, FEEDBACK, PRECISION
    )
    tl.store(dmix + (at0 + t)[:, None] * N + HALO + r[None, :], dweight)
    pair = t0 - OFF + r
    store_rows(dx, dmain, (first + pair) * H + h, (r >= OFF) & (pair < end), f, F)
    if OFF > 0:
        store_rows(dx_halo, dmain, edges + r, r < OFF, f, F)
    if HALO > 0:
        dquery, dhalo, dweight = tile_end(
            halo, query, score_h, weight_h, p_h, narrow, dquery, dhalo, dp_h, dw_h, last,
            FEEDBACK, PRECISION,
        )  # fmt: skip
        tl.store(dmix + (at0 + t)[:, None] * N + rh[None, :], dweight)
        store_rows(dx_halo, dhalo, edges + rh, rh < HALO, f, F)
        if MOMENTUM:
            tl.store(dtail_mix + (i * H + h) * N + rh, du_h)
    store_rows(dq, dquery, (token + t0 + t) * H + h, t0 + t < end, f, F)


@triton.jit
def halo_kernel(
    grad, halo, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add what a chunk asks of the EDGE pairs before it; each pair is asked by one chunk at most."""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    if t0 >= tl.load(length + n):
        return
    r, column = tl.arange(0, EDGE), tl.arange(0, BLOCK)
    pair = t0 - EDGE + r
    row = (tl.load(pair_start + n) + pair) * H + h
    mask = (pair >= -tl.load(past + n))[:, None] & (column < WIDTH)[None, :]
    target = grad + row[:, None] * WIDTH + column[None, :]
    source = halo + ((i * H + h) * EDGE + r)[:, None] * WIDTH + column[None, :]
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + tl.load(source, mask=mask, other=0.0)
    tl.store(target, total.to(grad.dtype.element_ty), mask=mask)
