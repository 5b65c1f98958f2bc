"""What the two step kernels share: products over the window's pairs, retention, and the window itself.

Pairs stand in columns: tensors are [width, C]. C is 1 for a window of one pair, where products are plain
sums in fp32, and a power of two from 16 on otherwise, where they are dots.
"""

import triton
import triton.language as tl


@triton.jit
def times(w, x, PRECISION: tl.constexpr):
    """w [O, I], x [I, C] -> w x [O, C]"""
    if x.shape[1] == 1:
        return tl.sum(w * tl.trans(x), axis=1, keep_dims=True)
    else:
        return tl.dot(w, x, input_precision=PRECISION)


@triton.jit
def times_long(w, x, PRECISION: tl.constexpr):
    """As `times`, for few rows and many columns: warps share the columns instead of repeating them."""
    if x.shape[1] == 1:
        return tl.sum(w * tl.trans(x), axis=1, keep_dims=True)
    else:
        PARTS: tl.constexpr = w.shape[1] // 32 if w.shape[1] >= 64 else 1
        STEP: tl.constexpr = w.shape[1] // PARTS
        w = tl.permute(tl.reshape(w, (w.shape[0], PARTS, STEP)), (1, 0, 2))
        x = tl.reshape(x, (PARTS, STEP, x.shape[1]))
        return tl.sum(tl.dot(w, x, input_precision=PRECISION), axis=0)


@triton.jit
def outer(left, right, PRECISION: tl.constexpr):
    """left [O, C], right [I, C] -> left right^T [O, I]"""
    if left.shape[1] == 1:
        return left * tl.trans(right)
    else:
        return tl.dot(left, tl.trans(right), input_precision=PRECISION)


@triton.jit
def activate(a, ACTIVATION: tl.constexpr):
    """s(a)"""
    if ACTIVATION == "gelu":
        return 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    else:
        return a * tl.sigmoid(a)


@triton.jit
def derivative(a, ACTIVATION: tl.constexpr):
    """s'(a)"""
    if ACTIVATION == "gelu":
        density = tl.exp(-0.5 * a * a) * 0.3989422804014327
        return 0.5 * (1.0 + tl.erf(a * 0.7071067811865476)) + a * density
    else:
        s = tl.sigmoid(a)
        return s * (1.0 + a * (1.0 - s))


@triton.jit
def clip(square, delta):
    """Huber: min(1, delta / |e|), from |e|^2 and delta, [1, C]."""
    beyond = square > delta * delta
    return tl.where(beyond, delta / tl.sqrt(tl.where(beyond, square, 1.0)), 1.0)


@triton.jit
def keep(tile, start, head, at, mask, alpha, RETENTION: tl.constexpr):
    """What is left of a tile of the memory. head: offset of this head in the initial weight `start`."""
    if RETENTION == "keep":
        return tile
    elif RETENTION == "decay":
        return alpha * tile
    else:
        first = tl.load(start + head + at, mask=mask, other=0.0)
        return first + alpha * (tile - first)


@triton.jit
def point(
    memory, anchor, start, anchor_out, base, head, at, mask, border, write, alpha,
    AFTER: tl.constexpr, RETENTION: tl.constexpr,
):  # fmt: skip
    """A tile of the weights at which slopes are taken. On a border the anchor becomes the memory.

    The tile lies at base + at, base int64 and the same for a whole program, at int32.
    """
    if anchor is None:
        tile = tl.load(memory + base + at, mask=mask, other=0.0)
        if AFTER:
            tile = keep(tile, start, head, at, mask, alpha, RETENTION)
    else:
        source = memory if border else anchor
        tile = tl.load(source + base + at, mask=mask, other=0.0)
        tl.store(anchor_out + base + at, tile, mask=mask & write)
    return tile


@triton.jit
def move(
    memory, momentum, start, memory_out, momentum_out, base, head, at, mask, push, alpha, theta, live,
    RETENTION: tl.constexpr,
):  # fmt: skip
    """Retain, step, write: a tile of the memory after the token. push: eta G, a tile."""
    old = tl.load(memory + base + at, mask=mask, other=0.0)
    new = keep(old, start, head, at, mask, alpha, RETENTION)
    if momentum is None:
        new -= push
    else:
        s = tl.load(momentum + base + at, mask=mask, other=0.0)
        moved = theta * s - push
        tl.store(momentum_out + base + at, tl.where(live, moved, s), mask=mask)
        new += moved
    new = tl.where(live, new, old)
    tl.store(memory_out + base + at, new, mask=mask)
    return new


@triton.jit
def pair_gate(kept, given, n, SIZE: tl.constexpr, C: tl.constexpr):
    """A gate that belongs to pairs, oldest first, [1, C]: from the window, and of the new pair."""
    j = tl.arange(0, C)[None, :]
    old = tl.load(kept + n * (SIZE - 1) + j, mask=j < SIZE - 1, other=0.0)
    return tl.where(j == SIZE - 1, tl.load(given + n), old)


@triton.jit
def pair_values(token, window, n, v, j, SIZE: tl.constexpr, V: tl.constexpr):
    """Values of the window's pairs, [len v, C]. v: [len v, 1], which of them; j: [1, C], of which pair."""
    kept = window.v + n * (SIZE - 1) * V
    old = tl.load(kept + j * V + v, mask=(j < SIZE - 1) & (v < V), other=0.0)
    newest = tl.load(token.v + n * V + v, mask=v < V, other=0.0)
    return tl.where(j == SIZE - 1, newest, old)


@triton.jit
def pair_weights(
    token, window, n, position, SIZE: tl.constexpr, C: tl.constexpr, GAMMA: tl.constexpr
):
    """eta gamma of the window's pairs, [1, C], zero for those from before the stream."""
    j = tl.arange(0, C)[None, :]
    age = SIZE - 1 - j
    here = (age >= 0) & (age.to(tl.int64) <= position)
    if GAMMA == "pair":
        gamma = pair_gate(window.gamma, token.gamma, n, SIZE, C)
    elif GAMMA == "offset":
        gamma = tl.load(token.gamma + n * SIZE + age, mask=age >= 0, other=0.0)
    else:
        gamma = tl.full((1, C), 1.0 / SIZE, tl.float32)
    return tl.where(here, tl.load(token.eta + n) * gamma, 0.0)


@triton.jit
def shift(kept, given, out, n, live, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Push the new pair's field [WIDTH] into the window [SIZE-1, WIDTH], and drop the oldest."""
    ROWS: tl.constexpr = triton.next_power_of_2(SIZE - 1)
    COLUMNS: tl.constexpr = triton.next_power_of_2(WIDTH)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (row < SIZE - 1) & (column < WIDTH)
    source = row + live.to(tl.int32)
    base = n * (SIZE - 1) * WIDTH
    old = tl.load(
        kept + base + source * WIDTH + column, mask=inside & (source < SIZE - 1), other=0.0
    )
    new = tl.load(given + n * WIDTH + column, mask=column < WIDTH, other=0.0)
    value = tl.where(source == SIZE - 1, new, old)
    tl.store(out + base + row * WIDTH + column, value, mask=inside)


@triton.jit
def advance(
    token, window, window_out, position_out, n, row, head, position, live,
    SIZE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The window and the clock after the token."""
    if SIZE > 1:
        shift(window.k, token.k, window_out.k, n, live, SIZE, K)
        shift(window.v, token.v, window_out.v, n, live, SIZE, V)
        if window.gamma is not None:
            shift(window.gamma, token.gamma, window_out.gamma, n, live, SIZE, 1)
        if window.delta is not None:
            shift(window.delta, token.delta, window_out.delta, n, live, SIZE, 1)
    if head == 0:
        tl.store(position_out + row, position + live.to(tl.int64))
