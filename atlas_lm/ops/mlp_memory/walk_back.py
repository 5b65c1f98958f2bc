"""The walk back over borders, from what is asked of the state after a chunk, dW and dS, and of its units (see
`units_back`), with B = s'(A), C = s'' U:

    dU += -B (w Y0 + u Y0s),    Y0 = dW0 X,  Y0s = dS0 X,     Z = dW1^T E,  Zs = dS1^T E
    dE += W1 dU - dW1 (w H) - dS1 (u H)
    dA += B (W1^T dE - w Z - u Zs) - C (w Y0 + u Y0s)
    dW = keep dW + (dA X^T | dU E^T + H dE^T) + what reads ask,    dS = carry dS + push dW + what reads ask

A gate G has tiles of its own: B = s' G, C = s'' G U, Yg = dWg X, and
    dU += -s (w Yg),   dA += -s' U (w Yg),   dG += s (W1^T dE - w Z) - s' U (w Y0)
A program holds rows of dW in registers where there is room, and those of dS in memory; dE is the one sum
over slices of a head.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.normed import core_and_values
from atlas_lm.ops.mlp_memory.pieces import (
    all_settled,
    block_of,
    blocks_in,
    blocks_of,
    chunk_tiles,
    collect,
    feature_tiles,
    fresh,
    gained,
    held_or_read,
    hold_or_store,
    layer,
    nought,
    outer,
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
from atlas_lm.ops.mlp_memory.reads import narrowed


@triton.jit
def columns_weighed(tiles, weights):
    """Each column times its weight, in fp32."""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tiles[i] * weights[i][None, :],)
    return found


@triton.jit
def plus(tiles, others):
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tiles[i] + others[i],)
    return found


@triton.jit
def negative(tiles):
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (-tiles[i],)
    return found


@triton.jit
def less(tiles, lefts, rights):
    """tile - left * right of each"""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tiles[i] - lefts[i] * rights[i],)
    return found


@triton.jit
def through_errors(
    da,
    dgates,
    bent,
    opened,
    last,
    derror,
    dtype: tl.constexpr,
    READS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dA and dG with what errors ask of units, rounded. last: W1^T"""
    if READS:
        back, added, opening = times(last, derror, PRECISION), (), ()
        for i in tl.static_range(len(da)):
            added = added + (da[i] + bent[i] * back[i],)
            if len(dgates) > 0:
                opening = opening + (dgates[i] + opened[i] * back[i],)
        da, dgates = added, opening
    return narrowed(da, dtype), narrowed(dgates, dtype)


@triton.jit
def back_over(
    held, dmemory, i: tl.constexpr, sums, borders, dborders, start, dstart, dmomentum, momentum_borders,
    dmomentum_borders, keep, push, carry, group, place, h, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    dtype: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """What is asked of weight i before the chunk, as far as errors have no part in it: keep dW + what reads
    ask.
    Its momentum's dS = carry dS + push dW + what reads ask, where it lies; dstart += (1 - keep) dW. In the
    places of what reads ask stands then what is asked of the state after the chunk.

    sums: (W - Z, dW), (S, dW), (S, dS) by row, so far. Returned with dW, () if memory has it"""
    WIDTH: tl.constexpr = second(i, F, V)
    BLOCK: tl.constexpr = second(i, BF, BV)
    here, there = place * (D * WIDTH), group * (D * WIDTH)
    by_keep, by_push, by_carry = sums
    kept = ()
    for f in tl.static_range(blocks_in(i, F, V, BF, BV)):
        dnow = held_or_read(held, dmemory, i, f, group, d, D, F, V, BF, BV)
        beyond = block_of(borders[i] + here, f, d, D, WIDTH, BLOCK).to(tl.float32)
        if len(start) > 0:
            beyond -= block_of(start[i] + h * (D * WIDTH), f, d, D, WIDTH, BLOCK)
            pulled = block_of(dstart[i] + there, f, d, D, WIDTH, BLOCK) + (1.0 - keep) * dnow
        by_keep += tl.sum(beyond * dnow, axis=1)
        block = keep * dnow + block_of(dborders[i] + here, f, d, D, WIDTH, BLOCK)
        block = settled(block, tl.float32, FAST)
        if len(dmomentum) > 0:
            moved = block_of(momentum_borders[i] + here, f, d, D, WIDTH, BLOCK).to(tl.float32)
            dmoved = block_of(dmomentum[i] + there, f, d, D, WIDTH, BLOCK)
            by_push += tl.sum(moved * dnow, axis=1)
            by_carry += tl.sum(moved * dmoved, axis=1)
            asked = block_of(dmomentum_borders[i] + here, f, d, D, WIDTH, BLOCK)
            asked = carry * dmoved + push * dnow + asked
            tl.debug_barrier()  # all have read what is written over
            store_block(dmomentum[i] + there, f, asked, d, D, WIDTH, BLOCK)
            store_block(dmomentum_borders[i] + here, f, dmoved.to(dtype), d, D, WIDTH, BLOCK)
        else:
            tl.debug_barrier()
        if len(start) > 0:
            store_block(dstart[i] + there, f, pulled, d, D, WIDTH, BLOCK)
        store_block(dborders[i] + here, f, dnow.to(dtype), d, D, WIDTH, BLOCK)
        kept = hold_or_store(kept, held, block, dmemory, i, f, group, d, D, F, V, BF, BV)
    return kept, (by_keep, by_push, by_carry)


@triton.jit
def grown_with(
    blocks, dmemory, i: tl.constexpr, da, dback, dgates, hidden, xs, error, derror, danchor, first, group, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    READS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW + what errors ask: dA X^T, dU E^T + H dE^T, dG X^T, and at the last border what is asked of the
    anchor"""
    kept = ()
    for f in tl.static_range(blocks_in(i, F, V, BF, BV)):
        block = held_or_read(blocks, dmemory, i, f, group, d, D, F, V, BF, BV)
        if i == 1:
            block += outer(dback, error, PRECISION)
            if READS:
                block += outer(hidden, derror, PRECISION)
        elif i == 0:
            block += outer(da, xs[f], PRECISION)
        else:
            block += outer(dgates, xs[f], PRECISION)
        if len(danchor) > 0:
            block += held_or_read((), danchor, i, f, group, tl.where(first, d, D), D, F, V, BF, BV)
        kept = hold_or_store(kept, blocks, block, dmemory, i, f, group, d, D, F, V, BF, BV)
    return kept


@triton.jit
def walk_backward_kernel(
    x, v, mix, keep, push, tail_mix, tail_keep, norm, cores, dnorm,
    dmemory, dmomentum, start, dstart, borders, momentum_borders, dborders, dmomentum_borders, danchor,
    errors, derrors, units, dvalues, dscalars,
    mail, arrived, turn, pair_start, first_chunk, length, past,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr,
    FEEDBACK: tl.constexpr, FAST: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """HELD: whether dW stays in registers from chunk to chunk, else it goes back and forth
    dmemory, dmomentum: asked of the state after the last chunk, left as what is asked before the first
    dstart: zero, fp32 [N, H, ...], filled
    dborders, dmomentum_borders: asked by the reads of each chunk, left as what is asked of the state after it
    units: dU, dA (and dG) are left as they are after the walk
    norm: scale and bias [H, V], cores: as the walk forward left them; () without a norm
    filled: dvalues [NC, H, V, PAIRS], gradient of skip X - V, or of -V for dot; dnorm [NC, H, 2, V];
    dscalars [NC, H, 3, D], of the last keep, last push and carry: parts, to be summed"""
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
        held = weight_tiles(dmemory, group, rows, D, F, V, BF, BV)
    for k in range(count):
        zero = nought(k, FAST)
        d, c = fresh(rows, zero), fresh(columns, zero)
        back_at = count - 1 - k + zero  # so that no pointer is kept for each tensor and moved on
        place, t0 = (begin + back_at) * H + h, back_at * CHUNK
        at_units = place * (D * PAIRS)
        bound = tl.maximum(oldest, t0 - (WINDOW - 1))
        xs = feature_tiles(x, first, t0, bound, end, h, zero, CHUNK, BE, H, F, BF)
        error = chunk_tiles(errors + place * (V * PAIRS), c, V, CHUNK, EDGE, BE)
        hidden = chunk_tiles(units[0] + at_units, d, D, CHUNK, EDGE, BE)
        bent = chunk_tiles(units[2] + at_units, d, D, CHUNK, EDGE, BE)
        w = vectors(mix + (place * CHUNK + CHUNK - 1) * PAIRS, CHUNK, EDGE, BE)
        kept, pushing, carry = tl.load(keep + place * CHUNK + CHUNK - 1), 0.0, 0.0
        u = w
        if len(dmomentum) > 0:
            u = vectors(tail_mix + place * PAIRS, CHUNK, EDGE, BE)
            pushing, carry = tl.load(push + place * CHUNK + CHUNK - 1), tl.load(tail_keep + place)

        # what the state after the chunk asks of its slopes
        dnow = held
        if not HELD:
            dnow = weight_tiles(dmemory, group, d, D, F, V, BF, BV)
        dnarrow = rounded(dnow, dtype)
        way0 = all_settled(columns_weighed(layer(dnarrow[0], xs, PRECISION), w), tl.float32, FAST)
        way1 = columns_weighed(times(dnarrow[1][0], error, PRECISION), w)
        way1 = all_settled(way1, tl.float32, FAST)
        dmoved = ()
        if len(dmomentum) > 0:
            dmoved = rounded(weight_tiles(dmomentum, group, d, D, F, V, BF, BV), dtype)
            way0 = plus(way0, columns_weighed(layer(dmoved[0], xs, PRECISION), u))
            way0 = all_settled(way0, tl.float32, FAST)
            way1 = plus(way1, columns_weighed(times(dmoved[1][0], error, PRECISION), u))
            way1 = all_settled(way1, tl.float32, FAST)
        curved = chunk_tiles(units[3] + at_units, d, D, CHUNK, EDGE, BE)
        da = less(chunk_tiles(units[5] + at_units, d, D, CHUNK, EDGE, BE), curved, way0)
        da, opened, dgates = less(da, bent, way1), bent, ()
        dback = less(chunk_tiles(units[4] + at_units, d, D, CHUNK, EDGE, BE), bent, way0)
        if len(dmemory) > 2:
            wayg = columns_weighed(layer(dnarrow[2], xs, PRECISION), w)
            if len(dmomentum) > 0:
                wayg = plus(wayg, columns_weighed(layer(dmoved[2], xs, PRECISION), u))
            opened = chunk_tiles(units[7] + at_units, d, D, CHUNK, EDGE, BE)
            dback = less(dback, opened, wayg)
            crossed = chunk_tiles(units[8] + at_units, d, D, CHUNK, EDGE, BE)
            da = less(da, crossed, wayg)
            dgates = less(chunk_tiles(units[9] + at_units, d, D, CHUNK, EDGE, BE), crossed, way0)
            dgates = less(dgates, opened, way1)
        da, dgates = all_settled(da, tl.float32, FAST), all_settled(dgates, tl.float32, FAST)
        dback = all_settled(dback, dtype, FAST)
        (last,) = blocks_of(borders[1] + place * (D * V), d, D, V, BV)
        part = times(tl.trans(last), dback, PRECISION)
        part = gained(
            part, tl.trans(dnarrow[1][0]), weighted(hidden, negative(w), dtype), PRECISION
        )
        if len(dmomentum) > 0:
            part = gained(
                part, tl.trans(dmoved[1][0]), weighted(hidden, negative(u), dtype), PRECISION
            )
        if SLICES > 1:
            post(part, mail, arrived, group, slot, k, c, SLICES, CHUNK, BE)

        # while the others' parts of dE are on their way: all that does not wait for it
        d = fresh(rows, nought(k, FAST))
        nothing = tl.zeros([BD], tl.float32)
        sums, kept_back = (nothing, nothing, nothing), ()
        for i in tl.static_range(len(dmemory)):
            blocks, sums = back_over(
                held, dmemory, i, sums, borders, dborders, start, dstart, dmomentum, momentum_borders,
                dmomentum_borders, kept, pushing, carry, group, place, h, d, D, F, V, BF, BV, dtype, FAST,
            )  # fmt: skip
            kept_back = with_weight(kept_back, held, blocks)
        scalars = dscalars + place * (3 * D) + d
        for i in tl.static_range(3):
            if i == 0 or len(dmomentum) > 0:
                tl.store(scalars + i * D, sums[i], mask=d < D)
        tl.debug_barrier()  # what was written to dW and dS is read anew by others

        if SLICES > 1:
            part = collect(part, mail, arrived, group, k, c, SLICES, CHUNK, BE)
        derror = plus(part, chunk_tiles(derrors + place * (V * PAIRS), c, V, CHUNK, EDGE, BE))
        derror, dtargets = core_and_values(
            derror, x, v, cores, norm, dnorm, slot, place, first, t0, bound, end, h, c, CHUNK, EDGE, BE, H,
            F, V, FEEDBACK,
        )  # fmt: skip
        derror = narrowed(derror, dtype)
        for i in tl.static_range(len(derror)):
            if slot == 0:
                store_tile(dvalues + place * (V * PAIRS), dtargets[i], c, i, V, CHUNK, EDGE, BE)
        da, dgates = through_errors(da, dgates, bent, opened, last, derror, dtype, READS, PRECISION)
        for i in tl.static_range(len(da)):
            store_tile(units[5] + at_units, da[i], d, i, D, CHUNK, EDGE, BE)
            if len(dmemory) > 2:
                store_tile(units[9] + at_units, dgates[i], d, i, D, CHUNK, EDGE, BE)
        after = ()
        for i in tl.static_range(len(dmemory)):
            blocks = grown_with(
                kept_back, dmemory, i, da, dback, dgates, hidden, xs, error, derror, danchor, k == 0, group,
                d, D, F, V, BF, BV, READS, PRECISION,
            )  # fmt: skip
            after = with_weight(after, held, blocks)
        held = after
        if not HELD:
            tl.debug_barrier()  # read anew by others
    if HELD:
        store_weights(dmemory, held, group, rows, D, F, V, BF, BV)
