"""Gradients of pairs, put together from what the chunks that see them ask."""

import triton
import triton.language as tl


@triton.jit
def columns_asked(parts, place, column, there, row, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Columns of one chunk, summed over all parts, [rows, columns]"""
    at = place * (WIDTH * PAIRS) + row[:, None] * PAIRS + column[None, :]
    mask = there[None, :] & (row < WIDTH)[:, None]
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for i in tl.static_range(len(parts)):
        total += tl.load(parts[i] + at, mask=mask, other=0.0)
    return total


@triton.jit
def gather_kernel(
    out, parts, pair_start, first_chunk, sequence, length, past,
    H: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr, CHUNK: tl.constexpr,
    SIGN: tl.constexpr,
):  # fmt: skip
    """out: [rows, H, WIDTH], of a pair from its own chunk and the next; from the first chunk also of those
    before it   parts: tensors [NC, H, WIDTH, EDGE + CHUNK]"""
    PAIRS: tl.constexpr = EDGE + CHUNK
    i, h = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    end, first = tl.load(length + n), tl.load(pair_start + n)
    if t0 >= end:
        return
    t, row = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    inside = (row < WIDTH)[None, :]
    step = t[:, None] * (H * WIDTH) + row[None, :]
    total = columns_asked(parts, i * H + h, t + EDGE, t < CHUNK, row, WIDTH, PAIRS)
    if EDGE > 0:
        later = (t >= CHUNK - EDGE) & (t0 + CHUNK < end)
        column = t - (CHUNK - EDGE)
        total += columns_asked(parts, (i + 1) * H + h, column, later, row, WIDTH, PAIRS)
    here = out + ((first + t0) * H + h) * WIDTH
    total = tl.trans(total * SIGN).to(out.dtype.element_ty)
    tl.store(here + step, total, mask=(t < end - t0)[:, None] & inside)
    if EDGE > 0:
        if t0 == 0:
            before = (t < EDGE) & (t >= EDGE - tl.load(past + n))
            total = columns_asked(parts, i * H + h, t, before, row, WIDTH, PAIRS)
            here = out + ((first - EDGE) * H + h) * WIDTH
            total = tl.trans(total * SIGN).to(out.dtype.element_ty)
            tl.store(here + step, total, mask=before[:, None] & inside)
