"""The walk from border to border, forward and back. A head's hidden units are cut into slices of BD, a program each:

    A = X W0^T,  H = s(A),  E = skip X + H W1^T - V,  U = E W1,  P = U * s'(A)
    W0' = keep W0 + push S0 - (w * P)^T X,    W1' = keep W1 + push S1 - (w * E)^T H,    S' alike with u for w

All is local to a slice but E, and backwards its gradient: of those each slice posts its part, and adds up all.
Memory and momentum stand in global memory in fp32 and are rounded to the inputs' dtype for products.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.pieces import (
    activation,
    chunk_row,
    chunk_tile,
    gathered,
    hidden_units,
    pair_rows,
    store_chunk,
    weight_tile,
)


@triton.jit
def move(
    memory, momentum, start, border, momentum_border, anchor, state, chunk, head, row, column,
    written, pushed, keep, push, carry, more, last,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    MOMENTUM: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """A tile of one weight over one chunk, in place. state, chunk, head: where this weight stands in tensors
    per sequence, per chunk and per head; border: of the next chunk, if there is one more"""
    at = row[:, None] * WIDTH + column[None, :]
    mask = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    old = tl.load(memory + state + at, mask=mask, other=0.0)
    tl.store(anchor + state + at, old, mask=mask & last)
    new = keep * old - written
    if START:
        new += (1.0 - keep) * tl.load(start + head + at, mask=mask, other=0.0)
    if MOMENTUM:
        s = tl.load(momentum + state + at, mask=mask, other=0.0)
        new += push * s
        s = carry * s - pushed
        tl.store(momentum + state + at, s, mask=mask)
        tl.store(momentum_border + chunk + STRIDE + at, s.to(border.dtype.element_ty), mask=mask & more)
    tl.store(memory + state + at, new, mask=mask)
    tl.store(border + chunk + STRIDE + at, new.to(border.dtype.element_ty), mask=mask & more)


@triton.jit
def move_first(
    x, slopes, memory, momentum, start, borders, momentum_borders, anchor, mix, tail_mix,
    first, t0, bound, end, h, group, place, d, kept, pushing, carry, more, last,
    N: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, MOMENTUM: tl.constexpr, START: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of a first layer's weight over one chunk, from its slopes [N, len d]."""
    dtype: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, N)
    w = chunk_row(mix, place * CHUNK + CHUNK - 1, r, PAIRS)[:, None]
    writes = tl.trans((slopes * w).to(dtype))
    pushes = writes
    if MOMENTUM:
        pushes = tl.trans((slopes * chunk_row(tail_mix, place, r, PAIRS)[:, None]).to(dtype))
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        tile = pair_rows(x, first, t0, bound, end, h, f, N, CHUNK, H, F)
        written = tl.dot(writes, tile, input_precision=PRECISION)
        pushed = written
        if MOMENTUM:
            pushed = tl.dot(pushes, tile, input_precision=PRECISION)
        move(
            memory, momentum, start, borders, momentum_borders, anchor, group * (D * F),
            place * (D * F), h * (D * F), d, f, written, pushed, kept, pushing, carry, more, last,
            D, F, H * D * F, MOMENTUM, START,
        )  # fmt: skip


@triton.jit
def walk_forward_kernel(
    x, v, mix, keep, push, tail_mix, tail_keep,
    memory, momentum, start, borders, momentum_borders, anchor, errors, mail, arrived,
    pair_start, first_chunk, length, past,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    N: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    GATED: tl.constexpr, FEEDBACK: tl.constexpr, SKIP: tl.constexpr, ACTIVATION: tl.constexpr,
    FAST: tl.constexpr, MOMENTUM: tl.constexpr, START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """memory, momentum: before the first chunk, and left as they are after the last; [N, H, ...] fp32
    borders, momentum_borders: before each chunk, [NC, H, ...], the first ones given
    errors: [NC, H, PAIRS, V], filled with E"""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    slot, group = tl.program_id(0) % SLICES, tl.program_id(0).to(tl.int64) // SLICES
    h, n = group % H, group // H
    first, end, oldest = tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)
    begin = tl.load(first_chunk + n).to(tl.int64)
    count = (end + CHUNK - 1) // CHUNK
    d, r, c = slot * BD + tl.arange(0, BD), tl.arange(0, N), tl.arange(0, BV)
    dtype: tl.constexpr = x.dtype.element_ty
    for k in range(count):
        tl.debug_barrier()  # borders of this chunk were stored by other threads
        place, t0 = (begin + k) * H + h, k * CHUNK
        bound = tl.maximum(oldest, t0 - (WINDOW - 1))
        more, last = k + 1 < count, k + 1 == count
        a, g = hidden_units(
            x, borders, first, t0, bound, end, h, place, d, N, CHUNK, H, D, F, BF, GATED, PRECISION
        )  # fmt: skip
        s, slope, _ = activation(a, ACTIVATION, FAST)
        hidden = (s * g if GATED else s).to(dtype)
        w1 = weight_tile(borders[1] + place * (V * D), c, d, V, D)
        error = -pair_rows(v, first, t0, bound, end, h, c, N, CHUNK, H, V).to(tl.float32)
        if FEEDBACK:
            part = tl.dot(hidden, tl.trans(w1), input_precision=PRECISION)
            if SLICES > 1:
                part = gathered(part, mail, arrived, group, slot, k, SLICES, N, BV)
            error += part
            if SKIP:
                error += pair_rows(x, first, t0, bound, end, h, c, N, CHUNK, H, F)
        narrow = error.to(dtype)
        if slot == 0:
            store_chunk(errors, narrow, place, r, c, PAIRS, V)
        u = tl.dot(narrow, w1, input_precision=PRECISION)
        kept, pushing, carry = tl.load(keep + place * CHUNK + CHUNK - 1), 0.0, 0.0
        if MOMENTUM:
            pushing, carry = tl.load(push + place * CHUNK + CHUNK - 1), tl.load(tail_keep + place)
        w = chunk_row(mix, place * CHUNK + CHUNK - 1, r, PAIRS)[:, None]
        written = tl.dot(tl.trans((error * w).to(dtype)), hidden, input_precision=PRECISION)
        pushed = written
        if MOMENTUM:
            w = chunk_row(tail_mix, place, r, PAIRS)[:, None]
            pushed = tl.dot(tl.trans((error * w).to(dtype)), hidden, input_precision=PRECISION)
        move(
            memory[1], momentum[1], start[1], borders[1], momentum_borders[1], anchor[1],
            group * (V * D), place * (V * D), h * (V * D), c, d, written, pushed, kept, pushing, carry,
            more, last, V, D, H * V * D, MOMENTUM, START,
        )  # fmt: skip
        move_first(
            x, u * slope * g if GATED else u * slope, memory[0], momentum[0], start[0], borders[0],
            momentum_borders[0], anchor[0], mix, tail_mix, first, t0, bound, end, h, group, place, d, kept,
            pushing, carry, more, last, N, CHUNK, PAIRS, H, D, F, BF, MOMENTUM, START, PRECISION,
        )  # fmt: skip
        if GATED:
            move_first(
                x, u * s, memory[2], momentum[2], start[2], borders[2], momentum_borders[2], anchor[2], mix,
                tail_mix, first, t0, bound, end, h, group, place, d, kept, pushing, carry, more, last, N,
                CHUNK, PAIRS, H, D, F, BF, MOMENTUM, START, PRECISION,
            )  # fmt: skip


@triton.jit
def unmove(
    dmemory, dmomentum, start, dstart, border, momentum_border, dborder, dmomentum_border, danchor,
    state, chunk, head, row, column, direct, dm, ds, keep, push, carry, last,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
    MOMENTUM: tl.constexpr, START: tl.constexpr, ANCHOR: tl.constexpr,
):  # fmt: skip
    """A tile of one weight back over one chunk, in place; what it asks of the chunk's last keep, last push and carry.

    direct: gradient by the slopes   dm, ds: what is asked of memory and momentum after the chunk
    dborder, dmomentum_border: what the reads of the chunk ask of those before it"""
    at = row[:, None] * WIDTH + column[None, :]
    mask = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    old = tl.load(border + chunk + at, mask=mask, other=0.0).to(tl.float32)
    if START:
        old -= tl.load(start + head + at, mask=mask, other=0.0)
        asked = tl.load(dstart + chunk + at, mask=mask, other=0.0).to(tl.float32)
        asked += (1.0 - keep) * dm
        tl.store(dstart + chunk + at, asked.to(dstart.dtype.element_ty), mask=mask)
    dkeep, dpush, dcarry = tl.sum(old * dm), 0.0, 0.0
    new = keep * dm + direct + tl.load(dborder + chunk + at, mask=mask, other=0.0)
    if ANCHOR:
        new += tl.load(danchor + state + at, mask=mask & last, other=0.0)
    tl.store(dmemory + state + at, new, mask=mask)
    if MOMENTUM:
        s = tl.load(momentum_border + chunk + at, mask=mask, other=0.0).to(tl.float32)
        dpush, dcarry = tl.sum(s * dm), tl.sum(s * ds)
        asked = tl.load(dmomentum_border + chunk + at, mask=mask, other=0.0)
        tl.store(dmomentum + state + at, carry * ds + push * dm + asked, mask=mask)
    return dkeep, dpush, dcarry


@triton.jit
def slopes_backward(
    x, slopes, dslopes, dmemory, dmomentum, w, t, first, t0, bound, end, h, group, place, d,
    N: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a first layer's slopes [N, len d], stored too, and their parts of dw and dt."""
    r = tl.arange(0, N)
    way = features_times(
        x, dmemory, first, t0, bound, end, h, group, d, N, CHUNK, H, D, F, BF, PRECISION
    )
    dw = -tl.sum(slopes * way, axis=1)
    found = chunk_tile(dslopes, place, r, d, PAIRS, D) - w[:, None] * way
    dt = dw
    if MOMENTUM:
        way = features_times(
            x, dmomentum, first, t0, bound, end, h, group, d, N, CHUNK, H, D, F, BF, PRECISION
        )
        dt = -tl.sum(slopes * way, axis=1)
        found -= t[:, None] * way
    found = found.to(dslopes.dtype.element_ty)
    store_chunk(dslopes, found, place, r, d, PAIRS, D)
    return found.to(tl.float32), dw, dt


@triton.jit
def features_times(
    x, weights, first, t0, bound, end, h, group, d,
    N: tl.constexpr, CHUNK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X W^T for some rows of a weight [N, H, D, F] in fp32: [N, len d]"""
    found = tl.zeros([N, d.shape[0]], tl.float32)
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        tile = pair_rows(x, first, t0, bound, end, h, f, N, CHUNK, H, F)
        w = weight_tile(weights + group * (D * F), d, f, D, F).to(tile.dtype)
        found += tl.dot(tile, tl.trans(w), input_precision=PRECISION)
    return found


@triton.jit
def last_backward(
    error, derror, hidden, du, dmemory, dmomentum, start, dstart, borders, momentum_borders, dborders,
    dmomentum_borders, danchor, h, group, place, c, d, kept, pushing, carry, last,
    D: tl.constexpr, V: tl.constexpr, FEEDBACK: tl.constexpr, MOMENTUM: tl.constexpr,
    START: tl.constexpr, ANCHOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the last layer's weight back over one chunk."""
    direct = tl.dot(tl.trans(error), du, input_precision=PRECISION)
    if FEEDBACK:
        direct += tl.dot(tl.trans(derror), hidden, input_precision=PRECISION)
    dm = weight_tile(dmemory + group * (V * D), c, d, V, D)
    ds = dm
    if MOMENTUM:
        ds = weight_tile(dmomentum + group * (V * D), c, d, V, D)
    return unmove(
        dmemory, dmomentum, start, dstart, borders, momentum_borders, dborders, dmomentum_borders, danchor,
        group * (V * D), place * (V * D), h * (V * D), c, d, direct, dm, ds, kept, pushing, carry, last,
        V, D, MOMENTUM, START, ANCHOR,
    )  # fmt: skip


@triton.jit
def first_backward(
    x, dx, dunit, slopes, dmemory, dmomentum, start, dstart, borders, momentum_borders, dborders,
    dmomentum_borders, danchor, w, t, first, t0, bound, end, h, group, place, mine, d, kept, pushing,
    carry, last,
    N: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, MOMENTUM: tl.constexpr, START: tl.constexpr,
    ANCHOR: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of a first layer's weight back over one chunk, and what they ask of the pairs, into dx (ADD: added).

    dunit: gradient of the pre-activations, [N, len d]"""
    dtype: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, N)
    writes = (slopes * w[:, None]).to(dtype)
    pushes = writes
    if MOMENTUM:
        pushes = (slopes * t[:, None]).to(dtype)
    dkeep, dpush, dcarry = 0.0, 0.0, 0.0
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        weight = weight_tile(borders + place * (D * F), d, f, D, F)
        dtile = tl.dot(dunit, weight, input_precision=PRECISION)
        dm = weight_tile(dmemory + group * (D * F), d, f, D, F)
        dtile -= tl.dot(writes, dm.to(dtype), input_precision=PRECISION)
        ds = dm
        if MOMENTUM:
            ds = weight_tile(dmomentum + group * (D * F), d, f, D, F)
            dtile -= tl.dot(pushes, ds.to(dtype), input_precision=PRECISION)
        if ADD:
            dtile += chunk_tile(dx, mine, r, f, PAIRS, F)
        store_chunk(dx, dtile, mine, r, f, PAIRS, F)
        tile = pair_rows(x, first, t0, bound, end, h, f, N, CHUNK, H, F)
        direct = tl.dot(tl.trans(dunit), tile, input_precision=PRECISION)
        more_keep, more_push, more_carry = unmove(
            dmemory, dmomentum, start, dstart, borders, momentum_borders, dborders, dmomentum_borders,
            danchor, group * (D * F), place * (D * F), h * (D * F), d, f, direct, dm, ds, kept, pushing,
            carry, last, D, F, MOMENTUM, START, ANCHOR,
        )  # fmt: skip
        dkeep, dpush, dcarry = dkeep + more_keep, dpush + more_push, dcarry + more_carry
    return dkeep, dpush, dcarry


@triton.jit
def walk_backward_kernel(
    x, mix, keep, push, tail_mix, tail_keep,
    dmemory, dmomentum, start, dstart, borders, momentum_borders, dborders, dmomentum_borders, danchor,
    errors, derrors, units, gates, us, dhidden, dslopes, dgate_slopes, dvalues, dx, dmix, dtail_mix,
    dscalars, mail, arrived,
    pair_start, first_chunk, length, past,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    N: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    GATED: tl.constexpr, FEEDBACK: tl.constexpr, SKIP: tl.constexpr, ACTIVATION: tl.constexpr,
    FAST: tl.constexpr, MOMENTUM: tl.constexpr, START: tl.constexpr, ANCHOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dmemory, dmomentum: what is asked of the state after the last chunk, and in place of that before the first
    units, gates, us: A, its gate and U by chunk   derrors, dhidden, dslopes, dgate_slopes: asked by the reads
    dslopes and dgate_slopes come to hold the whole gradient of the slopes
    filled: dvalues [NC, H, PAIRS, V], gradient of E; dx [NC, H, SLICES, PAIRS, F], dmix, dtail_mix
    [NC, H, SLICES, PAIRS] and dscalars [NC, H, SLICES, 3], of the last keep, last push and carry: by slice"""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    slot, group = tl.program_id(0) % SLICES, tl.program_id(0).to(tl.int64) // SLICES
    h, n = group % H, group // H
    first, end, oldest = tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)
    begin = tl.load(first_chunk + n).to(tl.int64)
    count = (end + CHUNK - 1) // CHUNK
    d, r, c = slot * BD + tl.arange(0, BD), tl.arange(0, N), tl.arange(0, BV)
    dtype: tl.constexpr = x.dtype.element_ty
    for k in range(count):
        tl.debug_barrier()  # what is asked of the state was stored by other threads
        place, t0 = (begin + count - 1 - k) * H + h, (count - 1 - k) * CHUNK
        bound = tl.maximum(oldest, t0 - (WINDOW - 1))
        last = k == 0
        w = chunk_row(mix, place * CHUNK + CHUNK - 1, r, PAIRS)
        kept, pushing, carry = tl.load(keep + place * CHUNK + CHUNK - 1), 0.0, 0.0
        t = w
        if MOMENTUM:
            t = chunk_row(tail_mix, place, r, PAIRS)
            pushing, carry = tl.load(push + place * CHUNK + CHUNK - 1), tl.load(tail_keep + place)
        # what memory and momentum after the chunk ask of the slopes of the first layers
        a = chunk_tile(units, place, r, d, PAIRS, D).to(tl.float32)
        u = chunk_tile(us, place, r, d, PAIRS, D).to(tl.float32)
        s, slope, _ = activation(a, ACTIVATION, FAST)
        g = a
        if GATED:
            g = chunk_tile(gates, place, r, d, PAIRS, D).to(tl.float32)
        hidden = (s * g if GATED else s).to(dtype)
        dslope, dw, dt = slopes_backward(
            x, u * slope * g if GATED else u * slope, dslopes, dmemory[0], dmomentum[0], w, t, first, t0,
            bound, end, h, group, place, d, N, CHUNK, PAIRS, H, D, F, BF, MOMENTUM, PRECISION,
        )  # fmt: skip
        du = slope * dslope
        if GATED:
            dgate_slope, dw_gate, dt_gate = slopes_backward(
                x, u * s, dgate_slopes, dmemory[2], dmomentum[2], w, t, first, t0, bound, end, h, group,
                place, d, N, CHUNK, PAIRS, H, D, F, BF, MOMENTUM, PRECISION,
            )  # fmt: skip
            dw, dt = dw + dw_gate, dt + dt_gate
            du = g * du + s * dgate_slope

        # errors, of which every slice knows a part
        error = chunk_tile(errors, place, r, c, PAIRS, V)
        w1 = weight_tile(borders[1] + place * (V * D), c, d, V, D)
        part = tl.dot(du.to(dtype), tl.trans(w1), input_precision=PRECISION)
        dm = weight_tile(dmemory[1] + group * (V * D), c, d, V, D).to(dtype)
        way = tl.dot(hidden, tl.trans(dm), input_precision=PRECISION)
        dw -= tl.sum(error * way, axis=1)
        part -= w[:, None] * way
        if MOMENTUM:
            dm = weight_tile(dmomentum[1] + group * (V * D), c, d, V, D).to(dtype)
            way = tl.dot(hidden, tl.trans(dm), input_precision=PRECISION)
            dt -= tl.sum(error * way, axis=1)
            part -= t[:, None] * way
        if SLICES > 1:
            part = gathered(part, mail, arrived, group, slot, k, SLICES, N, BV)
        else:
            tl.debug_barrier()  # slopes are read again below
        part += chunk_tile(derrors, place, r, c, PAIRS, V)
        derror = part.to(dtype)
        if slot == 0:
            store_chunk(dvalues, derror, place, r, c, PAIRS, V)

        # hidden units; what is known already is read again, there is no room to keep it
        dh = chunk_tile(dhidden, place, r, d, PAIRS, D).to(tl.float32)
        dm = weight_tile(dmemory[1] + group * (V * D), c, d, V, D).to(dtype)
        dh -= tl.dot((error * w[:, None]).to(dtype), dm, input_precision=PRECISION)
        if MOMENTUM:
            dm = weight_tile(dmomentum[1] + group * (V * D), c, d, V, D).to(dtype)
            dh -= tl.dot((error * t[:, None]).to(dtype), dm, input_precision=PRECISION)
        if FEEDBACK:
            w1 = weight_tile(borders[1] + place * (V * D), c, d, V, D)
            dh += tl.dot(derror, w1, input_precision=PRECISION)
        a = chunk_tile(units, place, r, d, PAIRS, D).to(tl.float32)
        u = chunk_tile(us, place, r, d, PAIRS, D).to(tl.float32)
        dslope = chunk_tile(dslopes, place, r, d, PAIRS, D).to(tl.float32)
        s, slope, bend = activation(a, ACTIVATION, FAST)
        du = slope * dslope
        da = bend * u * dslope + slope * dh
        if GATED:
            g = chunk_tile(gates, place, r, d, PAIRS, D).to(tl.float32)
            dgate_slope = chunk_tile(dgate_slopes, place, r, d, PAIRS, D).to(tl.float32)
            dg = u * du + s * dh
            du = g * du + s * dgate_slope
            da = g * da + slope * u * dgate_slope
        hidden = (s * g if GATED else s).to(dtype)

        # weights and pairs
        dkeep, dpush, dcarry = last_backward(
            error, derror, hidden, du.to(dtype), dmemory[1], dmomentum[1], start[1], dstart[1], borders[1],
            momentum_borders[1], dborders[1], dmomentum_borders[1], danchor[1], h, group, place, c, d, kept,
            pushing, carry, last, D, V, FEEDBACK, MOMENTUM, START, ANCHOR, PRECISION,
        )  # fmt: skip
        more_keep, more_push, more_carry = first_backward(
            x, dx, da.to(dtype), u * slope * g if GATED else u * slope, dmemory[0], dmomentum[0], start[0],
            dstart[0], borders[0], momentum_borders[0], dborders[0], dmomentum_borders[0], danchor[0], w, t,
            first, t0, bound, end, h, group, place, place * SLICES + slot, d, kept, pushing, carry, last,
            N, CHUNK, PAIRS, H, D, F, BF, MOMENTUM, START, ANCHOR, False, PRECISION,
        )  # fmt: skip
        dkeep, dpush, dcarry = dkeep + more_keep, dpush + more_push, dcarry + more_carry
        if GATED:
            tl.debug_barrier()  # the gradient of pairs was stored by other threads
            more_keep, more_push, more_carry = first_backward(
                x, dx, dg.to(dtype), u * s, dmemory[2], dmomentum[2], start[2], dstart[2], borders[2],
                momentum_borders[2], dborders[2], dmomentum_borders[2], danchor[2], w, t, first, t0, bound,
                end, h, group, place, place * SLICES + slot, d, kept, pushing, carry, last,
                N, CHUNK, PAIRS, H, D, F, BF, MOMENTUM, START, ANCHOR, True, PRECISION,
            )  # fmt: skip
            dkeep, dpush, dcarry = dkeep + more_keep, dpush + more_push, dcarry + more_carry
        row, mine = r - (N - PAIRS), place * SLICES + slot
        tl.store(dmix + mine * PAIRS + row, dw, mask=row >= 0)
        tl.store(dscalars + mine * 3, dkeep)
        if MOMENTUM:
            tl.store(dtail_mix + mine * PAIRS + row, dt, mask=row >= 0)
            tl.store(dscalars + mine * 3 + 1, dpush)
            tl.store(dscalars + mine * 3 + 2, dcarry)


@triton.jit
def gather_kernel(
    out, parts, more, others, pair_start, first_chunk, sequence, length, past,
    H: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PAIRS: tl.constexpr, CHUNK: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """The gradient of pairs [rows, H, WIDTH] from what chunks ask: a chunk of its own pairs, the next one of the last
    of them, the first also of those before it. parts: [NC, H, PARTS, PAIRS, WIDTH]; more, others: [NC, H, PAIRS, WIDTH] or None"""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    end, first = tl.load(length + n), tl.load(pair_start + n)
    if t0 >= end:
        return
    EDGE: tl.constexpr = PAIRS - CHUNK
    r, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    inside = (column < WIDTH)[None, :]
    total = rows_asked(parts, more, others, i * H + h, r + EDGE, r < CHUNK, column, WIDTH, PARTS, PAIRS)
    if EDGE > 0:
        later = (r >= CHUNK - EDGE) & (t0 + CHUNK < end)
        row = r - (CHUNK - EDGE)
        total += rows_asked(parts, more, others, (i + 1) * H + h, row, later, column, WIDTH, PARTS, PAIRS)
    here = out + ((first + t0) * H + h) * WIDTH + r[:, None] * (H * WIDTH) + column[None, :]
    tl.store(here, (SIGN * total).to(out.dtype.element_ty), mask=(r < end - t0)[:, None] & inside)
    if EDGE > 0:
        if t0 == 0:
            before = (r < EDGE) & (r >= EDGE - tl.load(past + n))
            total = rows_asked(parts, more, others, i * H + h, r, before, column, WIDTH, PARTS, PAIRS)
            here = out + ((first - EDGE) * H + h) * WIDTH + r[:, None] * (H * WIDTH) + column[None, :]
            tl.store(here, (SIGN * total).to(out.dtype.element_ty), mask=before[:, None] & inside)


@triton.jit
def rows_asked(
    parts, more, others, place, row, there, column,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rows of one chunk, summed over its parts."""
    at = row[:, None] * WIDTH + column[None, :]
    mask = there[:, None] & (column < WIDTH)[None, :]
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + (place * PARTS + part) * (PAIRS * WIDTH) + at, mask=mask, other=0.0)
    if more is not None:
        total += tl.load(more + place * (PAIRS * WIDTH) + at, mask=mask, other=0.0)
    if others is not None:
        total += tl.load(others + place * (PAIRS * WIDTH) + at, mask=mask, other=0.0)
    return total
