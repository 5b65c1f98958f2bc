"""What a chunk reads, all chunks at once. With slopes E and P of its pairs (see `walk`), tokens as columns:

    A_q = keep (W0 Q) + push (S0 Q) + (1 - keep) (Z0 Q) - P mixed0^T,    mixed0 = mix * (Q^T X)
    h_q = s(A_q),    y = skip Q + keep (W1 h_q) + ... - E mixed1^T,      mixed1 = mix * (h_q^T H)

W, S: memory and momentum before the chunk; Z: the start that retention pulls to. Units pass in blocks of BD.
"""

import triton
import triton.language as tl

from atlas_lm.ops.chunk_weights.kernels import written
from atlas_lm.ops.mlp_memory.pieces import (
    activation,
    at_pairs,
    chunk_tiles,
    columns_of,
    feature_tiles,
    layer,
    size_of,
    store_tile,
    token_tile,
    weight_tiles,
)


@triton.jit
def place_of(i, start, pair_start, length, past, first_chunk, sequence, CHUNK: tl.constexpr):
    """Of chunk i: its first token, the rows of its sequence, and where tokens and pairs end."""
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    return (
        t0,
        tl.load(start + n) + t0,
        tl.load(pair_start + n),
        tl.load(length + n),
        -tl.load(past + n),
    )


@triton.jit
def query_tiles(q, token, there, h, H: tl.constexpr, F: tl.constexpr, BF: tl.constexpr):
    """By blocks of features, (block)(tile)[size of the block, tokens] with one tile, as `feature_tiles`"""
    blocks = ()
    for f in tl.static_range((F + BF - 1) // BF):
        row = f * BF + tl.arange(0, size_of(f, F, BF))
        blocks = blocks + ((token_tile(q, token, there, h, row, H, F),),)
    return blocks


@triton.jit
def token_rows(base, token, there, h, column, H: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens of a flat tensor as rows: where they are, and which of them there are"""
    here = base + (token * H + h) * WIDTH
    at = here + tl.arange(0, there.shape[0])[:, None] * (H * WIDTH) + column[None, :]
    return at, there[:, None] & (column < WIDTH)[None, :]


@triton.jit
def mix_at(mix, place, i: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr):
    """Where the weights of a chunk's pairs in tile i stand, [tokens, pairs], and which are written"""
    column, there = columns_of(i, CHUNK, EDGE, BE)
    t = tl.arange(0, CHUNK)[:, None]
    at = mix + place * (CHUNK * (CHUNK + EDGE)) + t * (CHUNK + EDGE) + column[None, :]
    return at, there[None, :] & written(column[None, :], t, EDGE)


@triton.jit
def mix_tiles(mix, place, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr):
    """[tokens, pairs] of each tile; zero for pairs after a token"""
    tiles = ()
    for i in tl.static_range(1 + (EDGE > 0)):
        at, mask = mix_at(mix, place, i, CHUNK, EDGE, BE)
        tiles = tiles + (tl.load(at, mask=mask, other=0.0),)
    return tiles


@triton.jit
def scores(queries, xs, PRECISION: tl.constexpr):
    """Q^T X, [tokens, pairs] of each tile"""
    found = ()
    for i in tl.static_range(len(xs[0])):
        total = tl.dot(tl.trans(queries[0][0]), xs[0][i], input_precision=PRECISION)
        for f in tl.static_range(1, len(xs)):
            total = tl.dot(tl.trans(queries[f][0]), xs[f][i], total, input_precision=PRECISION)
        found = found + (total,)
    return found


@triton.jit
def against(tiles, others, PRECISION: tl.constexpr):
    """tile @ other^T of each, summed over the tiles"""
    total = tl.dot(tiles[0], tl.trans(others[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(tiles)):
        total = tl.dot(tiles[i], tl.trans(others[i]), total, input_precision=PRECISION)
    return total


@triton.jit
def narrowed(tiles, dtype: tl.constexpr):
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tiles[i].to(dtype),)
    return found


@triton.jit
def both(tiles, others):
    """Products, element by element"""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tiles[i] * others[i],)
    return found


@triton.jit
def asked_units(queries, w, moving, start, keep, push, i: tl.constexpr, PRECISION: tl.constexpr):
    """keep (W Q) + push (S Q) + (1 - keep) (Z Q) of layer i [BD, tokens], and what keep weighs: W Q, with a
    start (W - Z) Q"""
    (by_keep,) = layer(w[i], queries, PRECISION)
    found = keep[None, :] * by_keep
    if len(start) > 0:
        (still,) = layer(start[i], queries, PRECISION)
        by_keep -= still
        found = keep[None, :] * by_keep + still
    if len(moving) > 0:
        (by_push,) = layer(moving[i], queries, PRECISION)
        found += push[None, :] * by_push
    return found, by_keep


@triton.jit
def reads_forward_kernel(
    q, x, mix, keep, push, borders, momentum_borders, start, errors, score, y,
    token_start, pair_start, length, past, first_chunk, sequence,
    H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Filled: y, and score [NC, H, CHUNK, PAIRS], h_q^T H"""
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    t0, token, first, end, oldest = place_of(
        i, token_start, pair_start, length, past, first_chunk, sequence, CHUNK
    )
    if t0 >= end:
        return
    dtype: tl.constexpr = q.dtype.element_ty
    place, bound = i * H + h, tl.maximum(oldest, t0 - (WINDOW - 1))
    t, c = tl.arange(0, CHUNK), tl.arange(0, BV)
    there = t0 + t < end
    kept = tl.load(keep + place * CHUNK + t)
    pushing = kept
    if len(momentum_borders) > 0:
        pushing = tl.load(push + place * CHUNK + t)
    queries = query_tiles(q, token, there, h, H, F, BF)
    xs = feature_tiles(x, first, t0, bound, end, h, 0, CHUNK, BE, H, F, BF)
    error = chunk_tiles(errors + place * (V * (CHUNK + EDGE)), c, V, CHUNK, EDGE, BE)
    mixed = scores(queries, xs, PRECISION)
    mixed = narrowed(both(mixed, mix_tiles(mix, place, CHUNK, EDGE, BE)), dtype)
    out = tl.zeros([CHUNK, BV], tl.float32)
    scored = ()
    for j in tl.static_range(len(error)):
        scored = scored + (tl.zeros([CHUNK, error[j].shape[1]], tl.float32),)
    for block in range((D + BD - 1) // BD):
        d = block * BD + tl.arange(0, BD)
        w = weight_tiles(borders, place, d, D, F, V, BF, BV)
        moving = weight_tiles(momentum_borders, place, d, D, F, V, BF, BV)
        still = weight_tiles(start, h, d, D, F, V, BF, BV)
        hidden, slopes, _, _, gated, _, _ = at_pairs(
            w, xs, error, ACTIVATION, FAST, PRECISION, dtype
        )
        unit, _ = asked_units(queries, w, moving, still, kept, pushing, 0, PRECISION)
        read, _, _ = activation(unit - against(slopes, mixed, PRECISION), ACTIVATION, FAST)
        if len(borders) > 2:
            gate, _ = asked_units(queries, w, moving, still, kept, pushing, 2, PRECISION)
            read *= gate - against(gated, mixed, PRECISION)
        narrow = tl.trans(read.to(dtype))
        way = kept[:, None] * tl.dot(narrow, w[1][0], input_precision=PRECISION)
        if len(start) > 0:
            way += (1.0 - kept)[:, None] * tl.dot(narrow, still[1][0], input_precision=PRECISION)
        if len(momentum_borders) > 0:
            way += pushing[:, None] * tl.dot(narrow, moving[1][0], input_precision=PRECISION)
        out += way
        more = ()
        for j in tl.static_range(len(error)):
            more = more + (tl.dot(narrow, hidden[j], scored[j], input_precision=PRECISION),)
        scored = more
    weights = mix_tiles(mix, place, CHUNK, EDGE, BE)
    for j in tl.static_range(len(error)):
        store_tile(
            score + place * (CHUNK * (CHUNK + EDGE)), scored[j], t, j, CHUNK, CHUNK, EDGE, BE
        )
    out -= against(narrowed(both(scored, weights), dtype), error, PRECISION)
    if SKIP:
        at, mask = token_rows(q, token, there, h, c, H, F)
        out += tl.load(at, mask=mask, other=0.0)
    at, mask = token_rows(y, token, there, h, c, H, V)
    tl.store(at, out.to(dtype), mask=mask)
