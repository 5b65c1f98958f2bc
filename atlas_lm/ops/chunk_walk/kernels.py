"""The walk from border to border: the state stays in registers, transposed [F, value block], in fp32.

A chunk moves it by M' = keep M + push S - sum_n w_n e_n x_n^T and S' = tail_keep S - sum_n u_n e_n x_n^T with
errors e_n = M l_n - r_n. Anchored rules have l = x, r = v and weights w, u from `chunk_weights` (WEIGHTED);
solved ones (the delta rule) bring l and r per chunk, weights inside. The pairs of a chunk come as a main tile
of ROWS pairs from t0 - OFF on, and a halo tile of HALO pairs before t0; one of OFF and HALO is zero.
"""

import triton
import triton.language as tl


@triton.jit
def pair_tile(
    base, first, offset, oldest, end, h, column,
    COUNT: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Pairs offset .. offset + COUNT of a sequence, [COUNT, columns]; zero where there is none."""
    r = tl.arange(0, COUNT)
    low, high = (oldest - offset).to(tl.int32), (end - offset).to(tl.int32)
    mask = ((r >= low) & (r < high))[:, None] & (column < WIDTH)[None, :]
    here = base + ((first + offset) * H + h) * WIDTH
    return tl.load(here + r[:, None] * (H * WIDTH) + column[None, :], mask=mask, other=0.0)


@triton.jit
def flat_tile(base, row, column, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """COUNT rows from `row` on of a tensor [rows, WIDTH]."""
    r = tl.arange(0, COUNT)
    mask = (column < WIDTH)[None, :]
    return tl.load(base + row * WIDTH + r[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_state(
    base, row, column, SF: tl.constexpr, SV: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr
):
    mask = (row < F)[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + row[:, None] * SF + column[None, :] * SV, mask=mask, other=0.0)


@triton.jit
def store_state(
    base,
    value,
    row,
    column,
    SF: tl.constexpr,
    SV: tl.constexpr,
    F: tl.constexpr,
    WIDTH: tl.constexpr,
):
    mask = (row < F)[:, None] & (column < WIDTH)[None, :]
    pointer = base + row[:, None] * SF + column[None, :] * SV
    tl.store(pointer, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def tile_forward(
    m, new_m, new_s, x, left, right, mix, tail_mix, at, row, first, t0, oldest, end, h, f, column,
    COUNT: tl.constexpr, BEFORE: tl.constexpr, PLACE: tl.constexpr,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    FEEDBACK: tl.constexpr, WEIGHTED: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What COUNT pairs from t0 - BEFORE on, columns PLACE.. of the chunk, do to the state."""
    tile = pair_tile(x, first, t0 - BEFORE, oldest, end, h, f, COUNT, H, F)
    if WEIGHTED:
        values = pair_tile(right, first, t0 - BEFORE, oldest, end, h, column, COUNT, H, V)
        lefts = tile
    else:
        values = flat_tile(right, row + PLACE, column, COUNT, V)
        lefts = flat_tile(left, row + PLACE, f, COUNT, F)
    if FEEDBACK:  # not values first: products added to them one by one would round at their size
        error = tl.dot(lefts, m, input_precision=PRECISION) - values
    else:
        error = -values.to(tl.float32)
    if MOMENTUM:
        u = tl.load(tail_mix + row + PLACE + tl.arange(0, COUNT))
        pushed = (error * u[:, None]).to(tile.dtype)
        new_s -= tl.dot(tl.trans(tile), pushed, input_precision=PRECISION)
    if WEIGHTED:
        error *= tl.load(mix + at * N + PLACE + tl.arange(0, COUNT))[:, None]
    new_m -= tl.dot(tl.trans(tile), error.to(tile.dtype), input_precision=PRECISION)
    return new_m, new_s


@triton.jit
def tile_backward(
    dm, ds, new_dm, x, left, mix, tail_mix, at, row, first, t0, oldest, end, h, f,
    COUNT: tl.constexpr, BEFORE: tl.constexpr, PLACE: tl.constexpr,
    H: tl.constexpr, F: tl.constexpr, N: tl.constexpr,
    WEIGHTED: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same backwards: what the errors of these pairs ask of the memory before the chunk."""
    tile = pair_tile(x, first, t0 - BEFORE, oldest, end, h, f, COUNT, H, F)
    derror = -tl.dot(tile, dm, input_precision=PRECISION)
    if WEIGHTED:
        derror *= tl.load(mix + at * N + PLACE + tl.arange(0, COUNT))[:, None]
        lefts = tile
    else:
        lefts = flat_tile(left, row + PLACE, f, COUNT, F)
    if MOMENTUM:
        u = tl.load(tail_mix + row + PLACE + tl.arange(0, COUNT))
        derror -= tl.dot(tile, ds, input_precision=PRECISION) * u[:, None]
    return new_dm + tl.dot(tl.trans(lefts), derror.to(tile.dtype), input_precision=PRECISION)


@triton.jit
def walk_forward_kernel(
    x, left, right, mix, tail_mix, keep, push, tail_keep,
    memory, momentum, end_memory, end_momentum, border_memory, border_momentum, anchor,
    run_sequence, run_first, run_count, pair_start, first_chunk, last_chunk, length, past,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    IN_H: tl.constexpr, IN_F: tl.constexpr, IN_V: tl.constexpr,
    OUT_H: tl.constexpr, OUT_F: tl.constexpr, OUT_V: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, OFF: tl.constexpr, HALO: tl.constexpr,
    FEEDBACK: tl.constexpr, WEIGHTED: tl.constexpr, MOMENTUM: tl.constexpr,
    PROBE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one run of chunks, storing the state before each.

    PROBE: start from zero instead, and beside the value columns walk unit states without values,
    whose ends are the run's transition; nothing is stored but the ends."""
    block, h = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % H
    r = tl.program_id(0).to(tl.int64) // (BLOCKS * H)
    n = tl.load(run_sequence + r).to(tl.int64)
    begin, count = tl.load(run_first + r).to(tl.int64), tl.load(run_count + r)
    origin, last = tl.load(first_chunk + n), tl.load(last_chunk + n)
    first, end, oldest = tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)
    N: tl.constexpr = CHUNK + OFF + HALO
    f, column = tl.arange(0, BF), block * BV + tl.arange(0, BV)
    s = tl.zeros([BF, BV], tl.float32)
    if PROBE:
        unit = (
            column - (V + BV - 1) // BV * BV
        )  # columns of unit states: the memory's, then momentum's
        m = tl.where((f[:, None] == unit[None, :]) & (f < F)[:, None], 1.0, 0.0)
        if MOMENTUM:
            s = tl.where((f[:, None] == unit[None, :] - F) & (f < F)[:, None], 1.0, 0.0)
    else:
        m = load_state(memory + (r * H + h) * IN_H, f, column, IN_F, IN_V, F, V)
        if MOMENTUM:
            s = load_state(momentum + (r * H + h) * IN_H, f, column, IN_F, IN_V, F, V)
    for k in range(count):
        i = begin + k
        t0, row = (i - origin) * CHUNK, (i * H + h) * N
        at = (i * H + h) * CHUNK + CHUNK - 1  # the chunk's last token
        if not PROBE:
            store_state(border_memory + (i * H + h) * F * V, m, f, column, V, 1, F, V)
            if MOMENTUM:
                store_state(border_momentum + (i * H + h) * F * V, s, f, column, V, 1, F, V)
            if i == last:
                store_state(anchor + (n * H + h) * F * V, m, f, column, 1, F, F, V)
        new_m, new_s = tl.load(keep + at) * m, s
        if MOMENTUM:
            new_m += tl.load(push + at) * s
            new_s = tl.load(tail_keep + i * H + h) * s
        narrow = m.to(x.dtype.element_ty)
        new_m, new_s = tile_forward(
            narrow, new_m, new_s, x, left, right, mix, tail_mix, at, row, first, t0, oldest, end,
            h, f, column, ROWS, OFF, HALO, H, F, V, N, FEEDBACK, WEIGHTED, MOMENTUM, PRECISION,
        )  # fmt: skip
        if HALO > 0:
            new_m, new_s = tile_forward(
                narrow, new_m, new_s, x, left, right, mix, tail_mix, at, row, first, t0, oldest, end,
                h, f, column, HALO, HALO, 0, H, F, V, N, FEEDBACK, WEIGHTED, MOMENTUM, PRECISION,
            )  # fmt: skip
        m, s = new_m, new_s
    WIDTH: tl.constexpr = BLOCKS * BV if PROBE else V
    store_state(end_memory + (r * H + h) * OUT_H, m, f, column, OUT_F, OUT_V, F, WIDTH)
    if MOMENTUM:
        store_state(end_momentum + (r * H + h) * OUT_H, s, f, column, OUT_F, OUT_V, F, WIDTH)


@triton.jit
def walk_backward_kernel(
    x, left, mix, tail_mix, keep, push, tail_keep, queries, q, dy,
    dend_memory, dend_momentum, dmemory, dmomentum, dborder_memory, dborder_momentum, danchor,
    border_memory, border_momentum, dkeep, dpush, dtail_keep,
    run_sequence, run_first, run_count, start, pair_start, first_chunk, last_chunk, length, past,
    H: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    IN_H: tl.constexpr, IN_F: tl.constexpr, IN_V: tl.constexpr,
    OUT_H: tl.constexpr, OUT_F: tl.constexpr, OUT_V: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, OFF: tl.constexpr, HALO: tl.constexpr,
    FEEDBACK: tl.constexpr, WEIGHTED: tl.constexpr, MOMENTUM: tl.constexpr, ANCHOR: tl.constexpr,
    PROBE: tl.constexpr, GIVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one run of chunks from its end, storing what the future asks of the state after each.

    queries: the effective queries Qe, y = Qe M^T + (push q) S^T + terms without a state.
    border_memory, border_momentum: the state before each chunk, which gives dkeep, dpush, dtail_keep, of a
    chunk's last keep, last push and tail_keep: [NC, H, BLOCKS, F], to be summed over blocks and features.
    GIVEN: start from what is asked of the run's end, else from zero; PROBE: store only its begin."""
    block, h = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % H
    r = tl.program_id(0).to(tl.int64) // (BLOCKS * H)
    n = tl.load(run_sequence + r).to(tl.int64)
    begin, count = tl.load(run_first + r).to(tl.int64), tl.load(run_count + r)
    origin, last = tl.load(first_chunk + n), tl.load(last_chunk + n)
    token, first = tl.load(start + n), tl.load(pair_start + n)
    end, oldest = tl.load(length + n), -tl.load(past + n)
    N: tl.constexpr = CHUNK + OFF + HALO
    f, column = tl.arange(0, BF), block * BV + tl.arange(0, BV)
    dm = tl.zeros([BF, BV], tl.float32)
    ds = tl.zeros([BF, BV], tl.float32)
    if GIVEN:
        dm = load_state(dend_memory + (r * H + h) * IN_H, f, column, IN_F, IN_V, F, V)
        if MOMENTUM:
            ds = load_state(dend_momentum + (r * H + h) * IN_H, f, column, IN_F, IN_V, F, V)
    if not PROBE:
        before = (tl.where(count > 0, begin + count - 1, 0) * H + h) * F * V
        m = load_state(border_memory + before, f, column, V, 1, F, V)
        if MOMENTUM:
            s = load_state(border_momentum + before, f, column, V, 1, F, V)
    for k in range(count):
        i = begin + count - 1 - k
        t0, row = (i - origin) * CHUNK, (i * H + h) * N
        at = (i * H + h) * CHUNK + CHUNK - 1
        if not PROBE:
            store_state(dborder_memory + (i * H + h) * F * V, dm, f, column, V, 1, F, V)
            if MOMENTUM:
                store_state(dborder_momentum + (i * H + h) * F * V, ds, f, column, V, 1, F, V)
            part = ((i * H + h) * BLOCKS + block) * F
            tl.store(dkeep + part + f, tl.sum(dm * m, axis=1), mask=f < F)
            if MOMENTUM:
                tl.store(dpush + part + f, tl.sum(dm * s, axis=1), mask=f < F)
                tl.store(dtail_keep + part + f, tl.sum(ds * s, axis=1), mask=f < F)
            # the states of the next round are on their way while this one is reckoned
            before = (tl.maximum(i - 1, 0) * H + h) * F * V
            m = load_state(border_memory + before, f, column, V, 1, F, V)
            if MOMENTUM:
                s = load_state(border_momentum + before, f, column, V, 1, F, V)
        narrow_m = dm.to(x.dtype.element_ty)
        narrow_s = ds.to(x.dtype.element_ty)
        dy_tile = pair_tile(dy, token, t0, 0, end, h, column, CHUNK, H, V)
        seen = pair_tile(queries, token, t0, 0, end, h, f, CHUNK, H, F)
        new_dm = tl.load(keep + at) * dm
        if MOMENTUM:
            pushes = tl.load(push + (i * H + h) * CHUNK + tl.arange(0, CHUNK))
            query = pair_tile(q, token, t0, 0, end, h, f, CHUNK, H, F)
            query = (query * pushes[:, None]).to(query.dtype)
            ds = tl.load(tail_keep + i * H + h) * ds + tl.load(push + at) * dm
            ds += tl.dot(tl.trans(query), dy_tile, input_precision=PRECISION)
        new_dm += tl.dot(tl.trans(seen), dy_tile, input_precision=PRECISION)
        if FEEDBACK:
            new_dm = tile_backward(
                narrow_m, narrow_s, new_dm, x, left, mix, tail_mix, at, row, first, t0, oldest,
                end, h, f, ROWS, OFF, HALO, H, F, N, WEIGHTED, MOMENTUM, PRECISION,
            )  # fmt: skip
            if HALO > 0:
                new_dm = tile_backward(
                    narrow_m, narrow_s, new_dm, x, left, mix, tail_mix, at, row, first, t0, oldest,
                    end, h, f, HALO, HALO, 0, H, F, N, WEIGHTED, MOMENTUM, PRECISION,
                )  # fmt: skip
        dm = new_dm
        if ANCHOR:
            if i == last:
                dm += load_state(danchor + (n * H + h) * F * V, f, column, 1, F, F, V)
    store_state(dmemory + (r * H + h) * OUT_H, dm, f, column, OUT_F, OUT_V, F, V)
    if MOMENTUM:
        store_state(dmomentum + (r * H + h) * OUT_H, ds, f, column, OUT_F, OUT_V, F, V)


@triton.jit
def join_kernel(
    transition, gain, states, runs, t_run, t_head, t_row, t_column, g_run, g_head, g_row,
    R: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """state[r + 1] = transition[r] state[r] + gain[r] for all runs r in turn, states [runs, N H, R, V].

    BACK: state[r - 1] = transition[r] state[r] + gain[r] from the last run on."""
    column, head = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1).to(tl.int64)
    row, k = tl.arange(0, BR), tl.arange(0, BK)
    mask = (row < R)[:, None] & (column < V)[None, :]
    size = tl.num_programs(1).to(tl.int64) * R * V
    for step in range(runs - 1):
        r = tl.full([], 0, tl.int64) + step
        if BACK:
            r = runs - 1 - r
        here = states + r * size + head * (R * V)
        total = tl.load(
            gain + r * g_run + head * g_head + row[:, None] * g_row + column[None, :],
            mask=mask,
            other=0.0,
        )
        for first in range(0, R, BK):
            inner = first + k < R
            left = transition + r * t_run + head * t_head + (first + k)[None, :] * t_column
            a = tl.load(
                left + row[:, None] * t_row, mask=(row < R)[:, None] & inner[None, :], other=0.0
            )
            right = here + (first + k)[:, None] * V + column[None, :]
            b = tl.load(right, mask=inner[:, None] & (column < V)[None, :], other=0.0)
            total += tl.dot(a, b, input_precision=PRECISION)
        there = here - size if BACK else here + size
        tl.store(there + row[:, None] * V + column[None, :], total, mask=mask)
        tl.debug_barrier()  # the next run reads what other threads of this program stored
