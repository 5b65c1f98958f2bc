"""Newton-Schulz as one kernel per direction: one program per matrix, all steps in one launch.

A matrix [O, I] is worked on as X [o, i], o <= i: a tall one is read turned, nothing is copied. Sizes
are padded with zeros to powers of two, which is exact: zero rows and columns stay zero.

    whole   X stays on chip in fp32 over all steps; the backward, which makes the X_k anew, puts them
            aside as operands in scratch and keeps the gradient of X on chip
    tiled   X does not fit: it passes through the output (the backward: through scratch) in tiles of
            columns and is rounded to the dtype of the matrix between steps, as in the parallel form
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.backend import HALVES, interpreted
from atlas_lm.ops.newton_schulz.schedules import schedule

SHORT, LONG = 128, 4096  # largest sides
SHARED = 192 * 1024  # bytes of shared memory that the largest blocks take (backward, 128 x 128)


class Config(NamedTuple):
    """How a kernel is launched: X whole or in tiles, warps, and how far ahead the forward loads tiles.

    The backward does not load ahead: its operands leave no room for more.
    """

    whole: bool
    warps: int
    stages: int


CONFIGS = (
    Config(whole=True, warps=4, stages=1),  # four warps own 64 rows: 64 x 256 fills their registers
    Config(whole=True, warps=8, stages=1),  # 128 rows
    Config(whole=False, warps=4, stages=2),
    Config(whole=False, warps=8, stages=2),
)


def newton_schulz_fused(
    matrix: Tensor, steps: int, *, name: str = "muon", eps: float = 1e-7
) -> Tensor:
    """The parallel form without intermediates in global memory; first derivatives only.

    matrix: [..., O, I], any strides; returns the same shape, dense.
    """
    if not schedule(name, steps):
        return matrix
    reason = declines(matrix)
    if reason is not None:
        raise ValueError(f"newton_schulz has no fused form here: {reason}; use form='parallel'")
    y: Tensor = _NewtonSchulz.apply(matrix, steps, name, eps)
    return y


def declines(matrix: Tensor) -> str | None:
    """Why the kernels do not take this matrix [..., O, I]; None: they do."""
    if matrix.dtype not in (torch.float32, *HALVES):
        return f"matrix is {matrix.dtype}, kernels take fp32, bf16 and fp16"
    if matrix.dtype == torch.bfloat16 and interpreted():
        return "matrix is bf16, and Triton's interpreter has no bf16 products"
    if matrix.ndim < 2 or not matrix.numel():
        return f"matrix has shape {list(matrix.shape)}, wanted [..., O, I] with entries"
    short, long = sorted(matrix.shape[-2:])
    if short > SHORT or long > LONG:
        return (
            f"matrix is {matrix.shape[-2]} x {matrix.shape[-1]}, kernels hold at most {SHORT} on the "
            f"short side and {LONG} on the long one"
        )
    if matrix.is_cuda and _shared_memory(matrix.device) < SHARED:
        return f"kernels take blocks of {SHARED} bytes of shared memory, and this device has less"
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
        return backward(matrix, grad, *ctx.polynomial), None, None, None


def _forward(
    matrix: Tensor, steps: int, name: str, eps: float, config: Config | None = None
) -> Tensor:
    """X after all steps, [..., O, I]. config: one of CONFIGS; None: by size and dtype."""
    from atlas_lm.ops.newton_schulz import kernels

    s = _flat(matrix)
    out = torch.empty_like(s, memory_format=torch.contiguous_format)
    config = config or _choose(s)
    kernel = kernels.forward_whole if config.whole else kernels.forward_tiled
    with torch.cuda.device_of(s):
        kernel[(len(s),)](
            s, out, _coefficients(name, steps, s.device), eps, steps,
            **_sizes(s, config), S_TURNED=_turned(s), OUT_TURNED=_turned(out),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out.view(matrix.shape)


def backward(
    matrix: Tensor, grad: Tensor, steps: int, name: str, eps: float, config: Config | None = None
) -> Tensor:
    """The gradient of the matrix, [..., O, I], from that of the result.

    As many programs as run at once walk over the matrices, each with scratch of its own: X_k [steps, o, i],
    A_k and P_k [steps, 2, o, o] as operands, and for tiles G [o, i] in fp32.
    """
    from atlas_lm.ops.newton_schulz import kernels

    s, dy = _flat(matrix), _flat(grad)
    ds = torch.empty_like(s, memory_format=torch.contiguous_format)
    config = config or _choose(s)
    sizes = _sizes(s, config)
    rows, width = sizes["ROWS"], -(-sizes["I"] // sizes["COLS"]) * sizes["COLS"]
    programs = min(len(s), _programs(s.device, config))
    xs = s.new_empty(programs, steps, rows, width)
    squares = s.new_empty(programs, steps, 2, rows, rows)
    gs = s.new_empty(1 if config.whole else programs * rows * width, dtype=torch.float32)
    kernel = kernels.backward_whole if config.whole else kernels.backward_tiled
    with torch.cuda.device_of(s):
        kernel[(programs,)](
            s, dy, ds, xs, squares, gs, _coefficients(name, steps, s.device), eps, steps, len(s),
            **sizes, S_TURNED=_turned(s), DY_TURNED=_turned(dy), OUT_TURNED=_turned(ds),
            num_warps=config.warps, num_stages=1,
        )  # fmt: skip
    return ds.view(matrix.shape)


def _flat(matrix: Tensor) -> Tensor:
    """[..., O, I] as [N, O, I], dense by rows or by columns; copied only where it is neither."""
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    return flat if flat.is_contiguous() or flat.mT.is_contiguous() else flat.contiguous()


def _turned(flat: Tensor) -> bool:
    """Whether memory runs along the short side first: X [o, i] lies there as [i, o]."""
    _, o, i = flat.shape
    return flat.is_contiguous() == (o > i)


def _choose(flat: Tensor) -> Config:
    """Whole while X and its products fit the registers: 64 x 256 in half precision, 64 x 64 in fp32."""
    short, long = sorted(flat.shape[1:])
    whole = _padded(short) * _padded(long) <= 64 * (256 if flat.dtype in HALVES else 64)
    return CONFIGS[2 * (not whole) + (short > 64)]


def _sizes(flat: Tensor, config: Config) -> dict[str, Any]:
    """The matrix, its padded rows, the columns held at a time, and the precision of products."""
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
    """The next power of two, at least the 16 that products need."""
    return max(16, 1 << (size - 1).bit_length())


def _programs(device: torch.device, config: Config) -> int:
    """How many programs of the backward run at once: registers of a multiprocessor hold eight warps."""
    if device.type != "cuda":  # interpreted or emulated
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * 8 // config.warps


@functools.cache
def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", SHARED))


@functools.cache
def _coefficients(name: str, steps: int, device: torch.device) -> Tensor:
    """[steps, 3] fp32."""
    return torch.tensor(schedule(name, steps), dtype=torch.float32, device=device)
