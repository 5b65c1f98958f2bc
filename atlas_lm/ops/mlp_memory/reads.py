"""What a chunk reads, all chunks at once, forward and back. With the slopes E and P of its pairs (see `walk`):

    A_q = keep (Q W0^T) + push (Q S0^T) + (1 - keep) (Q Z0^T) - P0 P,    P0 = mix * (Q X^T)
    h_q = s(A_q),    y = skip Q + keep (h_q W1^T) + ... - P1 E,          P1 = mix * (h_q H^T)

W, S: memory and momentum before the chunk; Z: the start that retention pulls to. A memory that stands still between
two jumps (Muon) has no pairs here: PAIRS is 0.
"""

import triton
import triton.language as tl

from atlas_lm.ops.chunk_weights.kernels import written
from atlas_lm.ops.mlp_memory.pieces import (
    activation,
    chunk_tile,
    hidden_units,
    pair_rows,
    store_chunk,
    store_weight,
    weight_tile,
)


@triton.jit
def place_of(i, start, pair_start, length, past, first_chunk, sequence, CHUNK: tl.constexpr, LEAD: tl.constexpr):
    """Of chunk i: its first token (LEAD before its place), the rows of its sequence, and where tokens and pairs end."""
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK - LEAD
    return t0, tl.load(start + n), tl.load(pair_start + n), tl.load(length + n), -tl.load(past + n)


@triton.jit
def query_rows(
    base, token, t0, end, h, column, CHUNK: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr
):
    """The chunk's tokens of a flat tensor, [CHUNK, columns]; zero where there is none."""
    t = tl.arange(0, CHUNK)
    mask = ((t0 + t >= 0) & (t0 + t < end))[:, None] & (column < WIDTH)[None, :]
    here = base + ((token + t0) * H + h) * WIDTH
    return tl.load(here + t[:, None] * (H * WIDTH) + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_queries(
    base, value, token, t0, end, h, column,
    CHUNK: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, CHUNK)
    mask = ((t0 + t >= 0) & (t0 + t < end))[:, None] & (column < WIDTH)[None, :]
    here = base + ((token + t0) * H + h) * WIDTH
    pointer = here + t[:, None] * (H * WIDTH) + column[None, :]
    tl.store(pointer, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def mix_rows(mix, place, r, CHUNK: tl.constexpr, PAIRS: tl.constexpr):
    """The weights of a chunk, [CHUNK, N]: zero for pairs after a token, which are not written."""
    t, column = tl.arange(0, CHUNK)[:, None], (r - (r.shape[0] - PAIRS))[None, :]
    mask = (column >= 0) & written(column, t, PAIRS - CHUNK)
    return tl.load(mix + place * (CHUNK * PAIRS) + t * PAIRS + column, mask=mask, other=0.0)


@triton.jit
def scores(
    q, x, token, first, t0, bound, end, h,
    N: tl.constexpr, CHUNK: tl.constexpr, H: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Q X^T, [CHUNK, N]"""
    found = tl.zeros([CHUNK, N], tl.float32)
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        query = query_rows(q, token, t0, end, h, f, CHUNK, H, F)
        tile = pair_rows(x, first, t0, bound, end, h, f, N, CHUNK, H, F)
        found += tl.dot(query, tl.trans(tile), input_precision=PRECISION)
    return found


@triton.jit
def asked_units(
    q, weights, momentum, start, keep, push, token, t0, end, h, place, d,
    CHUNK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    MOMENTUM: tl.constexpr, START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """keep (Q W^T) + push (Q S^T) + (1 - keep) (Q Z^T) for some hidden units, [CHUNK, len d]. keep, push: [CHUNK]"""
    found = tl.zeros([CHUNK, d.shape[0]], tl.float32)
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        query = query_rows(q, token, t0, end, h, f, CHUNK, H, F)
        w = weight_tile(weights + place * (D * F), d, f, D, F)
        found += keep[:, None] * tl.dot(query, tl.trans(w), input_precision=PRECISION)
        if MOMENTUM:
            w = weight_tile(momentum + place * (D * F), d, f, D, F)
            found += push[:, None] * tl.dot(query, tl.trans(w), input_precision=PRECISION)
        if START:
            w = weight_tile(start + h * (D * F), d, f, D, F)
            found += (1.0 - keep)[:, None] * tl.dot(query, tl.trans(w), input_precision=PRECISION)
    return found


@triton.jit
def reads_forward_kernel(
    q, x, mix, keep, push, borders, momentum_borders, start, errors, y,
    token_start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    N: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, LEAD: tl.constexpr,
    GATED: tl.constexpr, SKIP: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr,
    MOMENTUM: tl.constexpr, START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t0, token, first, end, oldest = place_of(
        i, token_start, pair_start, length, past, first_chunk, sequence, CHUNK, LEAD
    )
    if t0 >= end:
        return
    dtype: tl.constexpr = q.dtype.element_ty
    place, bound = i * H + h, tl.maximum(oldest, t0 - (WINDOW - 1))
    t, r, c = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, BV)
    kept = tl.load(keep + place * CHUNK + t)
    pushing = kept
    if MOMENTUM:
        pushing = tl.load(push + place * CHUNK + t)
    out = tl.zeros([CHUNK, BV], tl.float32)
    if PAIRS > 0:
        mixed = scores(q, x, token, first, t0, bound, end, h, N, CHUNK, H, F, BF, PRECISION)
        mixed = (mixed * mix_rows(mix, place, r, CHUNK, PAIRS)).to(dtype)
        error = chunk_tile(errors, place, r, c, PAIRS, V)
        score = tl.zeros([CHUNK, N], tl.float32)
    for block in range((D + BD - 1) // BD):
        d = block * BD + tl.arange(0, BD)
        w1 = weight_tile(borders[1] + place * (V * D), c, d, V, D)
        unit = asked_units(
            q, borders[0], momentum_borders[0], start[0], kept, pushing, token, t0, end, h, place, d,
            CHUNK, H, D, F, BF, MOMENTUM, START, PRECISION,
        )  # fmt: skip
        gate = unit
        if GATED:
            gate = asked_units(
                q, borders[2], momentum_borders[2], start[2], kept, pushing, token, t0, end, h, place, d,
                CHUNK, H, D, F, BF, MOMENTUM, START, PRECISION,
            )  # fmt: skip
        if PAIRS > 0:
            a, g = hidden_units(
                x, borders, first, t0, bound, end, h, place, d, N, CHUNK, H, D, F, BF, GATED, PRECISION
            )  # fmt: skip
            s, slope, _ = activation(a, ACTIVATION, FAST)
            hidden = (s * g if GATED else s).to(dtype)
            u = tl.dot(error, w1, input_precision=PRECISION)
            slopes = u * slope * g if GATED else u * slope
            unit -= tl.dot(mixed, slopes.to(dtype), input_precision=PRECISION)
            if GATED:
                gate -= tl.dot(mixed, (u * s).to(dtype), input_precision=PRECISION)
        read, _, _ = activation(unit, ACTIVATION, FAST)
        read = (read * gate if GATED else read).to(dtype)
        out += kept[:, None] * tl.dot(read, tl.trans(w1), input_precision=PRECISION)
        if MOMENTUM:
            w = weight_tile(momentum_borders[1] + place * (V * D), c, d, V, D)
            out += pushing[:, None] * tl.dot(read, tl.trans(w), input_precision=PRECISION)
        if START:
            w = weight_tile(start[1] + h * (V * D), c, d, V, D)
            out += (1.0 - kept)[:, None] * tl.dot(read, tl.trans(w), input_precision=PRECISION)
        if PAIRS > 0:
            score += tl.dot(read, tl.trans(hidden), input_precision=PRECISION)
    if PAIRS > 0:
        score *= mix_rows(mix, place, r, CHUNK, PAIRS)
        out -= tl.dot(score.to(dtype), error, input_precision=PRECISION)
    if SKIP:
        out += query_rows(q, token, t0, end, h, c, CHUNK, H, F)
    store_queries(y, out, token, t0, end, h, c, CHUNK, H, V)


@triton.jit
def queries_backward(
    q, dq, dunit, weights, momentum, start, dweights, dmomentum, dstart, keep, push, dkeep, dpush,
    token, t0, end, h, place, d, scratch,
    CHUNK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    MOMENTUM: tl.constexpr, START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Back through `asked_units`: stores the gradients of the weights, adds to those of keep, push and Q.

    dq: [CHUNK, BF] where one block holds all features; else it grows in scratch, [CHUNK, F] fp32"""
    narrow = dunit.to(q.dtype.element_ty)
    by_keep = tl.trans((dunit * keep[:, None]).to(q.dtype.element_ty))
    by_push, by_rest = by_keep, by_keep
    if MOMENTUM:
        by_push = tl.trans((dunit * push[:, None]).to(q.dtype.element_ty))
    if START:
        by_rest = tl.trans((dunit * (1.0 - keep)[:, None]).to(q.dtype.element_ty))
    at = place * (D * F)
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        query = query_rows(q, token, t0, end, h, f, CHUNK, H, F)
        w = weight_tile(weights + at, d, f, D, F)
        way = tl.dot(narrow, w, input_precision=PRECISION)
        dkeep += tl.sum(way * query, axis=1)
        total = keep[:, None] * way
        store_weight(dweights + at, tl.dot(by_keep, query, input_precision=PRECISION), d, f, D, F)
        if MOMENTUM:
            w = weight_tile(momentum + at, d, f, D, F)
            way = tl.dot(narrow, w, input_precision=PRECISION)
            dpush += tl.sum(way * query, axis=1)
            total += push[:, None] * way
            asked = tl.dot(by_push, query, input_precision=PRECISION)
            store_weight(dmomentum + at, asked, d, f, D, F)
        if START:
            w = weight_tile(start + h * (D * F), d, f, D, F)
            way = tl.dot(narrow, w, input_precision=PRECISION)
            dkeep -= tl.sum(way * query, axis=1)
            total += (1.0 - keep)[:, None] * way
            asked = tl.dot(by_rest, query, input_precision=PRECISION)
            store_weight(dstart + at, asked, d, f, D, F)
        if F <= BF:
            dq += total
        else:
            t = tl.arange(0, CHUNK)
            here = scratch + t[:, None] * F + f[None, :]
            inside = (f < F)[None, :] & (t[:, None] >= 0)
            tl.store(here, tl.load(here, mask=inside, other=0.0) + total, mask=inside)
    return dq, dkeep, dpush


@triton.jit
def reads_backward_kernel(
    q, x, mix, keep, push, borders, momentum_borders, start, errors, dy,
    dq, dmix, dkeep, dpush, dborders, dmomentum_borders, dstart,
    units, gates, us, derrors, dhidden, dslopes, dgate_slopes, dx, scratch,
    token_start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    N: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, LEAD: tl.constexpr,
    GATED: tl.constexpr, SKIP: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr,
    MOMENTUM: tl.constexpr, START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the reads ask: of queries, of the state before the chunk, and of the slopes of its pairs, by chunk.

    units, gates, us: A, its gate and U, for the walk back, filled   dstart: [NC, H, ...], to be summed over chunks
    scratch: [NC, H, CHUNK, F] fp32, zero, where features are cut into blocks"""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t0, token, first, end, oldest = place_of(
        i, token_start, pair_start, length, past, first_chunk, sequence, CHUNK, LEAD
    )
    if t0 >= end:
        return
    dtype: tl.constexpr = q.dtype.element_ty
    place, bound = i * H + h, tl.maximum(oldest, t0 - (WINDOW - 1))
    t, r, c = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, BV)
    kept = tl.load(keep + place * CHUNK + t)
    pushing = kept
    if MOMENTUM:
        pushing = tl.load(push + place * CHUNK + t)
    scratch += place * (CHUNK * F)
    out = query_rows(dy, token, t0, end, h, c, CHUNK, H, V)
    kept_out = tl.trans((out * kept[:, None]).to(dtype))
    pushed_out, rest_out = kept_out, kept_out
    if MOMENTUM:
        pushed_out = tl.trans((out * pushing[:, None]).to(dtype))
    if START:
        rest_out = tl.trans((out * (1.0 - kept)[:, None]).to(dtype))
    dkept = tl.zeros([CHUNK], tl.float32)
    dpushing = dkept
    dquery = tl.zeros([CHUNK, BF], tl.float32)
    if PAIRS > 0:
        mixed = scores(q, x, token, first, t0, bound, end, h, N, CHUNK, H, F, BF, PRECISION)
        mixed = (mixed * mix_rows(mix, place, r, CHUNK, PAIRS)).to(dtype)
        error = chunk_tile(errors, place, r, c, PAIRS, V)
        dscore1 = -tl.dot(out, tl.trans(error), input_precision=PRECISION)
        dscore1 = (dscore1 * mix_rows(mix, place, r, CHUNK, PAIRS)).to(dtype)
        score = tl.zeros([CHUNK, N], tl.float32)
        dmixed0 = tl.zeros([CHUNK, N], tl.float32)
    for block in range((D + BD - 1) // BD):
        d = block * BD + tl.arange(0, BD)
        w1 = weight_tile(borders[1] + place * (V * D), c, d, V, D)
        unit = asked_units(
            q, borders[0], momentum_borders[0], start[0], kept, pushing, token, t0, end, h, place, d,
            CHUNK, H, D, F, BF, MOMENTUM, START, PRECISION,
        )  # fmt: skip
        gate = unit
        if GATED:
            gate = asked_units(
                q, borders[2], momentum_borders[2], start[2], kept, pushing, token, t0, end, h, place, d,
                CHUNK, H, D, F, BF, MOMENTUM, START, PRECISION,
            )  # fmt: skip
        if PAIRS > 0:
            a, g = hidden_units(
                x, borders, first, t0, bound, end, h, place, d, N, CHUNK, H, D, F, BF, GATED, PRECISION
            )  # fmt: skip
            s, slope, _ = activation(a, ACTIVATION, FAST)
            hidden = (s * g if GATED else s).to(dtype)
            u = tl.dot(error, w1, input_precision=PRECISION)
            store_chunk(units, a, place, r, d, PAIRS, D)
            store_chunk(us, u, place, r, d, PAIRS, D)
            slopes = (u * slope * g if GATED else u * slope).to(dtype)
            unit -= tl.dot(mixed, slopes, input_precision=PRECISION)
            gate_slopes = slopes
            if GATED:
                store_chunk(gates, g, place, r, d, PAIRS, D)
                gate_slopes = (u * s).to(dtype)
                gate -= tl.dot(mixed, gate_slopes, input_precision=PRECISION)
        opened, slope_q, _ = activation(unit, ACTIVATION, FAST)
        read = opened * gate if GATED else opened
        narrow = read.to(dtype)

        # the last layer
        way = tl.dot(out, w1, input_precision=PRECISION)
        dkept += tl.sum(way * read, axis=1)
        dread = kept[:, None] * way
        store_weight(
            dborders[1] + place * (V * D), tl.dot(kept_out, narrow, input_precision=PRECISION), c, d, V, D
        )
        if MOMENTUM:
            w = weight_tile(momentum_borders[1] + place * (V * D), c, d, V, D)
            way = tl.dot(out, w, input_precision=PRECISION)
            dpushing += tl.sum(way * read, axis=1)
            dread += pushing[:, None] * way
            asked = tl.dot(pushed_out, narrow, input_precision=PRECISION)
            store_weight(dmomentum_borders[1] + place * (V * D), asked, c, d, V, D)
        if START:
            w = weight_tile(start[1] + h * (V * D), c, d, V, D)
            way = tl.dot(out, w, input_precision=PRECISION)
            dkept -= tl.sum(way * read, axis=1)
            dread += (1.0 - kept)[:, None] * way
            asked = tl.dot(rest_out, narrow, input_precision=PRECISION)
            store_weight(dstart[1] + place * (V * D), asked, c, d, V, D)
        if PAIRS > 0:
            score += tl.dot(narrow, tl.trans(hidden), input_precision=PRECISION)
            dread += tl.dot(dscore1, hidden, input_precision=PRECISION)
            asked = tl.dot(tl.trans(dscore1), narrow, input_precision=PRECISION)
            store_chunk(dhidden, asked, place, r, d, PAIRS, D)

        # the first ones
        dunit = slope_q * gate * dread if GATED else slope_q * dread
        dquery, dkept, dpushing = queries_backward(
            q, dquery, dunit, borders[0], momentum_borders[0], start[0], dborders[0],
            dmomentum_borders[0], dstart[0], kept, pushing, dkept, dpushing, token, t0, end, h, place, d,
            scratch, CHUNK, H, D, F, BF, MOMENTUM, START, PRECISION,
        )  # fmt: skip
        if PAIRS > 0:
            asked = -tl.dot(tl.trans(mixed), dunit.to(dtype), input_precision=PRECISION)
            store_chunk(dslopes, asked, place, r, d, PAIRS, D)
            dmixed0 -= tl.dot(dunit.to(dtype), tl.trans(slopes), input_precision=PRECISION)
        if GATED:
            dgate = opened * dread
            tl.debug_barrier()  # scratch was written by other threads
            dquery, dkept, dpushing = queries_backward(
                q, dquery, dgate, borders[2], momentum_borders[2], start[2], dborders[2],
                dmomentum_borders[2], dstart[2], kept, pushing, dkept, dpushing, token, t0, end, h,
                place, d, scratch, CHUNK, H, D, F, BF, MOMENTUM, START, PRECISION,
            )  # fmt: skip
            if PAIRS > 0:
                asked = -tl.dot(tl.trans(mixed), dgate.to(dtype), input_precision=PRECISION)
                store_chunk(dgate_slopes, asked, place, r, d, PAIRS, D)
                dmixed0 -= tl.dot(dgate.to(dtype), tl.trans(gate_slopes), input_precision=PRECISION)
        tl.debug_barrier()
    tl.store(dkeep + place * CHUNK + t, dkept)
    if MOMENTUM:
        tl.store(dpush + place * CHUNK + t, dpushing)
    if PAIRS > 0:
        weight = mix_rows(mix, place, r, CHUNK, PAIRS)
        derror = -tl.dot(tl.trans((score * weight).to(dtype)), out, input_precision=PRECISION)
        store_chunk(derrors, derror, place, r, c, PAIRS, V)
        dmixed1 = -tl.dot(out, tl.trans(error), input_precision=PRECISION)
        found = scores(q, x, token, first, t0, bound, end, h, N, CHUNK, H, F, BF, PRECISION)
        column = (r - (N - PAIRS))[None, :]
        mask = (column >= 0) & written(column, t[:, None], PAIRS - CHUNK)
        here = dmix + place * (CHUNK * PAIRS) + t[:, None] * PAIRS + column
        tl.store(here, dmixed1 * score + dmixed0 * found, mask=mask)
        dscore0 = (dmixed0 * weight).to(dtype)
    for block in range((F + BF - 1) // BF):
        f = block * BF + tl.arange(0, BF)
        if F <= BF:
            total = dquery
        else:
            inside = (f < F)[None, :] & (t[:, None] >= 0)
            total = tl.load(scratch + t[:, None] * F + f[None, :], mask=inside, other=0.0)
        if PAIRS > 0:
            tile = pair_rows(x, first, t0, bound, end, h, f, N, CHUNK, H, F)
            total += tl.dot(dscore0, tile, input_precision=PRECISION)
            query = query_rows(q, token, t0, end, h, f, CHUNK, H, F)
            asked = tl.dot(tl.trans(dscore0), query, input_precision=PRECISION)
            store_chunk(dx, asked, place, r, f, PAIRS, F)
        if SKIP:
            total += query_rows(dy, token, t0, end, h, f, CHUNK, H, V)
        store_queries(dq, total, token, t0, end, h, f, CHUNK, H, F)
