"""One program takes the softmax of one row."""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(
    logits, said, labels, ignored, losses, V,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """losses[row], and over the logits [R, V] their gradient. said: [R], the logit of each label"""
    row = tl.program_id(0).to(tl.int64)
    left_out = tl.load(ignored + row)
    label = tl.load(labels + row)
    base = logits + row * V
    columns = tl.arange(0, BLOCK)
    top, total = -float("inf"), 0.0
    for first in range(0, V, BLOCK):
        inside = first + columns < V
        x = tl.load(base + first + columns, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    norm = top + tl.log(total)
    loss = norm - tl.load(said + row).to(tl.float32)
    tl.store(losses + row, tl.where(left_out, 0.0, loss))
    if GRADIENT:
        for first in range(0, V, BLOCK):
            inside = first + columns < V
            x = tl.load(base + first + columns, mask=inside, other=0.0).to(tl.float32)
            slope = tl.exp(x - norm) - tl.where(first + columns == label, 1.0, 0.0)
            slope = tl.where(left_out, 0.0, slope)
            tl.store(base + first + columns, slope.to(logits.dtype.element_ty), mask=inside)
