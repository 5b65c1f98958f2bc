"""The walk from border to border. A head's hidden units are cut into slices of BD, a program each, whose
rows of the memory stay in registers where there is room:

    A = W0 X,  H = s(A),  E = skip X + W1 H - V,  P = s'(A) * (W1^T E)
    W0' = keep W0 + push S0 + (1 - keep) Z0 - (w P) X^T,  W1^T' = ... - (w H) E^T,  S0' = carry S0 - (u P) X^T

All is local to a slice but E, of which each posts its part and adds up all. W are rounded to the inputs'
dtype for products, and so are their borders, which reads and the walk back begin from.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.normed import error_through_norm
from atlas_lm.ops.mlp_memory.pieces import (
    activation,
    block_of,
    blocks_in,
    collect,
    feature_tiles,
    fresh,
    held_or_read,
    hold_or_store,
    layer,
    nought,
    outer,
    pair_tiles,
    pairs_there,
    post,
    rounded,
    second,
    settled,
    store_block,
    store_tile,
    store_weights,
    times,
    turn_of,
    vectors,
    weight_tiles,
    weighted,
    with_weight,
)


@triton.jit
def units_of(
    w, xs, ACTIVATION: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Of the pairs, by tile: H, and what P and the gate's P are of W1^T E: s'(A) (with a gate s' G), s(A)"""
    units = layer(w[0], xs, PRECISION)
    gates = units
    if len(w) > 2:
        gates = layer(w[2], xs, PRECISION)
    hidden, bent, opened = (), (), ()
    for i in tl.static_range(len(units)):
        one, slope, _ = activation(units[i], ACTIVATION, FAST)
        if len(w) > 2:
            opened = opened + (settled(one, dtype, FAST),)
            one, slope = one * gates[i], slope * gates[i]
        hidden = hidden + (settled(one, dtype, FAST),)
        bent = bent + (settled(slope, dtype, FAST),)
    return hidden, bent, opened


@triton.jit
def less_targets(
    parts, mine, x, v, first, t0, bound, end, h, c,
    CHUNK: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """+ skip X - V, of one slice: the others' parts, mine = False, stay as they are"""
    bound, end = tl.where(mine, bound, end), tl.where(mine, end, bound)
    values = pair_tiles(v, first, t0, bound, end, h, c, CHUNK, BE, H, V)
    found = ()
    for i in tl.static_range(len(parts)):
        found = found + (parts[i] - values[i],)
    if SKIP:
        added, parts, found = pair_tiles(x, first, t0, bound, end, h, c, CHUNK, BE, H, F), found, ()
        for i in tl.static_range(len(parts)):
            found = found + (parts[i] + added[i],)
    return found


@triton.jit
def claims_of(
    narrow, xs, x, v, slot, first, t0, bound, end, h, c,
    CHUNK: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    READS: tl.constexpr, NORMED: tl.constexpr, SKIP: tl.constexpr,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Units of the pairs as `units_of`, and what a slice says of them: its part of W1 H, and without a norm
    one of them + skip X - V. READS: slopes depend on what the memory says"""
    hidden, bent, opened = units_of(narrow, xs, ACTIVATION, FAST, PRECISION, dtype)
    said = ()
    for i in tl.static_range(len(hidden)):
        said = said + (tl.zeros([c.shape[0], hidden[i].shape[1]], tl.float32),)
    if READS:
        said = times(tl.trans(narrow[1][0]), hidden, PRECISION)
    if not NORMED:
        mine = (slot == 0) | (not READS)
        said = less_targets(said, mine, x, v, first, t0, bound, end, h, c, CHUNK, BE, H, F, V, SKIP)
    return hidden, bent, opened, said


@triton.jit
def claims_through_norm(
    said, cores, norm, x, v, slot, place, first, t0, bound, end, h, c,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """With a norm, errors from W1 H, which one of the slices puts into cores; without one they are there."""
    found = said
    if len(norm) > 0:
        targets = less_targets(
            said, True, x, v, first, t0, bound, end, h, c, CHUNK, BE, H, F, V, FEEDBACK
        )
        for i in tl.static_range(len(said)):
            if slot == 0:
                store_tile(
                    cores[0] + place * (V * (CHUNK + EDGE)), said[i], c, i, V, CHUNK, EDGE, BE
                )
        there = pairs_there(t0, bound, end, CHUNK, BE)
        found = error_through_norm(said, targets, there, norm, h, c, V, FEEDBACK)
    return found


@triton.jit
def kept_errors(
    said, errors, slot, place, c,
    V: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Rounded, and stored by one of the slices."""
    error = ()
    for i in tl.static_range(len(said)):
        error = error + (said[i].to(dtype),)
        if slot == 0:
            store_tile(errors + place * (V * (CHUNK + EDGE)), error[i], c, i, V, CHUNK, EDGE, BE)
    return error


@triton.jit
def slopes_of(last, error, xs, hidden, bent, opened, PRECISION: tl.constexpr):
    """Both factors of the slopes of all weights, (weight)(tile) and (weight)(block)(tile). last: W1^T"""
    back = times(last, error, PRECISION)
    firsts, gated = (), ()
    for i in tl.static_range(len(back)):
        firsts = firsts + (back[i] * bent[i],)
        if len(opened) > 0:
            gated = gated + (back[i] * opened[i],)
    return (firsts, hidden, gated), (xs, (error,), xs)


@triton.jit
def moved_on(
    held, memory, i: tl.constexpr, left, rights, w, u, keep, push, carry, momentum, start, borders, group,
    place, h, d, D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weight i after the chunk, keep W + push S + (1 - keep) Z - (w left) right^T, held in registers or not.
    Its momentum goes on where it lies, carry S - (u left) right^T, the one before put into its border."""
    dtype: tl.constexpr = rights[0][0].dtype
    WIDTH: tl.constexpr = second(i, F, V)
    BLOCK: tl.constexpr = second(i, BF, BV)
    writes, kept = weighted(left, w, dtype), ()
    pushes = writes
    if len(momentum) > 0:
        pushes = weighted(left, u, dtype)
    for f in tl.static_range(blocks_in(i, F, V, BF, BV)):
        block = keep * held_or_read(held, memory, i, f, group, d, D, F, V, BF, BV)
        if len(start) > 0:
            block += (1.0 - keep) * block_of(start[i] + h * (D * WIDTH), f, d, D, WIDTH, BLOCK)
        if len(momentum) > 0:
            moving = block_of(momentum[i] + group * (D * WIDTH), f, d, D, WIDTH, BLOCK)
            block += push * moving
            store_block(borders[i] + place * (D * WIDTH), f, moving, d, D, WIDTH, BLOCK)
            moving = carry * moving - outer(pushes, rights[f], PRECISION)
            tl.debug_barrier()  # all have read what is written over
            store_block(momentum[i] + group * (D * WIDTH), f, moving, d, D, WIDTH, BLOCK)
        block = settled(block - outer(writes, rights[f], PRECISION), tl.float32, FAST)
        kept = hold_or_store(kept, held, block, memory, i, f, group, d, D, F, V, BF, BV)
    return kept


@triton.jit
def walk_forward_kernel(
    x, v, mix, keep, push, tail_mix, tail_keep, norm,
    memory, momentum, start, borders, momentum_borders, anchor, errors, cores, mail, arrived, turn,
    pair_start, first_chunk, length, past,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr,
    FEEDBACK: tl.constexpr, SKIP: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr,
    HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """HELD: whether the memory stays in registers from chunk to chunk, else it goes back and forth
    memory, momentum: before the first chunk, and left as they are after the last; [N, H, ...] fp32
    start: [H, ...] fp32   norm: scale and bias [H, V] fp32, or ()
    filled: borders, momentum_borders [NC, H, ...], before each chunk; anchor, before the last one; errors
    [NC, H, V, PAIRS], and with a norm cores, W1 H"""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    PAIRS: tl.constexpr = CHUNK + EDGE
    READS: tl.constexpr = FEEDBACK or len(norm) > 0  # slopes depend on what the memory says
    slot, group = turn_of(turn, SLICES)
    h, n = group % H, group // H
    first, end, oldest = tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)
    begin = tl.load(first_chunk + n).to(tl.int64)
    count = (end + CHUNK - 1) // CHUNK
    rows, columns = slot * BD + tl.arange(0, BD), tl.arange(0, BV)
    dtype: tl.constexpr = x.dtype.element_ty
    held = ()
    if HELD:
        held = weight_tiles(memory, group, rows, D, F, V, BF, BV)
    for k in range(count):
        zero = nought(k, FAST)
        d, c = fresh(rows, zero), fresh(columns, zero)
        here = k + zero  # so that no pointer is kept for each tensor and moved on
        place, t0 = (begin + here) * H + h, here * CHUNK
        bound = tl.maximum(oldest, t0 - (WINDOW - 1))
        now = held
        if not HELD:
            now = weight_tiles(memory, group, d, D, F, V, BF, BV)
        narrow = rounded(now, dtype)
        xs = feature_tiles(x, first, t0, bound, end, h, zero, CHUNK, BE, H, F, BF)
        hidden, bent, opened, read = claims_of(
            narrow, xs, x, v, slot, first, t0, bound, end, h, c, CHUNK, BE, H, F, V, READS, len(norm) > 0,
            SKIP and FEEDBACK, ACTIVATION, FAST, PRECISION, dtype,
        )  # fmt: skip
        if READS and SLICES > 1:
            post(read, mail, arrived, group, slot, k, c, SLICES, CHUNK, BE)
        store_weights(borders, narrow, place, d, D, F, V, BF, BV)
        if k == count - 1:
            store_weights(anchor, now, group, d, D, F, V, BF, BV)
        if READS and SLICES > 1:
            read = collect(read, mail, arrived, group, k, c, SLICES, CHUNK, BE)
        read = claims_through_norm(
            read, cores, norm, x, v, slot, place, first, t0, bound, end, h, c, CHUNK, EDGE, BE, H, F, V,
            FEEDBACK
        )  # fmt: skip
        error = kept_errors(read, errors, slot, place, c, V, CHUNK, EDGE, BE, dtype)

        d = fresh(rows, nought(k, FAST))
        last = held_or_read(held, memory, 1, 0, group, d, D, F, V, BF, BV)
        lefts, rights = slopes_of(last.to(dtype), error, xs, hidden, bent, opened, PRECISION)
        w = vectors(mix + (place * CHUNK + CHUNK - 1) * PAIRS, CHUNK, EDGE, BE)
        u, kept, pushing, carry = w, tl.load(keep + place * CHUNK + CHUNK - 1), 0.0, 0.0
        if len(momentum) > 0:
            u = vectors(tail_mix + place * PAIRS, CHUNK, EDGE, BE)
            pushing, carry = tl.load(push + place * CHUNK + CHUNK - 1), tl.load(tail_keep + place)
        after = ()
        for i in tl.static_range(len(memory)):
            blocks = moved_on(
                held, memory, i, lefts[i], rights[i], w, u, kept, pushing, carry, momentum, start,
                momentum_borders, group, place, h, d, D, F, V, BF, BV, FAST, PRECISION,
            )  # fmt: skip
            after = with_weight(after, held, blocks)
        held = after
        if len(momentum) > 0 or not HELD:
            tl.debug_barrier()  # read anew by others
    if HELD:
        store_weights(memory, held, group, rows, D, F, V, BF, BV)
