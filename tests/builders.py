"""Small specs, inputs and gates that the tests share, and one way to compare."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from atlas_lm.doctor.subjects import draw_gates
from atlas_lm.doctor.subjects import small_spec as small_spec
from atlas_lm.memory import MemorySpec, presets

NAMES = tuple(presets.PRESETS)
HEADS, KEY = 2, 4  # of small_spec


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_gates(
    spec: MemorySpec, batch: int, tokens: int, *, dtype=torch.float64, seed: int = 1
) -> dict[str, Tensor]:
    """Legal gates well inside their range, by name."""
    return draw_gates(spec, batch, tokens, seeded(seed), dtype)


def random_inputs(
    spec: MemorySpec, batch: int, tokens: int, *, dtype=torch.float64, seed: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as `memorize` takes them."""
    generator = seeded(seed)
    q, k, v = (
        torch.randn(batch, tokens, spec.heads, width, generator=generator, dtype=dtype)
        for width in (spec.key_dim, spec.key_dim, spec.value_dim)
    )
    return q, k, v


def random_weights(
    spec: MemorySpec, *, dtype=torch.float64, seed: int = 3, jitter: float = 0.1
) -> dict[str, Tensor]:
    """Initial weights, the fast ones jittered so that no memory starts at exactly zero."""
    generator, weights = seeded(seed), {}
    for name, weight in spec.init_weights(seed).items():
        noise = torch.randn(weight.shape, generator=generator, dtype=dtype)
        weights[name] = weight.to(dtype) + (jitter * noise if name.startswith("memory.") else 0)
    return weights


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def leaves(tensors: Mapping[str, Tensor], frozen: Iterable[str] = ()) -> dict[str, Tensor]:
    """Fresh copies that collect gradients, but for the frozen ones."""
    return {n: x.clone() if n in frozen else leaf(x) for n, x in tensors.items()}


def wave(y: Tensor) -> Tensor:
    """A scalar in which every entry of y counts differently."""
    return (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).cos().view_as(y)).sum()


def gradients(loss: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """d loss / d input by name, over the inputs that collect gradients."""
    wanted = {n: x for n, x in inputs.items() if x.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        n: torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(wanted.items(), grads, strict=True)
    }


def assert_close(name: str, got: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    """Largest difference, relative to the largest wanted entry (or absolute, below one)."""
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, wanted {wanted.shape}"
    if not got.numel():
        return
    scale = max(1.0, wanted.detach().abs().max().item())
    error = (got.detach() - wanted.detach()).abs().max().item() / scale
    assert error <= tolerance, f"{name}: off by {error:.2e}, allowed {tolerance:.0e}"


def assert_all_close(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-10
) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert_close(name, got[name], wanted[name], tolerance)


def assert_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert bool(tensor.isfinite().all()), f"{name} holds NaN or infinity"
