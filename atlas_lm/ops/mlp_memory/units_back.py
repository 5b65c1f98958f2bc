"""Back through the reads of a chunk, as far as hidden units go by themselves: all chunks and blocks of units
at once. With `reads`'s letters, tokens as columns, s, s', s'' at A = W0 X and B_q = s'(A_q):

    dmixed1 = -(dY^T E) * mix,   dh = keep (W1^T dY) + push (S1^T dY) + H dmixed1^T,   dA_q = B_q dh
    asked of W0: (keep dA_q) Q^T,  of W1^T: h (keep dY)^T,  of E: -dY mixed1
    asked of the slopes: dP = -dA_q mixed0,  of the units: dH = h dmixed1

The walk back needs the last two as dU = s' dP and dA = s' dH + s'' U dP, and how both go on to depend on the
state after the chunk; what it needs of units is put down here, tiles [NC, H, D, PAIRS] in the order of UNITS.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.pieces import (
    activation,
    at_pairs,
    chunk_tiles,
    feature_tiles,
    row_of,
    store_blocks,
    store_tile,
    times,
    token_tile,
    weight_tiles,
)
from atlas_lm.ops.mlp_memory.reads import (
    against,
    asked_units,
    both,
    mix_tiles,
    narrowed,
    place_of,
    query_tiles,
    scores,
)

# H;  P;  s' (with a gate G: s' G);  s'' U (s'' G U);  dU and dA as far as reads ask
UNITS = ("hidden", "slopes", "bent", "curved", "dback", "dunits")
# P of the gate;  s;  s' U;  dG as far as reads ask
GATED = ("gate_slopes", "opened", "crossed", "dgate")


@triton.jit
def ask_one(
    asked, dunit, queries, weights, d,
    dtype: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores (dA_q * weights) Q^T."""
    left, blocks = (dunit * weights[None, :]).to(dtype), ()
    for f in tl.static_range(len(queries)):
        blocks = blocks + (tl.dot(left, tl.trans(queries[f][0]), input_precision=PRECISION),)
    store_blocks(asked, blocks, d, D, F, BF)


@triton.jit
def ask_first(
    dunit, queries, keep, push, d, dborder, dmomentum_border, dstart,
    dtype: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores what a first layer is asked of memory, momentum and start; () where there are none."""
    ask_one(dborder, dunit, queries, keep, d, dtype, F, D, BF, PRECISION)
    if len(dmomentum_border) > 0:
        ask_one(dmomentum_border[0], dunit, queries, push, d, dtype, F, D, BF, PRECISION)
    if len(dstart) > 0:
        ask_one(dstart[0], dunit, queries, 1.0 - keep, d, dtype, F, D, BF, PRECISION)


@triton.jit
def ask_last_one(
    asked, narrow, out, weights, d,
    D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores h (dY * weights)^T."""
    right = tl.trans((out * weights[None, :]).to(narrow.dtype))
    store_blocks(asked, (tl.dot(narrow, right, input_precision=PRECISION),), d, D, V, BV)


@triton.jit
def ask_last(
    read, out, w, moving, still, keep, push, d, dborder, dmomentum_border, dstart,
    dtype: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same of the last layer. Returns dh as far as weights go, and the gradients of keep and push"""
    narrow = read.to(dtype)
    way = tl.dot(w[1][0], out, input_precision=PRECISION)
    dread = keep[None, :] * way
    if len(dstart) > 0:
        rest = tl.dot(still[1][0], out, input_precision=PRECISION)
        way -= rest
        dread = keep[None, :] * way + rest
        ask_last_one(dstart[0], narrow, out, 1.0 - keep, d, D, V, BV, PRECISION)
    dkeep = tl.sum(way * read, axis=0)
    dpush = dkeep
    ask_last_one(dborder, narrow, out, keep, d, D, V, BV, PRECISION)
    if len(dmomentum_border) > 0:
        way = tl.dot(moving[1][0], out, input_precision=PRECISION)
        dread += push[None, :] * way
        dpush = tl.sum(way * read, axis=0)
        ask_last_one(dmomentum_border[0], narrow, out, push, d, D, V, BV, PRECISION)
    return dread, dkeep, dpush


@triton.jit
def store_units(
    base, tiles, d, D: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr
):
    for i in tl.static_range(len(tiles)):
        store_tile(base, tiles[i], d, i, D, CHUNK, EDGE, BE)


@triton.jit
def ask_errors(
    out, score, mix, derrors, place, c,
    V: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-dY mixed1"""
    PAIRS: tl.constexpr = CHUNK + EDGE
    row = tl.arange(0, CHUNK)
    scored = both(chunk_tiles(score + place * (CHUNK * PAIRS), row, CHUNK, CHUNK, EDGE, BE), mix)
    for j in tl.static_range(len(scored)):
        asked = -tl.dot(out, scored[j].to(out.dtype), input_precision=PRECISION)
        store_tile(derrors + place * (V * PAIRS), asked, c, j, V, CHUNK, EDGE, BE)


@triton.jit
def units_backward_kernel(
    q, x, mix, keep, push, borders, momentum_borders, start, errors, score, dy,
    dborders, dmomentum_borders, dstart, derrors, units, asked, dgates,
    token_start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Filled, by chunk: dborders, dmomentum_borders, dstart [NC, H, ...]; derrors [NC, H, V, PAIRS]; units,
    a tuple of [NC, H, D, PAIRS]; asked, dA_q and with a gate dG_q [NC, H, D, CHUNK]; dgates
    [NC, H, BLOCKS + 1, 2, CHUNK], what the last layer asks of keep and push, a part for each block"""
    PAIRS: tl.constexpr = CHUNK + EDGE
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    dtype: tl.constexpr = q.dtype.element_ty
    block, i = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    i, h = (i // H).to(tl.int64), i % H
    t0, token, first, end, oldest = place_of(
        i, token_start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if t0 >= end:
        return
    place, bound = i * H + h, tl.maximum(oldest, t0 - (WINDOW - 1))
    t, c, d = tl.arange(0, CHUNK), tl.arange(0, BV), block * BD + tl.arange(0, BD)
    there = t0 + t < end
    kept = tl.load(keep + place * CHUNK + t)
    pushing = kept
    if len(momentum_borders) > 0:
        pushing = tl.load(push + place * CHUNK + t)
    queries = query_tiles(q, token, there, h, H, F, BF)
    xs = feature_tiles(x, first, t0, bound, end, h, 0, CHUNK, BE, H, F, BF)
    error = chunk_tiles(errors + place * (V * PAIRS), c, V, CHUNK, EDGE, BE)
    out = token_tile(dy, token, there, h, c, H, V)
    weights = mix_tiles(mix, place, CHUNK, EDGE, BE)
    mixed = narrowed(both(scores(queries, xs, PRECISION), weights), dtype)
    dscore = narrowed(both(times(tl.trans(out), error, PRECISION), weights), dtype)  # minus dmixed1
    if block == 0:
        ask_errors(out, score, weights, derrors, place, c, V, CHUNK, EDGE, BE, PRECISION)
    w = weight_tiles(borders, place, d, D, F, V, BF, BV)
    moving = weight_tiles(momentum_borders, place, d, D, F, V, BF, BV)
    still = weight_tiles(start, h, d, D, F, V, BF, BV)
    hidden, slopes, bent, curved, gated, opened, crossed = at_pairs(
        w, xs, error, ACTIVATION, FAST, PRECISION, dtype
    )
    shift, shift_last, at_units = place * (D * F), place * (D * V), place * (D * PAIRS)
    store_units(units[0] + at_units, hidden, d, D, CHUNK, EDGE, BE)
    store_units(units[1] + at_units, slopes, d, D, CHUNK, EDGE, BE)
    store_units(units[2] + at_units, bent, d, D, CHUNK, EDGE, BE)
    store_units(units[3] + at_units, curved, d, D, CHUNK, EDGE, BE)

    # the reads again
    unit, _ = asked_units(queries, w, moving, still, kept, pushing, 0, PRECISION)
    read, bend, _ = activation(unit - against(slopes, mixed, PRECISION), ACTIVATION, FAST)
    if len(borders) > 2:
        store_units(units[6] + at_units, gated, d, D, CHUNK, EDGE, BE)
        store_units(units[7] + at_units, opened, d, D, CHUNK, EDGE, BE)
        store_units(units[8] + at_units, crossed, d, D, CHUNK, EDGE, BE)
        gate, _ = asked_units(queries, w, moving, still, kept, pushing, 2, PRECISION)
        gate -= against(gated, mixed, PRECISION)
        open_read, read = read, read * gate
        bend *= gate

    # the last layer
    narrow = read.to(dtype)
    dread, dkept, dpushing = ask_last(
        read, out, w, moving, still, kept, pushing, d, dborders[1] + shift_last,
        row_of(dmomentum_borders, 1, shift_last), row_of(dstart, 1, shift_last), dtype, D, V, BV, PRECISION,
    )  # fmt: skip
    dread -= against(hidden, dscore, PRECISION)

    # the first one, and the gate
    dunit = bend * dread
    ask_first(
        dunit, queries, kept, pushing, d, dborders[0] + shift, row_of(dmomentum_borders, 0, shift),
        row_of(dstart, 0, shift), dtype, F, D, BF, PRECISION,
    )  # fmt: skip
    dunit = dunit.to(dtype)
    at = (place * D + d)[:, None] * CHUNK + t[None, :]
    tl.store(asked[0] + at, dunit, mask=(d < D)[:, None])
    dgate = dunit
    if len(borders) > 2:
        dgate = open_read * dread
        ask_first(
            dgate, queries, kept, pushing, d, dborders[2] + shift, row_of(dmomentum_borders, 2, shift),
            row_of(dstart, 2, shift), dtype, F, D, BF, PRECISION,
        )  # fmt: skip
        dgate = dgate.to(dtype)
        tl.store(asked[1] + at, dgate, mask=(d < D)[:, None])
    at = dgates + (place * (BLOCKS + 1) + block) * (2 * CHUNK) + t
    tl.store(at, dkept)
    if len(momentum_borders) > 0:
        tl.store(at + CHUNK, dpushing)

    # pairs
    for j in tl.static_range(len(error)):
        dslope = -tl.dot(dunit, mixed[j], input_precision=PRECISION)
        dhidden = -tl.dot(narrow, dscore[j], input_precision=PRECISION)
        dback, da = bent[j] * dslope, bent[j] * dhidden + curved[j] * dslope
        if len(borders) > 2:
            dslope_gate = -tl.dot(dgate, mixed[j], input_precision=PRECISION)
            dback += opened[j] * dslope_gate
            da += crossed[j] * dslope_gate
            dg = opened[j] * dhidden + crossed[j] * dslope
            store_tile(units[9] + at_units, dg, d, j, D, CHUNK, EDGE, BE)
        store_tile(units[4] + at_units, dback, d, j, D, CHUNK, EDGE, BE)
        store_tile(units[5] + at_units, da, d, j, D, CHUNK, EDGE, BE)
