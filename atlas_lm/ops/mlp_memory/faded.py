"""Reads of memories that only fade between jumps (Muon): tokens of one place share W, each has its own fade.

    a = fade (W0 Q) + (1 - fade) (Z0 Q),   h = s(a),   y = skip Q + fade (W1 h) + (1 - fade) (Z1 h)

The last token of a period reads the memory after its jump, so place g of a sequence serves tokens g p - 1 to
(g + 1) p - 2, p tokens to a period. All places and heads at once, hidden units in blocks of BD.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.pieces import (
    activation,
    blocks_of,
    row_of,
    size_of,
    token_tile,
    weight_tiles,
)
from atlas_lm.ops.mlp_memory.reads import asked_units, query_tiles, token_rows
from atlas_lm.ops.mlp_memory.units_back import ask_first, ask_last


@triton.jit
def tokens_of(
    i, h, owner, first_chunk, start, length,
    H: tl.constexpr, CHUNK: tl.constexpr, JUMPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of place i: the row of its first token, which of BT tokens are its own, and where their fades stand"""
    PERIOD: tl.constexpr = CHUNK // JUMPS
    n = tl.load(owner + i)
    begin = tl.load(first_chunk + n).to(tl.int64)
    t0 = (i - begin * JUMPS - n) * PERIOD - 1
    b = tl.arange(0, BT)
    t = t0 + b
    there = (b < PERIOD) & (t >= 0) & (t < tl.load(length + n))
    at = ((begin + t // CHUNK) * H + h) * CHUNK + t % CHUNK
    return tl.load(start + n) + t0, there, at


@triton.jit
def faded_forward_kernel(
    q, fade, places, start, y, owner, first_chunk, token_start, length,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    CHUNK: tl.constexpr, JUMPS: tl.constexpr,
    SKIP: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fade: [NC, H, CHUNK], of the memory that a token reads since its jump   filled: y"""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    token, there, at = tokens_of(i, h, owner, first_chunk, token_start, length, H, CHUNK, JUMPS, BT)
    dtype: tl.constexpr = q.dtype.element_ty
    c = tl.arange(0, BV)
    kept = tl.load(fade + at, mask=there, other=0.0)
    queries = query_tiles(q, token, there, h, H, F, BF)
    out = tl.zeros([BT, BV], tl.float32)
    for block in range((D + BD - 1) // BD):
        d = block * BD + tl.arange(0, BD)
        w = weight_tiles(places, i * H + h, d, D, F, V, BF, BV)
        still = weight_tiles(start, h, d, D, F, V, BF, BV)
        unit, _ = asked_units(queries, w, (), still, kept, kept, 0, PRECISION)
        read, _, _ = activation(unit, ACTIVATION, FAST)
        if len(places) > 2:
            gate, _ = asked_units(queries, w, (), still, kept, kept, 2, PRECISION)
            read *= gate
        narrow = tl.trans(read.to(dtype))
        out += kept[:, None] * tl.dot(narrow, w[1][0], input_precision=PRECISION)
        if len(start) > 0:
            out += (1.0 - kept)[:, None] * tl.dot(narrow, still[1][0], input_precision=PRECISION)
    if SKIP:
        here, mask = token_rows(q, token, there, h, c, H, F)
        out += tl.load(here, mask=mask, other=0.0)
    here, mask = token_rows(y, token, there, h, c, H, V)
    tl.store(here, out.to(dtype), mask=mask)


@triton.jit
def through_faded(
    dqueries, dunit, w, start, layer: tl.constexpr, h, d, keep,
    F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ += keep (W^T dA) + (1 - keep) (Z^T dA), by blocks of features, tokens as rows"""
    found, asked = (), tl.trans(dunit)
    still = w[layer]
    if len(start) > 0:
        still = blocks_of(start[layer] + h * (D * F), d, D, F, BF)
    for f in tl.static_range(len(w[layer])):
        total = dqueries[f] + keep[:, None] * tl.dot(asked, w[layer][f], input_precision=PRECISION)
        if len(start) > 0:
            total += (1.0 - keep)[:, None] * tl.dot(asked, still[f], input_precision=PRECISION)
        found = found + (total,)
    return found


@triton.jit
def faded_backward_kernel(
    q, fade, places, start, dy, dplaces, dstart, dq, dfade, owner, first_chunk, token_start, length,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    CHUNK: tl.constexpr, JUMPS: tl.constexpr,
    SKIP: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Filled: dplaces, dstart [NC * JUMPS + N, H, ...], all, zero for places that nobody reads; dq, dfade"""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    token, there, at = tokens_of(i, h, owner, first_chunk, token_start, length, H, CHUNK, JUMPS, BT)
    dtype: tl.constexpr = q.dtype.element_ty
    c, place = tl.arange(0, BV), i * H + h
    kept = tl.load(fade + at, mask=there, other=0.0)
    queries = query_tiles(q, token, there, h, H, F, BF)
    out = token_tile(dy, token, there, h, c, H, V)
    dkept, dqueries = tl.zeros([BT], tl.float32), ()
    for f in tl.static_range(len(queries)):
        dqueries = dqueries + (tl.zeros([BT, size_of(f, F, BF)], tl.float32),)
    shift, shift_last = place * (D * F), place * (D * V)
    for block in range((D + BD - 1) // BD):
        d = block * BD + tl.arange(0, BD)
        w = weight_tiles(places, place, d, D, F, V, BF, BV)
        still = weight_tiles(start, h, d, D, F, V, BF, BV)
        unit, by_keep = asked_units(queries, w, (), still, kept, kept, 0, PRECISION)
        read, bend, _ = activation(unit, ACTIVATION, FAST)
        opened, gate_keep = read, by_keep
        if len(places) > 2:
            gate, gate_keep = asked_units(queries, w, (), still, kept, kept, 2, PRECISION)
            read, bend = read * gate, bend * gate
        dread, dkept_last, _ = ask_last(
            read, out, w, (), still, kept, kept, d, dplaces[1] + shift_last, (),
            row_of(dstart, 1, shift_last), dtype, D, V, BV, PRECISION,
        )  # fmt: skip
        dunit = bend * dread
        dkept += dkept_last + tl.sum(dunit * by_keep, axis=0)
        ask_first(
            dunit, queries, kept, kept, d, dplaces[0] + shift, (), row_of(dstart, 0, shift), dtype, F, D, BF,
            PRECISION,
        )  # fmt: skip
        dqueries = through_faded(
            dqueries, dunit.to(dtype), w, start, 0, h, d, kept, F, D, BF, PRECISION
        )
        if len(places) > 2:
            dgate = opened * dread
            dkept += tl.sum(dgate * gate_keep, axis=0)
            ask_first(
                dgate, queries, kept, kept, d, dplaces[2] + shift, (), row_of(dstart, 2, shift), dtype, F, D,
                BF, PRECISION,
            )  # fmt: skip
            dqueries = through_faded(
                dqueries, dgate.to(dtype), w, start, 2, h, d, kept, F, D, BF, PRECISION
            )
    tl.store(dfade + at, dkept, mask=there)
    for f in tl.static_range(len(dqueries)):
        row, total = f * BF + tl.arange(0, size_of(f, F, BF)), dqueries[f]
        if SKIP:
            here, mask = token_rows(dy, token, there, h, row, H, V)
            total += tl.load(here, mask=mask, other=0.0)
        here, mask = token_rows(dq, token, there, h, row, H, F)
        tl.store(here, total.to(dtype), mask=mask)
