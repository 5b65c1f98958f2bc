"""How far kernels in bf16 are from fp64, in errors of `memorize`'s parallel form, which lifts bf16 to fp32.

    python -m benchmarks.rounding

Outputs, the final memory and every gradient, 4 heads of 64, 300 tokens of two rows, chunk 64. The bound that
kernels are held to is another one, each op's own parallel form (docs/kernels.md, section 2).
"""

import torch
from torch import Tensor

from atlas_lm import memorize, presets
from atlas_lm.memory.architectures import Matrix
from atlas_lm.memory.features import Polynomial
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.windows import Window

ANCHORED = dict(architecture=Matrix(), chunk=64)
WINDOW = dict(features=Polynomial(degree=2, project=16), window=Window(size=16, gate="offset"))
RULES = {
    "titans": ANCHORED,
    "gated_deltanet": {},
    "omeganet": ANCHORED | WINDOW,
    "titans_atlas": ANCHORED | WINDOW,
}
BATCH, TOKENS, HEADS, WIDTH = 2, 300, 4, 64


def draw(spec: MemorySpec) -> dict[str, Tensor]:
    """q, k, v and gates, exact in bf16."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    rows = (BATCH, TOKENS, HEADS)
    made = {n: torch.randn(*rows, WIDTH, generator=generator, dtype=torch.float64) for n in "qkv"}
    ranges = {"eta": (0.0, 0.02), "log_alpha": (-0.05, 0.0), "theta": (0.5, 0.95), "gamma": (0, 1)}
    for name, gate in spec.gates.items():
        shape = (*rows, gate.offsets) if gate.offsets else rows
        made[name] = uniform(*ranges[name], *shape) / max(gate.offsets, 1)
    return {n: x.bfloat16().double() for n, x in made.items()}


def results(
    spec: MemorySpec,
    inputs: dict[str, Tensor],
    weights: dict[str, Tensor],
    form: str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Outputs by name, and gradients of a fixed sum of them."""
    wide = torch.promote_types(dtype, torch.float32)
    given = {n: x.to("cuda", dtype if n in "qkv" else wide) for n, x in inputs.items()}
    fast = {n: w.to("cuda", wide) for n, w in weights.items()}
    moving = given | {n: w for n, w in fast.items() if n not in spec.frozen_weights}
    for x in moving.values():
        x.requires_grad_()
    q, k, v, *_ = given.values()
    y, state = memorize(spec, fast, None, q, k, v, {n: given[n] for n in spec.gates}, form=form)
    found = {"y": y} | {f"end {n}": x for n, x in state.memory.items()}
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(x.shape, generator=generator).to(x) for x in found.values()]
    gradients = torch.autograd.grad(
        list(found.values()), list(moving.values()), slopes, allow_unused=True
    )
    found |= {f"slope of {n}": g for n, g in zip(moving, gradients, strict=True) if g is not None}
    return {n: x.detach().double() for n, x in found.items()}


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("kernels in bf16 run on a CUDA GPU, and there is none here")
    for name, parts in RULES.items():
        spec = presets.build(name, heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, **parts)
        inputs, weights = draw(spec), spec.init_weights()
        truth = results(spec, inputs, weights, "parallel", torch.float64)
        plain, fused = (
            results(spec, inputs, weights, form, torch.bfloat16) for form in ("parallel", "fused")
        )
        print(name)
        for what, wanted in truth.items():
            off, allowed = (
                ((x[what] - wanted).norm() / wanted.norm()).item() for x in (fused, plain)
            )
            print(f"  {what:30} {off:.1e}, parallel {allowed:.1e}: {off / allowed:.1f} times")


if __name__ == "__main__":
    main()
