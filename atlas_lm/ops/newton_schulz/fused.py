"""Newton-Schulz as one Triton kernel per direction: one program per matrix, all steps in one launch.

A matrix S [O, I] is worked on as X [o, i], o <= i: a tall one is read with swapped strides. Sizes are
padded with zeros to powers of two, which is exact: zero rows and columns stay zero.

    forward    A = X X^T,  P = bA + cA^2,  X <- aX + PX
    backward   W = G X^T + X G^T,  Z = bW + c(WA + AW),  G <- aG + PG + ZX, G the gradient of X

X and G are kept in fp32, products take operands in the dtype of the inputs (fp32: three TF32 products
each) and add up in fp32. Two layouts:

    whole   X stays in registers over all steps; the backward keeps the X_k, A_k and P_k in scratch
    tiled   X passes through the output (the backward: through scratch) in tiles of columns, and is
            rounded to the dtype of the inputs between steps, as in the plain form
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.backend import HALVES, interpreted
from atlas_lm.ops.newton_schulz.schedules import schedule

SHORT, LONG = 128, 4096  # largest sides
REACH = 2**31  # offsets inside one matrix are int32


class Config(NamedTuple):
    """How a kernel is launched: X whole on chip or in tiles of columns, warps, loads in flight."""

    whole: bool
    warps: int
    stages: int


CONFIGS = (
    Config(whole=True, warps=4, stages=1),  # one warpgroup owns 64 rows: 64 x 256 fills its registers
    Config(whole=True, warps=8, stages=1),
    Config(whole=False, warps=4, stages=2),
    Config(whole=False, warps=8, stages=2),
)


def newton_schulz_fused(
    matrix: Tensor, steps: int, *, name: str = "muon", eps: float = 1e-7
) -> Tensor:
    """The same as the parallel form, without intermediates in global memory.

    matrix: [..., O, I], any strides; returns the same shape, dense. First derivatives only.
    """
    if not schedule(name, steps):
        return matrix
    if (reason := declines(matrix)) is not None:
        raise ValueError(f"{reason}; use form='parallel'")
    return _NewtonSchulz.apply(matrix, steps, name, eps)


def declines(matrix: Tensor) -> str | None:
    """Why the kernels do not take this matrix [..., O, I]; None: they do."""
    if matrix.dtype not in (torch.float32, *HALVES):
        return f"matrix is {matrix.dtype}, fused Newton-Schulz takes fp32, bf16 and fp16"
    if matrix.ndim < 2 or not matrix.numel():
        return f"matrix has shape {list(matrix.shape)}, wanted [..., O, I] with entries"
    short, long = sorted(matrix.shape[-2:])
    if short > SHORT or long > LONG:
        return (
            f"matrix is {matrix.shape[-2]} x {matrix.shape[-1]}, and fused Newton-Schulz keeps "
            f"X X^T on chip: the short side may be at most {SHORT}, the long one {LONG}"
        )
    return None


class _NewtonSchulz(torch.autograd.Function):
    @staticmethod
    def forward(matrix: Tensor, steps: int, name: str, eps: float) -> Tensor:
        return _forward(matrix, steps, name, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.polynomial = inputs[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (matrix,) = ctx.saved_tensors
        return _backward(matrix, grad, *ctx.polynomial), None, None, None


def _forward(
    matrix: Tensor, steps: int, name: str, eps: float, config: Config | None = None
) -> Tensor:
    """X_steps [..., O, I]. config: one of CONFIGS; None: by shape."""
    s = _flat(matrix)
    out = torch.empty_like(s, memory_format=torch.contiguous_format)
    config = config or _choose(s)
    kernel = _forward_whole if config.whole else _forward_tiled
    kernel[(len(s),)](
        s,
        out,
        _coefficients(name, steps, s.device),
        eps,
        steps,
        *_strides(s),
        *_strides(out),
        **_blocks(s, config),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out.view(matrix.shape)


def _backward(
    matrix: Tensor, grad: Tensor, steps: int, name: str, eps: float, config: Config | None = None
) -> Tensor:
    """dS [..., O, I] for the gradient `grad` of X_steps.

    As many programs as the device runs at once walk over the matrices, each with its own scratch:
    X_k [steps, o, i], A_k and P_k [2, steps, o, o] in the dtype they enter products with, and for
    tiles G [o, i] in fp32.
    """
    s, dy = _flat(matrix), _flat(grad)
    ds = torch.empty_like(s, memory_format=torch.contiguous_format)
    config = config or _choose(s)
    blocks = _blocks(s, config)
    rows, width = blocks["ROWS"], blocks["COLS"] * triton.cdiv(blocks["I"], blocks["COLS"])
    programs = min(len(s), _programs(s.device, config))
    kernel = _backward_whole if config.whole else _backward_tiled
    kernel[(programs,)](
        s,
        dy,
        ds,
        s.new_empty(programs, steps, rows, width),
        s.new_empty(programs, steps, 2, rows, rows),
        s.new_empty(programs, 0 if config.whole else rows, width, dtype=torch.float32),
        _coefficients(name, steps, s.device),
        eps,
        steps,
        len(s),
        *_strides(s),
        *_strides(dy),
        *_strides(ds),
        **blocks,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return ds.view(matrix.shape)


def _flat(matrix: Tensor) -> Tensor:
    """[..., O, I] as [N, O, I] in which rows or columns lie densely; a copy only where they do not."""
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    (o, i), (down, right) = flat.shape[1:], flat.stride()[1:]
    dense = 1 in (down, right) and (o - 1) * down + (i - 1) * right < REACH
    return flat if dense else flat.contiguous()


def _strides(flat: Tensor) -> tuple[int, int, int]:
    """Strides of [N, o, i], o the short side."""
    n, down, right = flat.stride()
    return (n, right, down) if flat.shape[1] > flat.shape[2] else (n, down, right)


def _choose(flat: Tensor) -> Config:
    """Whole while X and its products fit the registers: 64 x 256 in half precision, 64 x 64 in fp32."""
    short, long = sorted(flat.shape[1:])
    whole = _padded(short) * _padded(long) <= (64 * 256 if flat.dtype in HALVES else 64 * 64)
    return CONFIGS[2 * (not whole) + (short > 64)]


def _blocks(flat: Tensor, config: Config) -> dict[str, Any]:
    """Compile-time sizes: the matrix, its padded rows, the columns held at a time, the precision."""
    short, long = sorted(flat.shape[1:])
    half = flat.dtype in HALVES
    tile = 128 if half else 64 if short <= 64 else 32
    return {
        "O": short,
        "I": long,
        "ROWS": _padded(short),
        "COLS": _padded(long) if config.whole else min(tile, _padded(long)),
        "PRECISION": "tf32" if half else "tf32x3",
    }


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _programs(device: torch.device, config: Config) -> int:
    """Programs of the backward that run at once: registers hold eight warps of a multiprocessor."""
    if interpreted():
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * 8 // config.warps


@functools.cache
def _coefficients(name: str, steps: int, device: torch.device) -> Tensor:
    """[steps, 3] fp32 on the device."""
    return torch.tensor(schedule(name, steps), dtype=torch.float32, device=device)


@triton.jit
def _polynomial(gram, b, c, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """bA + cA^2 from A [o, o] in fp32, as an operand."""
    a = gram.to(DTYPE)
    return (b * gram + c * tl.dot(a, a, input_precision=PRECISION)).to(DTYPE)


@triton.jit
def _gram_slope(w, gram, b, c, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """Z = bW + c(WA + AW) from G X^T [o, o] in fp32 and A, as an operand."""
    w += tl.trans(w)
    wa = tl.dot(w.to(DTYPE), gram, input_precision=PRECISION)
    return (b * w + c * (wa + tl.trans(wa))).to(DTYPE)


@triton.jit
def _norm_share(inner, norm, scale):
    """How much of S the gradient of |S|_F takes away: <G, S> scale^2 / |S|_F, nothing at zero."""
    return tl.where(norm > 0, inner * scale * scale / tl.where(norm > 0, norm, 1.0), 0.0)


@triton.jit(do_not_specialize=["steps"])
def _forward_whole(
    matrix,
    out,
    coefficients,
    eps,
    steps,
    s_n,
    s_o,
    s_i,
    out_n,
    out_o,
    out_i,
    O: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = matrix.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    inside = (rows < O) & (cols < I)
    s = tl.load(matrix + n * s_n + rows * s_o + cols * s_i, mask=inside, other=0.0).to(tl.float32)
    x = s * (1.0 / (tl.sqrt(tl.sum(s * s)) + eps))
    for k in range(steps):
        a = tl.load(coefficients + 3 * k)
        b = tl.load(coefficients + 3 * k + 1)
        c = tl.load(coefficients + 3 * k + 2)
        h = x.to(dtype)
        gram = tl.dot(h, tl.trans(h), input_precision=PRECISION)
        p = _polynomial(gram, b, c, PRECISION, dtype)
        x = tl.dot(p, h, acc=a * x, input_precision=PRECISION)
    tl.store(out + n * out_n + rows * out_o + cols * out_i, x.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["steps"])
def _forward_tiled(
    matrix,
    out,
    coefficients,
    eps,
    steps,
    s_n,
    s_o,
    s_i,
    out_n,
    out_o,
    out_i,
    O: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = matrix.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    matrix += n * s_n + rows * s_o + cols * s_i
    out += n * out_n + rows * out_o + cols * out_i
    square = 0.0
    for j in range(0, I, COLS):
        inside = (rows < O) & (cols + j < I)
        s = tl.load(matrix + j * s_i, mask=inside, other=0.0).to(tl.float32)
        square += tl.sum(s * s)
    scale = 1.0 / (tl.sqrt(square) + eps)
    for j in range(0, I, COLS):
        inside = (rows < O) & (cols + j < I)
        s = tl.load(matrix + j * s_i, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + j * out_i, (s * scale).to(dtype), mask=inside)
    for k in range(steps):
        tl.debug_barrier()  # tiles written above are read by other threads below
        a = tl.load(coefficients + 3 * k)
        b = tl.load(coefficients + 3 * k + 1)
        c = tl.load(coefficients + 3 * k + 2)
        gram = tl.zeros((ROWS, ROWS), tl.float32)
        for j in range(0, I, COLS):
            x = tl.load(out + j * out_i, mask=(rows < O) & (cols + j < I), other=0.0)
            gram = tl.dot(x, tl.trans(x), acc=gram, input_precision=PRECISION)
        p = _polynomial(gram, b, c, PRECISION, dtype)
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            h = tl.load(out + j * out_i, mask=inside, other=0.0)
            x = tl.dot(p, h, acc=a * h.to(tl.float32), input_precision=PRECISION)
            tl.store(out + j * out_i, x.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["steps", "count"])
def _backward_whole(
    matrix,
    dy,
    ds,
    xs,
    squares,
    gs,
    coefficients,
    eps,
    steps,
    count,
    s_n,
    s_o,
    s_i,
    dy_n,
    dy_o,
    dy_i,
    ds_n,
    ds_o,
    ds_i,
    O: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = matrix.dtype.element_ty
    first = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    inside = (rows < O) & (cols < I)
    xs += first * steps * (ROWS * COLS) + rows * COLS + cols
    squares += first * steps * (2 * ROWS * ROWS) + rows * ROWS + tl.arange(0, ROWS)[None, :]
    for n in range(first, count, tl.num_programs(0)):
        s_at = matrix + n * s_n + rows * s_o + cols * s_i
        s = tl.load(s_at, mask=inside, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(s * s))
        scale = 1.0 / (norm + eps)
        x = s * scale
        for k in range(steps):
            a = tl.load(coefficients + 3 * k)
            b = tl.load(coefficients + 3 * k + 1)
            c = tl.load(coefficients + 3 * k + 2)
            h = x.to(dtype)
            gram = tl.dot(h, tl.trans(h), input_precision=PRECISION)
            p = _polynomial(gram, b, c, PRECISION, dtype)
            tl.store(xs + k * (ROWS * COLS), h)
            tl.store(squares + 2 * k * (ROWS * ROWS), gram.to(dtype))
            tl.store(squares + (2 * k + 1) * (ROWS * ROWS), p)
            x = tl.dot(p, h, acc=a * x, input_precision=PRECISION)
        tl.debug_barrier()  # scratch written above is read by other threads below
        g = tl.load(dy + n * dy_n + rows * dy_o + cols * dy_i, mask=inside, other=0.0)
        g = g.to(tl.float32)
        for back in range(steps):
            k = steps - 1 - back
            a = tl.load(coefficients + 3 * k)
            b = tl.load(coefficients + 3 * k + 1)
            c = tl.load(coefficients + 3 * k + 2)
            h = tl.load(xs + k * (ROWS * COLS))
            gram = tl.load(squares + 2 * k * (ROWS * ROWS))
            p = tl.load(squares + (2 * k + 1) * (ROWS * ROWS))
            w = tl.dot(g.to(dtype), tl.trans(h), input_precision=PRECISION)
            z = _gram_slope(w, gram, b, c, PRECISION, dtype)
            g = tl.dot(p, g.to(dtype), acc=a * g, input_precision=PRECISION)
            g = tl.dot(z, h, acc=g, input_precision=PRECISION)
        tl.debug_barrier()  # scratch is written anew for the next matrix
        s = tl.load(s_at, mask=inside, other=0.0).to(tl.float32)
        g = scale * g - _norm_share(tl.sum(g * s), norm, scale) * s
        tl.store(ds + n * ds_n + rows * ds_o + cols * ds_i, g.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["steps", "count"])
def _backward_tiled(
    matrix,
    dy,
    ds,
    xs,
    squares,
    gs,
    coefficients,
    eps,
    steps,
    count,
    s_n,
    s_o,
    s_i,
    dy_n,
    dy_o,
    dy_i,
    ds_n,
    ds_o,
    ds_i,
    O: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = matrix.dtype.element_ty
    WIDTH: tl.constexpr = (I + COLS - 1) // COLS * COLS
    first = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    xs += first * steps * (ROWS * WIDTH) + rows * WIDTH + cols
    squares += first * steps * (2 * ROWS * ROWS) + rows * ROWS + tl.arange(0, ROWS)[None, :]
    gs += first * (ROWS * WIDTH) + rows * WIDTH + cols
    for n in range(first, count, tl.num_programs(0)):
        s_at = matrix + n * s_n + rows * s_o + cols * s_i
        dy_at = dy + n * dy_n + rows * dy_o + cols * dy_i
        square = 0.0
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            s = tl.load(s_at + j * s_i, mask=inside, other=0.0).to(tl.float32)
            square += tl.sum(s * s)
        norm = tl.sqrt(square)
        scale = 1.0 / (norm + eps)
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            s = tl.load(s_at + j * s_i, mask=inside, other=0.0).to(tl.float32)
            tl.store(xs + j, (s * scale).to(dtype))
            tl.store(gs + j, tl.load(dy_at + j * dy_i, mask=inside, other=0.0).to(tl.float32))
        for k in range(steps):
            tl.debug_barrier()  # tiles written above are read by other threads below
            a = tl.load(coefficients + 3 * k)
            b = tl.load(coefficients + 3 * k + 1)
            c = tl.load(coefficients + 3 * k + 2)
            x_at = xs + k * (ROWS * WIDTH)
            gram = tl.zeros((ROWS, ROWS), tl.float32)
            for j in range(0, I, COLS):
                h = tl.load(x_at + j)
                gram = tl.dot(h, tl.trans(h), acc=gram, input_precision=PRECISION)
            p = _polynomial(gram, b, c, PRECISION, dtype)
            tl.store(squares + 2 * k * (ROWS * ROWS), gram.to(dtype))
            tl.store(squares + (2 * k + 1) * (ROWS * ROWS), p)
            if k + 1 < steps:
                for j in range(0, I, COLS):
                    h = tl.load(x_at + j)
                    x = tl.dot(p, h, acc=a * h.to(tl.float32), input_precision=PRECISION)
                    tl.store(x_at + ROWS * WIDTH + j, x.to(dtype))
        for back in range(steps):
            tl.debug_barrier()
            k = steps - 1 - back
            a = tl.load(coefficients + 3 * k)
            b = tl.load(coefficients + 3 * k + 1)
            c = tl.load(coefficients + 3 * k + 2)
            x_at = xs + k * (ROWS * WIDTH)
            w = tl.zeros((ROWS, ROWS), tl.float32)
            for j in range(0, I, COLS):
                g = tl.load(gs + j).to(dtype)
                w = tl.dot(g, tl.trans(tl.load(x_at + j)), acc=w, input_precision=PRECISION)
            gram = tl.load(squares + 2 * k * (ROWS * ROWS))
            p = tl.load(squares + (2 * k + 1) * (ROWS * ROWS))
            z = _gram_slope(w, gram, b, c, PRECISION, dtype)
            for j in range(0, I, COLS):
                g = tl.load(gs + j)
                step = tl.dot(p, g.to(dtype), acc=a * g, input_precision=PRECISION)
                step = tl.dot(z, tl.load(x_at + j), acc=step, input_precision=PRECISION)
                tl.store(gs + j, step)
        tl.debug_barrier()
        inner = 0.0
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            s = tl.load(s_at + j * s_i, mask=inside, other=0.0).to(tl.float32)
            inner += tl.sum(tl.load(gs + j) * s)
        share = _norm_share(inner, norm, scale)
        ds_at = ds + n * ds_n + rows * ds_o + cols * ds_i
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            s = tl.load(s_at + j * s_i, mask=inside, other=0.0).to(tl.float32)
            g = scale * tl.load(gs + j) - share * s
            tl.store(ds_at + j * ds_i, g.to(dtype), mask=inside)
        tl.debug_barrier()  # scratch is written anew for the next matrix
