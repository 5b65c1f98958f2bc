"""What the kernels of a two-layer memory share: where tiles lie, the activation, products of tiles.

Hidden units are the rows of every tile and tokens or pairs its columns, so that the memory is the left side
of products. Weights come as tuples, [D, F] of the first layer, [D, V] of the last one, transposed, and
[D, F] of the gate if there is one; a program holds BD rows of each as a tuple of blocks of columns.
The pairs of a chunk are a tuple of tiles: its own pairs, then those before it that its windows still hold,
its edge, if there are any. Tensors by chunk, [NC, H, rows, PAIRS], have the edge in front.
"""

import triton
import triton.language as tl


@triton.jit
def quick_exp2(x):
    """2^x in one instruction, off by 2^-22"""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def quick_inverse(x):
    """1 / x in one instruction, off by 2^-23"""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def settled(x, dtype: tl.constexpr, FAST: tl.constexpr):
    """x, rounded here and now: else what is used later is rounded later, and waits in twice the registers,
    or in those of all that it is made of."""
    x = x.to(dtype)
    if FAST:
        PACKED: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, PACKED)
    return x


@triton.jit
def all_settled(tiles, dtype: tl.constexpr, FAST: tl.constexpr):
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (settled(tiles[i], dtype, FAST),)
    return found


@triton.jit
def activation(a, KIND: tl.constexpr, FAST: tl.constexpr):
    """s(a), s'(a), s''(a). FAST: for results that are rounded to halves, and compiled"""
    if KIND == "gelu":
        square = a * a
        if FAST:
            # 1 - erf by Abramowitz and Stegun 7.1.26, off by 1.5e-7: its exponential is the bell's
            bell = quick_exp2(square * -0.7213475204444817)
            t = quick_inverse(1.0 + 0.23164190 * tl.abs(a))
            tail = (0.5 * 1.061405429 * t - 0.5 * 1.453152027) * t + 0.5 * 1.421413741
            tail = ((tail * t - 0.5 * 0.284496736) * t + 0.5 * 0.254829592) * t * bell
            below = tl.where(a > 0, 1.0 - tail, tail)
        else:
            bell = tl.exp(-0.5 * square)
            below = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))
        density = bell * 0.3989422804014327
        return a * below, below + a * density, density * (2.0 - square)
    else:
        if FAST:
            s = quick_inverse(1.0 + quick_exp2(a * -1.4426950408889634))
        else:
            s = tl.sigmoid(a)
        slope = s * (1.0 - s)
        return a * s, s + a * slope, slope * (2.0 + a * (1.0 - 2.0 * s))


@triton.constexpr_function
def size_of(f, width, block):
    """Columns of block f of so many: the last one is as wide as it must be, a power of two."""
    rest = width - f * block
    return block if rest >= block else max(16, 1 << (rest - 1).bit_length())


@triton.constexpr_function
def second(i, first, last):
    """Of weight i: what the last layer has, or the others."""
    return last if i == 1 else first


@triton.jit
def block_at(weight, f: tl.constexpr, d, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where block f of rows d of a weight [D, WIDTH] stands, and what of it there is."""
    column = f * BLOCK + tl.arange(0, size_of(f, WIDTH, BLOCK))
    return weight + d[:, None] * WIDTH + column[None, :], (d < D)[:, None] & (column < WIDTH)[
        None, :
    ]


@triton.jit
def block_of(weight, f: tl.constexpr, d, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Block f of columns; zero outside."""
    at, mask = block_at(weight, f, d, D, WIDTH, BLOCK)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def blocks_of(weight, d, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    blocks = ()
    for f in tl.static_range((WIDTH + BLOCK - 1) // BLOCK):
        blocks = blocks + (block_of(weight, f, d, D, WIDTH, BLOCK),)
    return blocks


@triton.jit
def store_block(
    weight, f: tl.constexpr, block, d, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at, mask = block_at(weight, f, d, D, WIDTH, BLOCK)
    tl.store(at, block.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def store_blocks(weight, blocks, d, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for f in tl.static_range(len(blocks)):
        store_block(weight, f, blocks[f], d, D, WIDTH, BLOCK)


@triton.jit
def weight_tiles(
    weights, place, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Rows d of all weights. place: which of those that stand one after the other"""
    tiles = ()
    for i in tl.static_range(len(weights)):
        here = weights[i] + place * (D * second(i, F, V))
        tiles = tiles + (blocks_of(here, d, D, second(i, F, V), second(i, BF, BV)),)
    return tiles


@triton.jit
def row_of(weights, i: tl.constexpr, shift):
    """(weight i, moved on,) of those there are; () of none"""
    found = ()
    if len(weights) > 0:
        found = (weights[i] + shift,)
    return found


@triton.jit
def held_or_read(
    held, weights, i: tl.constexpr, f: tl.constexpr, place, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Block f of weight i, from registers if they hold it, else from memory."""
    if len(held) > 0:
        block = held[i][f]
    else:
        here = weights[i] + place * (D * second(i, F, V))
        block = block_of(here, f, d, D, second(i, F, V), second(i, BF, BV))
    return block


@triton.jit
def hold_or_store(
    kept, held, block, weights, i: tl.constexpr, f: tl.constexpr, place, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The other way round, block after block: those kept so far and this one; () if memory has them."""
    if len(held) > 0:
        kept = kept + (block,)
    else:
        tl.debug_barrier()  # all have read what is written over
        here = weights[i] + place * (D * second(i, F, V))
        store_block(here, f, block, d, D, second(i, F, V), second(i, BF, BV))
    return kept


@triton.jit
def with_weight(kept, held, blocks):
    """Those kept so far and one more weight; () if memory has them"""
    if len(held) > 0:
        kept = kept + (blocks,)
    return kept


@triton.constexpr_function
def blocks_in(i, features, values, block, last_block):
    """Blocks of columns of weight i"""
    return -(-values // last_block) if i == 1 else -(-features // block)


@triton.jit
def store_weights(
    weights, tiles, place, d,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(len(weights)):
        here = weights[i] + place * (D * second(i, F, V))
        store_blocks(here, tiles[i], d, D, second(i, F, V), second(i, BF, BV))


@triton.jit
def rounded(tiles, dtype: tl.constexpr):
    """All blocks of all weights in a dtype."""
    found = ()
    for i in tl.static_range(len(tiles)):
        blocks = ()
        for f in tl.static_range(len(tiles[i])):
            blocks = blocks + (tiles[i][f].to(dtype),)
        found = found + (blocks,)
    return found


@triton.jit
def token_tile(base, first, there, h, row, H: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens from row `first` of a flat tensor [rows, H, WIDTH] on, as columns; zero where not there."""
    mask = there[None, :] & (row < WIDTH)[:, None]
    here = base + (first * H + h) * WIDTH
    step = tl.arange(0, there.shape[0])[None, :] * (H * WIDTH)
    return tl.load(here + step + row[:, None], mask=mask, other=0.0)


@triton.jit
def pairs_there(t0, bound, end, CHUNK: tl.constexpr, BE: tl.constexpr):
    """By tile, which pairs of the chunk that begins at t0 there are: none before `bound` or from `end` on"""
    found = (t0 + tl.arange(0, CHUNK) < end,)
    if BE > 0:
        edge = t0 - BE + tl.arange(0, BE)
        found = found + ((edge >= bound) & (edge < end),)
    return found


@triton.jit
def pair_tiles(
    base, first, t0, bound, end, h, row,
    CHUNK: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The pairs of that chunk, zero where not there."""
    there = pairs_there(t0, bound, end, CHUNK, BE)
    tiles = (token_tile(base, first + t0, there[0], h, row, H, WIDTH),)
    if BE > 0:
        tiles = tiles + (token_tile(base, first + t0 - BE, there[1], h, row, H, WIDTH),)
    return tiles


@triton.jit
def feature_tiles(
    base, first, t0, bound, end, h, zero,
    CHUNK: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The same by blocks of features: (block)(tile)[size of the block, pairs]. zero: see `fresh`"""
    blocks = ()
    for f in tl.static_range((F + BF - 1) // BF):
        b = f * BF + fresh(tl.arange(0, size_of(f, F, BF)), zero)
        blocks = blocks + (pair_tiles(base, first, t0, bound, end, h, b, CHUNK, BE, H, F),)
    return blocks


@triton.jit
def columns_of(i: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr):
    """Where the columns of tile i stand in rows of PAIRS, and which of them there are."""
    if i == 0:
        column = EDGE + tl.arange(0, CHUNK)
    else:
        column = EDGE - BE + tl.arange(0, BE)
    return column, column >= 0


@triton.jit
def chunk_tiles(
    base, row, ROWS: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr
):
    """Rows of one chunk's [ROWS, PAIRS]."""
    tiles = ()
    for i in tl.static_range(1 + (EDGE > 0)):
        column, there = columns_of(i, CHUNK, EDGE, BE)
        at = base + row[:, None] * (CHUNK + EDGE) + column[None, :]
        mask = (row < ROWS)[:, None] & there[None, :]
        tiles = tiles + (tl.load(at, mask=mask, other=0.0),)
    return tiles


@triton.jit
def store_tile(
    base, tile, row, i: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Tile i into rows of one chunk's [ROWS, PAIRS]."""
    column, there = columns_of(i, CHUNK, EDGE, BE)
    at = base + row[:, None] * (CHUNK + EDGE) + column[None, :]
    mask = (row < ROWS)[:, None] & there[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def vectors(base, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr):
    """A number per pair, of a row of PAIRS."""
    found = ()
    for i in tl.static_range(1 + (EDGE > 0)):
        column, there = columns_of(i, CHUNK, EDGE, BE)
        found = found + (tl.load(base + column, mask=there, other=0.0),)
    return found


@triton.jit
def store_vector(
    base, vector, i: tl.constexpr, CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr
):
    column, there = columns_of(i, CHUNK, EDGE, BE)
    tl.store(base + column, vector, mask=there)


@triton.jit
def times(left, tiles, PRECISION: tl.constexpr):
    """left @ tile of each tile."""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tl.dot(left, tiles[i], input_precision=PRECISION),)
    return found


@triton.jit
def gained(totals, left, tiles, PRECISION: tl.constexpr):
    """total + left @ tile of each"""
    found = ()
    for j in tl.static_range(len(tiles)):
        found = found + (tl.dot(left, tiles[j], totals[j], input_precision=PRECISION),)
    return found


@triton.jit
def layer(blocks, x, PRECISION: tl.constexpr):
    """W X: of each tile of X, summed over blocks of features."""
    found = ()
    for i in tl.static_range(len(x[0])):
        total = tl.dot(blocks[0], x[0][i], input_precision=PRECISION)
        for f in tl.static_range(1, len(blocks)):
            total = tl.dot(blocks[f], x[f][i], total, input_precision=PRECISION)
        found = found + (total,)
    return found


@triton.jit
def outer(lefts, rights, PRECISION: tl.constexpr):
    """sum over tiles of left @ right^T, [rows of left, rows of right]"""
    total = tl.dot(lefts[0], tl.trans(rights[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(lefts)):
        total = tl.dot(lefts[i], tl.trans(rights[i]), total, input_precision=PRECISION)
    return total


@triton.jit
def weighted(tiles, weights, dtype: tl.constexpr):
    """Each column times its weight, rounded."""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + ((tiles[i] * weights[i][None, :]).to(dtype),)
    return found


@triton.jit
def at_pairs(
    w,
    x,
    e,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    dtype: tl.constexpr,
):
    """Of the pairs, by tile: H, P, B, C, and with a gate also its P, s and s' U; rounded."""
    units, back = layer(w[0], x, PRECISION), times(w[1][0], e, PRECISION)
    gates = units
    if len(w) > 2:
        gates = layer(w[2], x, PRECISION)
    hidden, slopes, bent, curved = (), (), (), ()
    gated, opened, crossed = (), (), ()
    for i in tl.static_range(len(units)):
        s, bend, curve = activation(units[i], ACTIVATION, FAST)
        if len(w) > 2:
            cross = bend * back[i]
            gated = gated + (settled(s * back[i], dtype, FAST),)
            opened = opened + (settled(s, dtype, FAST),)
            crossed = crossed + (settled(cross, dtype, FAST),)
            s, bend, curve = s * gates[i], bend * gates[i], curve * gates[i]
        hidden = hidden + (settled(s, dtype, FAST),)
        bent = bent + (settled(bend, dtype, FAST),)
        slopes = slopes + (settled(bend * back[i], dtype, FAST),)
        curved = curved + (settled(curve * back[i], dtype, FAST),)
    return hidden, slopes, bent, curved, gated, opened, crossed


@triton.jit
def nought(k, FAST: tl.constexpr):
    """Zero, and nobody knows that it is. k: round of a loop"""
    if FAST:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [k], tl.int32, False, 1)
    return k >> 30


@triton.jit
def fresh(row, zero):
    """The same rows, not known to be those of before: addresses made anew wait in no registers."""
    SIZE: tl.constexpr = row.shape[0]
    return tl.max_contiguous(tl.multiple_of(row ^ zero, SIZE), SIZE)


@triton.jit
def turn_of(turn, SLICES: tl.constexpr):
    """Slice and group of the next program: those of a group, who wait for each other, begin side by side."""
    mine = tl.program_id(0)
    if SLICES > 1:
        mine = tl.atomic_add(turn, 1)
    return mine % SLICES, (mine // SLICES).to(tl.int64)


@triton.jit
def wait_for(counter, wanted):
    """Until a counter has come so far. What was written before it was raised is seen after."""
    seen = tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], tl.int32, False, 1
    )
    while seen < wanted:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], tl.int32, False, 1
        )
    tl.debug_barrier()


@triton.jit
def post(
    parts,
    mail,
    arrived,
    group,
    slot,
    k,
    c,
    SLICES: tl.constexpr,
    CHUNK: tl.constexpr,
    BE: tl.constexpr,
):
    """Hand tiles [rows c, pairs] to the programs that share a head.

    mail: [groups, 2, SLICES, rows, CHUNK + BE]; rounds k take turns with two boxes, so nobody writes where
    another still reads.   arrived: [groups], how often programs have posted"""
    WIDTH: tl.constexpr = CHUNK + BE
    ROWS: tl.constexpr = c.shape[0]
    box = mail + ((group * 2 + k % 2) * SLICES + slot) * (ROWS * WIDTH)
    for i in tl.static_range(len(parts)):
        column = i * CHUNK + tl.arange(0, parts[i].shape[1])[None, :]
        tl.store(box + c[:, None] * WIDTH + column, parts[i])
    tl.debug_barrier()
    tl.atomic_add(arrived + group, 1, sem="release")


@triton.jit
def collect(
    parts, mail, arrived, group, k, c, SLICES: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr
):
    """The sums of what all have posted, in the order of the slices; `parts` gives the shapes"""
    WIDTH: tl.constexpr = CHUNK + BE
    ROWS: tl.constexpr = c.shape[0]
    box = mail + (group * 2 + k % 2) * (SLICES * ROWS * WIDTH)
    wait_for(arrived + group, (k + 1) * SLICES)
    totals = ()
    for i in tl.static_range(len(parts)):
        at = box + c[:, None] * WIDTH + i * CHUNK + tl.arange(0, parts[i].shape[1])[None, :]
        total = tl.load(at, cache_modifier=".cg")
        for other in tl.static_range(1, SLICES):
            total += tl.load(at + other * (ROWS * WIDTH), cache_modifier=".cg")
        totals = totals + (total,)
    return totals
