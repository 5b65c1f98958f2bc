"""Muon: one stride goes from Newton-Schulz to Newton-Schulz, over the border between two chunks. JUMPS times
in a chunk the memory jumps, after equal numbers of tokens, and only fades between:

    W_j = fade_j W_{j-1} + (1 - fade_j) Z - step_j O_j,      O_j = NS(S_j)
    S_j = keep_j S_0 - (u_j left) right^T,                   left right^T: slopes at W_0 as in `walk`

A stride lets the memory jump by the O of one chunk and makes the S of the next; Newton-Schulz is a launch of
its own, for all matrices at once. What tokens read, every W_j, is put down in places: JUMPS for each chunk
and one at the end of a sequence, that of sequence n beginning at JUMPS first_chunk[n] + n.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.pieces import (
    blocks_of,
    collect,
    feature_tiles,
    outer,
    post,
    rounded,
    second,
    store_blocks,
    store_weights,
    turn_of,
    vectors,
    weight_tiles,
    weighted,
)
from atlas_lm.ops.mlp_memory.walk import claims_of, claims_through_norm, kept_errors, slopes_of


@triton.jit
def sequence_of(order, first_chunk, rank, H: tl.constexpr, JUMPS: tl.constexpr):
    """The sequence in this rank and its head, where its state stands, its first chunk and its first place"""
    h, n = rank % H, tl.load(order + rank // H).to(tl.int64)
    begin = tl.load(first_chunk + n).to(tl.int64)
    return n, h, n * H + h, begin, begin * JUMPS + n


@triton.jit
def jumped(now, still, steps, fade, step):
    """fade W + (1 - fade) Z - step O; still: Z, or () for zero"""
    found = ()
    for i in tl.static_range(len(now)):
        blocks = ()
        for f in tl.static_range(len(now[i])):
            block = fade * now[i][f] - step * steps[i][f]
            if len(still) > 0:
                block += (1.0 - fade) * still[i][f]
            blocks = blocks + (block,)
        found = found + (blocks,)
    return found


@triton.jit
def push_jumps_one(
    weight, pushed, left, rights, pushes, keeps, slot, place, d,
    dtype: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, JUMPS: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S_j of one weight into `pushed`, the last one also where the momentum lies"""
    before = blocks_of(weight, d, D, WIDTH, BLOCK)
    after = before
    for j in range(JUMPS):
        u = vectors(pushes + (place * JUMPS + j) * (CHUNK + EDGE), CHUNK, EDGE, BE)
        kept = tl.load(keeps + place * JUMPS + j)
        writes, now = weighted(left, u, dtype), ()
        for f in tl.static_range(len(before)):
            now = now + (kept * before[f] - outer(writes, rights[f], PRECISION),)
        after = now
        store_blocks(pushed + (slot * JUMPS + j) * (D * WIDTH), after, d, D, WIDTH, BLOCK)
    tl.debug_barrier()  # all have read what is written over
    store_blocks(weight, after, d, D, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["k", "rank0"])
def stride_forward_kernel(
    x, v, pushes, keeps, fades, steps, norm,
    memory, momentum, start, jumps, pushed, places, anchor, errors, cores, mail, arrived, turn,
    order, pair_start, first_chunk, last_chunk, length, past, k, rank0,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr, JUMPS: tl.constexpr,
    FEEDBACK: tl.constexpr, SKIP: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From chunk k - 1 to chunk k, of the sequences whose rank is rank0 and more.

    pushes [NC, H, JUMPS, PAIRS], keeps, fades, steps [NC, H, JUMPS]: u, keep, fade and step of every jump
    memory, momentum: [N, H, ...] fp32, moved on   start [H, ...], norm (scale and bias, [H, V]): fp32, or ()
    jumps: O of chunk k - 1, [rank, H, JUMPS, ...], or () before the first
    pushed: S of chunk k, likewise, filled, or () behind the last
    filled: places [NC * JUMPS + N, H, ...], anchor [N, H, ...], errors and with a norm cores, W1 H,
    [NC, H, V, PAIRS]"""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    slot, rank = turn_of(turn, SLICES)
    rank += rank0 * H
    n, h, group, begin, first_place = sequence_of(order, first_chunk, rank, H, JUMPS)
    d, c = slot * BD + tl.arange(0, BD), tl.arange(0, BV)
    dtype: tl.constexpr = x.dtype.element_ty
    now = weight_tiles(memory, group, d, D, F, V, BF, BV)
    if len(jumps) > 0:
        still = weight_tiles(start, h, d, D, F, V, BF, BV)
        for j in range(JUMPS):
            at = ((begin + k - 1) * H + h) * JUMPS + j
            step = weight_tiles(jumps, rank * JUMPS + j, d, D, F, V, BF, BV)
            now = jumped(now, still, step, tl.load(fades + at), tl.load(steps + at))
            place = (first_place + (k - 1) * JUMPS + j + 1) * H + h
            store_weights(places, now, place, d, D, F, V, BF, BV)
        tl.debug_barrier()  # all have read what is written over
        store_weights(memory, now, group, d, D, F, V, BF, BV)
    else:
        store_weights(places, now, first_place * H + h, d, D, F, V, BF, BV)
    if len(pushed) > 0:
        READS: tl.constexpr = FEEDBACK or len(norm) > 0  # slopes depend on what the memory says
        first, end, oldest = tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)
        place, t0 = (begin + k) * H + h, k * CHUNK
        bound = tl.maximum(oldest, t0 - (WINDOW - 1))
        border = tl.where(begin + k == tl.load(last_chunk + n), d, D)  # no rows but at the last one
        store_weights(anchor, now, group, border, D, F, V, BF, BV)
        narrow = rounded(now, dtype)
        xs = feature_tiles(x, first, t0, bound, end, h, 0, CHUNK, BE, H, F, BF)
        hidden, bent, opened, said = claims_of(
            narrow, xs, x, v, slot, first, t0, bound, end, h, c, CHUNK, BE, H, F, V, READS, len(norm) > 0,
            SKIP and FEEDBACK, ACTIVATION, FAST, PRECISION, dtype,
        )  # fmt: skip
        if READS and SLICES > 1:
            post(said, mail, arrived, group, slot, k, c, SLICES, CHUNK, BE)
            said = collect(said, mail, arrived, group, k, c, SLICES, CHUNK, BE)
        said = claims_through_norm(
            said, cores, norm, x, v, slot, place, first, t0, bound, end, h, c, CHUNK, EDGE, BE, H, F, V,
            FEEDBACK
        )  # fmt: skip
        error = kept_errors(said, errors, slot, place, c, V, CHUNK, EDGE, BE, dtype)
        lefts, rights = slopes_of(narrow[1][0], error, xs, hidden, bent, opened, PRECISION)
        for i in tl.static_range(len(momentum)):
            push_jumps_one(
                momentum[i] + group * (D * second(i, F, V)), pushed[i], lefts[i], rights[i], pushes, keeps,
                rank, place, d, dtype, D, second(i, F, V), second(i, BF, BV), JUMPS, CHUNK, EDGE, BE,
                PRECISION,
            )  # fmt: skip
