"""What a chunk computes beside the walk, all chunks at once.

With P = mix * (Q X^T) and the memory M before the chunk, reads are y = Qe M^T + P V with effective queries
Qe = keep Q - P X: the errors X M^T - V are never formed in the forward pass. The pairs of a chunk are a main
tile, its own, and a halo tile: those before it that its windows still hold.
"""

import triton
import triton.language as tl

from atlas_lm.ops.chunk_walk.kernels import load_state, pair_tile
from atlas_lm.ops.chunk_weights.kernels import written


@triton.jit
def mix_tile(mix, at0, t, COUNT: tl.constexpr, PLACE: tl.constexpr, N: tl.constexpr):
    """Columns PLACE .. + COUNT of a chunk's weights, [b, COUNT]: its own pairs, of which those after a token
    are not written, or those before it."""
    column = PLACE + tl.arange(0, COUNT)[None, :]
    mask = written(column, t[:, None], N - t.shape[0])
    return tl.load(mix + at0 * N + t[:, None] * N + column, mask=mask, other=0.0)


@triton.jit
def store_rows(base, value, r, there, column, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """value [n, columns] into rows r, STRIDE apart."""
    mask = there[:, None] & (column < WIDTH)[None, :]
    pointer = base + r[:, None] * STRIDE + column[None, :]
    tl.store(pointer, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def place_of(i, start, pair_start, length, past, first_chunk, sequence, CHUNK: tl.constexpr):
    """Of chunk i: its first token, the rows of its sequence, and where tokens and pairs end."""
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    return t0, tl.load(start + n), tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)


@triton.jit
def forward_kernel(
    q, x, v, mix, keep, push, borders, momentum_borders, y, queries,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr,
    FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t0, token, first, end, oldest = place_of(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if t0 >= end:
        return
    N: tl.constexpr = CHUNK + HALO
    t, f, at0 = tl.arange(0, CHUNK), tl.arange(0, BF), (i * H + h) * CHUNK
    query = pair_tile(q, token, t0, 0, end, h, f, CHUNK, H, F)
    main = pair_tile(x, first, t0, oldest, end, h, f, CHUNK, H, F)
    score = tl.dot(query, tl.trans(main), input_precision=PRECISION)
    p = (score * mix_tile(mix, at0, t, CHUNK, HALO, N)).to(query.dtype)
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
    there, lead = t < end - t0, (token + t0) * H + h
    store_rows(queries + lead * F, effective, t, there, f, H * F, F)
    if MOMENTUM:
        query = (query * tl.load(push + at0 + t)[:, None]).to(query.dtype)
    state = (i * H + h) * F * V
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        m = load_state(borders + state, f, column, V, 1, F, V)
        out = tl.dot(effective, m, input_precision=PRECISION)
        if MOMENTUM:
            s = load_state(momentum_borders + state, f, column, V, 1, F, V)
            out += tl.dot(query, s, input_precision=PRECISION)
        values = pair_tile(v, first, t0, oldest, end, h, column, CHUNK, H, V)
        out += tl.dot(p, values, input_precision=PRECISION)
        if HALO > 0:
            values_h = pair_tile(v, first, t0 - HALO, oldest, end, h, column, HALO, H, V)
            out += tl.dot(p_h, values_h, input_precision=PRECISION)
        store_rows(y + lead * V, out, t, there, column, H * V, V)


@triton.jit
def pairs_backward(
    x, v, borders, dborders, dmomentum_borders, dx, dv, w, u, first, offset, oldest, end, h,
    COUNT: tl.constexpr, STEP: tl.constexpr, H: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """COUNT pairs from `offset` on: stores dx and dv, rows STEP heads apart, and returns dw and du."""
    r, f = tl.arange(0, COUNT), tl.arange(0, BF)
    there = r < end - offset
    tile = pair_tile(x, first, offset, oldest, end, h, f, COUNT, H, F)
    dtile = tl.zeros([COUNT, BF], tl.float32)
    dw, du = tl.zeros([COUNT], tl.float32), tl.zeros([COUNT], tl.float32)
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        dm = load_state(dborders, f, column, V, 1, F, V)
        values = pair_tile(v, first, offset, oldest, end, h, column, COUNT, H, V)
        if FEEDBACK:
            m = load_state(borders, f, column, V, 1, F, V)
            error = tl.dot(tile, m, input_precision=PRECISION) - values
        else:
            error = -values.to(tl.float32)
        asked = tl.dot(tile, dm, input_precision=PRECISION)
        dw -= tl.sum(error * asked, axis=1)
        asked *= w[:, None]
        narrow = (error * w[:, None]).to(tile.dtype)
        dtile -= tl.dot(narrow, tl.trans(dm), input_precision=PRECISION)
        if MOMENTUM:
            ds = load_state(dmomentum_borders, f, column, V, 1, F, V)
            pushed = tl.dot(tile, ds, input_precision=PRECISION)
            du -= tl.sum(error * pushed, axis=1)
            asked += pushed * u[:, None]
            narrow = (error * u[:, None]).to(tile.dtype)
            dtile -= tl.dot(narrow, tl.trans(ds), input_precision=PRECISION)
        if FEEDBACK:
            dtile -= tl.dot(asked.to(tile.dtype), tl.trans(m), input_precision=PRECISION)
        store_rows(dv, asked, r, there, column, STEP * V, V)
    store_rows(dx, dtile, r, there, f, STEP * F, F)
    return dw, du


@triton.jit
def writes_backward_kernel(
    x, v, mix, tail_mix, borders, dborders, dmomentum_borders,
    dx, dv, dx_halo, dv_halo, dend, dtail_mix,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr,
    FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The way through the state after the chunk; `reads_backward_kernel` adds the way through the reads.

    dend: [NC, H, N], of the mix's last row, by which pairs enter that state"""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t0, _, first, end, oldest = place_of(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if t0 >= end:
        return
    N: tl.constexpr = CHUNK + HALO
    row, state, last = (i * H + h) * N, (i * H + h) * F * V, ((i * H + h) * CHUNK + CHUNK - 1) * N
    r = tl.arange(0, CHUNK)
    w = tl.load(mix + last + HALO + r)
    u = w
    if MOMENTUM:
        u = tl.load(tail_mix + row + HALO + r)
        dmomentum_borders += state
    lead = (first + t0) * H + h
    dw, du = pairs_backward(
        x, v, borders + state, dborders + state, dmomentum_borders, dx + lead * F, dv + lead * V, w, u,
        first, t0, oldest, end, h, CHUNK, H, H, F, V, BF, BV, FEEDBACK, MOMENTUM, PRECISION,
    )  # fmt: skip
    tl.store(dend + row + HALO + r, dw)
    if MOMENTUM:
        tl.store(dtail_mix + row + HALO + r, du)
    if HALO > 0:
        r = tl.arange(0, HALO)
        w = tl.load(mix + last + r)
        u = w
        if MOMENTUM:
            u = tl.load(tail_mix + row + r)
        lead = (i * H + h) * HALO
        dw, du = pairs_backward(
            x, v, borders + state, dborders + state, dmomentum_borders,
            dx_halo + lead * F, dv_halo + lead * V, w, u, first, t0 - HALO, oldest, end, h,
            HALO, 1, H, F, V, BF, BV, FEEDBACK, MOMENTUM, PRECISION,
        )  # fmt: skip
        tl.store(dend + row + r, dw)
        if MOMENTUM:
            tl.store(dtail_mix + row + r, du)


@triton.jit
def scores_backward(
    query, dqe, dp, x, mix, dend, dmix, dx, at0, row, first, offset, oldest, end, h,
    COUNT: tl.constexpr, PLACE: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    FEEDBACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Back through P = mix * (Q X^T) of one tile: stores dmix, adds to dx, returns its part of dq."""
    t, r, f = tl.arange(0, CHUNK), tl.arange(0, COUNT), tl.arange(0, BF)
    tile = pair_tile(x, first, offset, oldest, end, h, f, COUNT, H, F)
    if FEEDBACK:
        dp -= tl.dot(dqe, tl.trans(tile), input_precision=PRECISION)
    weight = mix_tile(mix, at0, t, COUNT, PLACE, N)
    score = tl.dot(query, tl.trans(tile), input_precision=PRECISION)
    ends = tl.where((t == CHUNK - 1)[:, None], tl.load(dend + row + PLACE + r)[None, :], 0.0)
    column = PLACE + r[None, :]
    mask = written(column, t[:, None], N - CHUNK)
    tl.store(dmix + at0 * N + t[:, None] * N + column, dp * score + ends, mask=mask)
    dscore = (dp * weight).to(tile.dtype)
    p = (score * weight).to(tile.dtype)
    if PRECISION == "ieee":  # operands of fp32 fill shared memory: first what lets go of the tile
        dquery = tl.dot(dscore, tile, input_precision=PRECISION)
    there = r < end - offset
    mask = there[:, None] & (f < F)[None, :]
    dtile = tl.load(dx + r[:, None] * (STEP * F) + f[None, :], mask=mask, other=0.0).to(tl.float32)
    dtile += tl.dot(tl.trans(dscore), query, input_precision=PRECISION)
    if FEEDBACK:
        dtile -= tl.dot(tl.trans(p), dqe, input_precision=PRECISION)
    store_rows(dx, dtile, r, there, f, STEP * F, F)
    if PRECISION != "ieee":
        dquery = tl.dot(dscore, tile, input_precision=PRECISION)
    return dquery


@triton.jit
def add_values(
    dv, v, p, dp, out, first, offset, oldest, end, h, column,
    COUNT: tl.constexpr, STEP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Back through P V of one tile and value block: adds to the stored dv, returns dp."""
    r = tl.arange(0, COUNT)
    there = r < end - offset
    values = pair_tile(v, first, offset, oldest, end, h, column, COUNT, H, V)
    dp += tl.dot(out, tl.trans(values), input_precision=PRECISION)
    mask = there[:, None] & (column < V)[None, :]
    dvalues = tl.load(dv + r[:, None] * (STEP * V) + column[None, :], mask=mask, other=0.0)
    dvalues = dvalues.to(tl.float32) + tl.dot(tl.trans(p), out, input_precision=PRECISION)
    store_rows(dv, dvalues, r, there, column, STEP * V, V)
    return dp


@triton.jit
def reads_backward_kernel(
    q, x, v, mix, keep, push, borders, momentum_borders, dy, dend, dkeep_last, dpush_last,
    dq, dx, dv, dx_halo, dv_halo, dmix, dkeep, dpush,
    start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr,
    FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The way through the reads y = Qe M^T + (push Q) S^T + P V; adds to dx and dv."""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t0, token, first, end, oldest = place_of(
        i, start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if t0 >= end:
        return
    N: tl.constexpr = CHUNK + HALO
    t, f, at0 = tl.arange(0, CHUNK), tl.arange(0, BF), (i * H + h) * CHUNK
    last, row, state = t == CHUNK - 1, (i * H + h) * N, (i * H + h) * F * V
    lead, edge = (first + t0) * H + h, (i * H + h) * HALO
    query = pair_tile(q, token, t0, 0, end, h, f, CHUNK, H, F)
    tile = pair_tile(x, first, t0, oldest, end, h, f, CHUNK, H, F)
    p = tl.dot(query, tl.trans(tile), input_precision=PRECISION)
    p = (p * mix_tile(mix, at0, t, CHUNK, HALO, N)).to(query.dtype)
    dqe, dp = tl.zeros([CHUNK, BF], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for block in range((V + BV - 1) // BV):
        column = block * BV + tl.arange(0, BV)
        out = pair_tile(dy, token, t0, 0, end, h, column, CHUNK, H, V)
        m = load_state(borders + state, f, column, V, 1, F, V)
        dqe += tl.dot(out, tl.trans(m), input_precision=PRECISION)
        dp = add_values(
            dv + lead * V, v, p, dp, out, first, t0, oldest, end, h, column,
            CHUNK, H, H, V, PRECISION,
        )  # fmt: skip
    query = pair_tile(q, token, t0, 0, end, h, f, CHUNK, H, F)
    ends = tl.where(last, tl.load(dkeep_last + i * H + h), 0.0)
    tl.store(dkeep + at0 + t, tl.sum(dqe * query, axis=1) + ends)
    narrow = dqe.to(query.dtype)
    dquery = scores_backward(
        query, narrow, dp, x, mix, dend, dmix, dx + lead * F,
        at0, row, first, t0, oldest, end, h, CHUNK, HALO, H, CHUNK, N, H, F, BF, FEEDBACK, PRECISION,
    )  # fmt: skip
    if PRECISION == "ieee":  # and the queries are read again instead of kept there
        query = pair_tile(q, token, t0, 0, end, h, f, CHUNK, H, F)
    if HALO > 0:  # in a loop of its own: both tiles at once do not fit the registers
        tile = pair_tile(x, first, t0 - HALO, oldest, end, h, f, HALO, H, F)
        p_h = tl.dot(query, tl.trans(tile), input_precision=PRECISION)
        p_h = (p_h * mix_tile(mix, at0, t, HALO, 0, N)).to(query.dtype)
        dp_h = tl.zeros([CHUNK, HALO], tl.float32)
        # one stage: copies of a tile that feeds products of both kinds overtake them (docs/kernels.md)
        for block in tl.range((V + BV - 1) // BV, num_stages=1):
            column = block * BV + tl.arange(0, BV)
            out = pair_tile(dy, token, t0, 0, end, h, column, CHUNK, H, V)
            dp_h = add_values(
                dv_halo + edge * V, v, p_h, dp_h, out, first, t0 - HALO, oldest, end, h, column,
                HALO, 1, H, V, PRECISION,
            )  # fmt: skip
        dquery += scores_backward(
            query, narrow, dp_h, x, mix, dend, dmix, dx_halo + edge * F,
            at0, row, first, t0 - HALO, oldest, end, h, HALO, 0, 1, CHUNK, N, H, F, BF,
            FEEDBACK, PRECISION,
        )  # fmt: skip
    dquery += narrow * tl.load(keep + at0 + t)[:, None]
    if MOMENTUM:
        pushes, dpushes = tl.load(push + at0 + t), tl.zeros([CHUNK], tl.float32)
        for block in range((V + BV - 1) // BV):
            column = block * BV + tl.arange(0, BV)
            out = pair_tile(dy, token, t0, 0, end, h, column, CHUNK, H, V)
            s = load_state(momentum_borders + state, f, column, V, 1, F, V)
            dpushes += tl.sum(tl.dot(query, s, input_precision=PRECISION) * out, axis=1)
            pushed = (out * pushes[:, None]).to(query.dtype)
            dquery = tl.dot(pushed, tl.trans(s), dquery, input_precision=PRECISION)
        ends = tl.where(last, tl.load(dpush_last + i * H + h), 0.0)
        tl.store(dpush + at0 + t, dpushes + ends)
    there, lead = t < end - t0, (token + t0) * H + h
    store_rows(dq + lead * F, dquery, t, there, f, H * F, F)


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
    mask = (t0 - EDGE + r >= -tl.load(past + n))[:, None] & (column < WIDTH)[None, :]
    target = grad + ((tl.load(pair_start + n) + t0 - EDGE) * H + h) * WIDTH
    target += r[:, None] * (H * WIDTH) + column[None, :]
    source = halo + (i * H + h) * EDGE * WIDTH + r[:, None] * WIDTH + column[None, :]
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + tl.load(
        source, mask=mask, other=0.0
    )
    tl.store(target, total.to(grad.dtype.element_ty), mask=mask)
