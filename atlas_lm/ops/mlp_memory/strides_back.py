"""Muon backwards, stride by stride (see `strides`). From dS_j, asked of the momentum at every jump of a
chunk, come the slopes that its pairs are asked for, as in `walk_back` but with a sum over the jumps,

    Y0 = sum_j u_j (dS_j X),   Z = sum_j u_j (dS_j^T E),   dS_0 = sum_j keep_j dS_j,   du_j = -(P, dS_j X) ...

then what the jumps of the chunk before ask of their O and of the memory before them: dO_j = -step_j dW_j,
dW_{j-1} = fade_j dW_j + what reads ask. Units are computed anew.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.normed import core_and_values
from atlas_lm.ops.mlp_memory.pieces import (
    all_settled,
    at_pairs,
    blocks_of,
    chunk_tiles,
    collect,
    feature_tiles,
    gained,
    layer,
    post,
    size_of,
    store_blocks,
    store_tile,
    store_vector,
    store_weights,
    times,
    turn_of,
    vectors,
    weight_tiles,
    weighted,
)
from atlas_lm.ops.mlp_memory.reads import narrowed, place_of
from atlas_lm.ops.mlp_memory.strides import sequence_of
from atlas_lm.ops.mlp_memory.tokens_back import less_columns, none_of
from atlas_lm.ops.mlp_memory.walk_back import (
    columns_weighed,
    grown_with,
    less,
    negative,
    plus,
    through_errors,
)


@triton.jit
def met(tiles, others, BD: tl.constexpr):
    """Sums of products along the rows of all weights, [BD]"""
    total = tl.zeros([BD], tl.float32)
    for i in tl.static_range(len(tiles)):
        for f in tl.static_range(len(tiles[i])):
            total += tl.sum(tiles[i][f].to(tl.float32) * others[i][f], axis=1)
    return total


@triton.jit
def pull(
    dstart, dnow, start, w, keep, place, h, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Adds what is asked of the start to dstart; the memory minus its start."""
    asked, beyond = (), ()
    before = weight_tiles(dstart, place, d, D, F, V, BF, BV)
    still = weight_tiles(start, h, d, D, F, V, BF, BV)
    for i in tl.static_range(len(dnow)):
        blocks, rest = (), ()
        for f in tl.static_range(len(dnow[i])):
            blocks = blocks + (before[i][f] + (1.0 - keep) * dnow[i][f],)
            rest = rest + (w[i][f].to(tl.float32) - still[i][f],)
        asked, beyond = asked + (blocks,), beyond + (rest,)
    tl.debug_barrier()  # all have read what is written over
    store_weights(dstart, asked, place, d, D, F, V, BF, BV)
    return beyond


@triton.jit
def kept_and_asked(
    dnow, asked, keep, place, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """keep dW + what reads ask"""
    reads, found = weight_tiles(asked, place, d, D, F, V, BF, BV), ()
    for i in tl.static_range(len(dnow)):
        blocks = ()
        for f in tl.static_range(len(dnow[i])):
            blocks = blocks + (keep * dnow[i][f] + reads[i][f],)
        found = found + (blocks,)
    return found


@triton.jit
def asked_pushes(
    weight, dpushed, before, j, last, keep, slot, source, group, d, dtype: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, JUMPS: tl.constexpr,
):  # fmt: skip
    """dS_j of one weight, rounded and put back where it lies; part of dkeep_j. The last one begins with what
    later chunks ask of the momentum, dS, where in its stead keep_j dS_j is summed up."""
    here = dpushed + (slot * JUMPS + j) * (D * WIDTH)
    asked = blocks_of(here, d, D, WIDTH, BLOCK)
    carried = blocks_of(weight + group * (D * WIDTH), d, D, WIDTH, BLOCK)
    pushed = blocks_of(before + source * (D * WIDTH), d, D, WIDTH, BLOCK)
    found, rest = (), ()
    dkeep = tl.zeros([d.shape[0]], tl.float32)
    for f in tl.static_range(len(asked)):
        one = asked[f].to(tl.float32) + tl.where(last, carried[f], 0.0)
        dkeep += tl.sum(one * pushed[f], axis=1)
        found = found + (one.to(dtype),)
        rest = rest + (keep * one + tl.where(last, 0.0, carried[f]),)
    tl.debug_barrier()  # all have read what is written over
    store_blocks(here, found, d, D, WIDTH, BLOCK)
    store_blocks(weight + group * (D * WIDTH), rest, d, D, WIDTH, BLOCK)
    return found, dkeep


@triton.jit(do_not_specialize=["k", "rank0"])
def stride_backward_kernel(
    x, v, pushes, keeps, fades, steps, norm, cores, dnorm,
    dmemory, dmomentum, start, dstart, jumps, djumps, before, dpushed, places, dplaces, danchor, errors,
    dunits, dvalues, dpushes, dkeeps, dfades, dsteps, mail, arrived, turn,
    order, pair_start, first_chunk, last_chunk, length, past, k, rank0,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr, JUMPS: tl.constexpr,
    BEFORE: tl.constexpr, FEEDBACK: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From chunk k back to chunk k - 1, of the sequences whose rank is rank0 and more.

    dmemory, dmomentum: asked of the state behind the stride, left as what is asked before it
    dstart: [N, H, ...] fp32, zero before the first launch, filled
    dpushed: asked of the S of chunk k, [rank, H, JUMPS, ...], or () behind the last; left with what later
    chunks ask
    before: S of chunk k - 1 likewise, or the first momentum, [rank, H, BEFORE, ...]
    jumps: O of chunk k - 1 likewise, or () before the first   filled: djumps, likewise; by chunk dunits, dA
    and with a gate dG [NC, H, D, PAIRS], dvalues [NC, H, V, PAIRS] and dnorm [NC, H, 2, V] as in
    `walk_back`, dpushes [NC, H, JUMPS, SLICES, PAIRS], dkeeps, dfades, dsteps [NC, H, JUMPS, D]: parts, to
    be summed"""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    PAIRS: tl.constexpr = CHUNK + EDGE
    READS: tl.constexpr = FEEDBACK or len(norm) > 0  # slopes depend on what the memory says
    slot, rank = turn_of(turn, SLICES)
    rank += rank0 * H
    n, h, group, begin, first_place = sequence_of(order, first_chunk, rank, H, JUMPS)
    d, c = slot * BD + tl.arange(0, BD), tl.arange(0, BV)
    dtype: tl.constexpr = x.dtype.element_ty
    if len(dpushed) > 0:
        first, end, oldest = tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)
        chunks = tl.load(first_chunk + n + 1) - tl.load(first_chunk + n)
        place, t0 = (begin + k) * H + h, k * CHUNK
        bound, at_units = tl.maximum(oldest, t0 - (WINDOW - 1)), place * (D * PAIRS)
        xs = feature_tiles(x, first, t0, bound, end, h, 0, CHUNK, BE, H, F, BF)
        error = chunk_tiles(errors + place * (V * PAIRS), c, V, CHUNK, EDGE, BE)
        w = weight_tiles(places, (first_place + k * JUMPS) * H + h, d, D, F, V, BF, BV)
        hidden, slopes, bent, curved, gated, opened, crossed = at_pairs(
            w, xs, error, ACTIVATION, FAST, PRECISION, dtype
        )
        way0, part = none_of(error, BD), none_of(error, BV)
        way1, wayg = way0, way0
        for turned in range(JUMPS):
            j = JUMPS - 1 - turned
            u = vectors(pushes + (place * JUMPS + j) * PAIRS, CHUNK, EDGE, BE)
            kept, last = tl.load(keeps + place * JUMPS + j), turned == 0
            source = rank * BEFORE + BEFORE - 1
            du = ()
            for i in tl.static_range(len(error)):
                du = du + (tl.zeros([error[i].shape[1]], tl.float32),)
            asked, dkeep = asked_pushes(
                dmomentum[0], dpushed[0], before[0], j, last, kept, rank, source, group, d, dtype, D, F, BF,
                JUMPS
            )  # fmt: skip
            way = layer(asked, xs, PRECISION)
            du, way0 = less_columns(du, slopes, way), plus(way0, columns_weighed(way, u))
            asked, more = asked_pushes(
                dmomentum[1], dpushed[1], before[1], j, last, kept, rank, source, group, d, dtype, D, V, BV,
                JUMPS
            )  # fmt: skip
            way = times(asked[0], error, PRECISION)
            du, way1 = less_columns(du, hidden, way), plus(way1, columns_weighed(way, u))
            part = gained(part, tl.trans(asked[0]), weighted(hidden, negative(u), dtype), PRECISION)
            dkeep += more
            if len(dmomentum) > 2:
                asked, more = asked_pushes(
                    dmomentum[2], dpushed[2], before[2], j, last, kept, rank, source, group, d, dtype, D, F,
                    BF, JUMPS,
                )  # fmt: skip
                way = layer(asked, xs, PRECISION)
                du, wayg = less_columns(du, gated, way), plus(wayg, columns_weighed(way, u))
                dkeep += more
            mine = dpushes + ((place * JUMPS + j) * SLICES + slot) * PAIRS
            for i in tl.static_range(len(du)):
                store_vector(mine, du[i], i, CHUNK, EDGE, BE)
            tl.store(dkeeps + (place * JUMPS + j) * D + d, dkeep, mask=d < D)
            tl.debug_barrier()  # read anew in the next round
        nothing, dgates = none_of(error, BD), ()
        da, dback = less(less(nothing, curved, way0), bent, way1), less(nothing, bent, way0)
        if len(dmemory) > 2:
            dback, da = less(dback, opened, wayg), less(da, crossed, wayg)
            dgates = less(less(nothing, crossed, way0), opened, way1)
        da, dgates = all_settled(da, tl.float32, FAST), all_settled(dgates, tl.float32, FAST)
        dback = all_settled(dback, dtype, FAST)
        part = gained(part, tl.trans(w[1][0]), dback, PRECISION)
        if SLICES > 1:
            later = chunks - 1 - k
            post(part, mail, arrived, group, slot, later, c, SLICES, CHUNK, BE)
            part = collect(part, mail, arrived, group, later, c, SLICES, CHUNK, BE)
        derror, dtargets = core_and_values(
            part, x, v, cores, norm, dnorm, slot, place, first, t0, bound, end, h, c, CHUNK, EDGE, BE, H, F,
            V, FEEDBACK,
        )  # fmt: skip
        derror = narrowed(derror, dtype)
        for i in tl.static_range(len(derror)):
            if slot == 0:
                store_tile(dvalues + place * (V * PAIRS), dtargets[i], c, i, V, CHUNK, EDGE, BE)
        da, dgates = through_errors(
            da, dgates, bent, opened, w[1][0], derror, dtype, READS, PRECISION
        )
        for i in tl.static_range(len(da)):
            store_tile(dunits[0] + at_units, da[i], d, i, D, CHUNK, EDGE, BE)
            if len(dmemory) > 2:
                store_tile(dunits[1] + at_units, dgates[i], d, i, D, CHUNK, EDGE, BE)
        dlater, dnow = weight_tiles(dmemory, group, d, D, F, V, BF, BV), ()
        border = begin + k == tl.load(last_chunk + n)
        for i in tl.static_range(len(dmemory)):
            blocks = grown_with(
                dlater, dmemory, i, da, dback, dgates, hidden, xs, error, derror, danchor, border, group, d,
                D, F, V, BF, BV, READS, PRECISION,
            )  # fmt: skip
            dnow = dnow + (blocks,)
    else:
        dnow = weight_tiles(dmemory, group, d, D, F, V, BF, BV)
    dnow = kept_and_asked(dnow, dplaces, 1.0, (first_place + k * JUMPS) * H + h, d, D, F, V, BF, BV)
    if len(jumps) > 0:
        for turned in range(JUMPS):
            j = JUMPS - 1 - turned
            at = ((begin + k - 1) * H + h) * JUMPS + j
            faded, step = tl.load(fades + at), tl.load(steps + at)
            here = (first_place + (k - 1) * JUMPS + j) * H + h
            jump = weight_tiles(jumps, rank * JUMPS + j, d, D, F, V, BF, BV)
            beyond = weight_tiles(places, here, d, D, F, V, BF, BV)
            if len(dstart) > 0:
                beyond = pull(dstart, dnow, start, beyond, faded, group, h, d, D, F, V, BF, BV)
            tl.store(dsteps + at * D + d, -met(jump, dnow, BD), mask=d < D)
            tl.store(dfades + at * D + d, met(beyond, dnow, BD), mask=d < D)
            asked = ()
            for i in tl.static_range(len(dnow)):
                blocks = ()
                for f in tl.static_range(len(dnow[i])):
                    blocks = blocks + (-step * dnow[i][f],)
                asked = asked + (blocks,)
            store_weights(djumps, asked, rank * JUMPS + j, d, D, F, V, BF, BV)
            between = tl.where(j > 0, d, D)  # the first place is a border: the next stride adds it
            dnow = kept_and_asked(dnow, dplaces, faded, here, between, D, F, V, BF, BV)
            tl.debug_barrier()  # what is asked of the start is read anew in the next round
    store_weights(dmemory, dnow, group, d, D, F, V, BF, BV)


@triton.jit
def pairs_backward_kernel(
    x, pushes, places, errors, dunits, dpushed, slots, dx,
    token_start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr, JUMPS: tl.constexpr,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX = W0^T dA - sum_j u_j (dS_j^T P), all chunks at once.

    dpushed: dS_j as `stride_backward_kernel` leaves them   slots: [NC], where those of a chunk stand,
    over H * JUMPS
    filled: dx [NC, H, F, PAIRS]"""
    PAIRS: tl.constexpr = CHUNK + EDGE
    dtype: tl.constexpr = x.dtype.element_ty
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    n = tl.load(sequence + i)
    t0, _token, first, end, oldest = place_of(
        i, token_start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if t0 >= end:
        return
    chunk, bound, c = i * H + h, tl.maximum(oldest, t0 - (WINDOW - 1)), tl.arange(0, BV)
    slot = tl.load(slots + i) * H + h
    xs = feature_tiles(x, first, t0, bound, end, h, 0, CHUNK, BE, H, F, BF)
    error = chunk_tiles(errors + chunk * (V * PAIRS), c, V, CHUNK, EDGE, BE)
    dkeys = ()
    for f in tl.static_range(len(xs)):
        dkeys = dkeys + (none_of(error, size_of(f, F, BF)),)
    for block in range((D + BD - 1) // BD):
        d = block * BD + tl.arange(0, BD)
        w = weight_tiles(places, (i * JUMPS + n) * H + h, d, D, F, V, BF, BV)
        _, slopes, _, _, gated, _, _ = at_pairs(w, xs, error, ACTIVATION, FAST, PRECISION, dtype)
        for g in tl.static_range(len(dunits)):
            da = chunk_tiles(dunits[g] + chunk * (D * PAIRS), d, D, CHUNK, EDGE, BE)
            more = ()
            for f in tl.static_range(len(dkeys)):
                more = more + (gained(dkeys[f], tl.trans(w[2 * g][f]), da, PRECISION),)
            dkeys = more
        for j in range(JUMPS):
            u = negative(vectors(pushes + (chunk * JUMPS + j) * PAIRS, CHUNK, EDGE, BE))
            for g in tl.static_range(len(dunits)):
                steep = slopes
                if g > 0:
                    steep = gated
                asked = blocks_of(dpushed[2 * g] + (slot * JUMPS + j) * (D * F), d, D, F, BF)
                pushed, more = weighted(steep, u, dtype), ()
                for f in tl.static_range(len(dkeys)):
                    more = more + (gained(dkeys[f], tl.trans(asked[f]), pushed, PRECISION),)
                dkeys = more
    for f in tl.static_range(len(dkeys)):
        row = f * BF + tl.arange(0, size_of(f, F, BF))
        for j in tl.static_range(len(error)):
            store_tile(dx + chunk * (F * PAIRS), dkeys[f][j], row, j, F, CHUNK, EDGE, BE)
