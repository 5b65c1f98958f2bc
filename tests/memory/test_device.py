"""The same numbers on a GPU: every preset against the CPU in fp64, and half-precision inputs."""

import pytest
import torch

from atlas_lm.memory import memorize, presets
from atlas_lm.memory.defaults import default_gates
from tests.builders import (
    NAMES,
    assert_all_close,
    gradients,
    leaves,
    random_gates,
    random_inputs,
    random_weights,
    small_spec,
    wave,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(name: str, device: str, form: str) -> dict[str, torch.Tensor]:
    """Outputs, state and every gradient of a masked stream in two pieces."""
    spec, tokens = small_spec(name), 23
    q, k, v = random_inputs(spec, 2, tokens)
    inputs = dict(q=q, k=k, v=v) | random_gates(spec, 2, tokens)
    x = leaves({n: t.to(device) for n, t in inputs.items()})
    weights = leaves(
        {n: w.to(device) for n, w in random_weights(spec).items()}, spec.frozen_weights
    )
    valid = (torch.rand(2, tokens, generator=torch.Generator().manual_seed(5)) > 0.2).to(device)
    state, outputs = None, []
    for piece in (slice(0, 9), slice(9, tokens)):
        gates = {n: x[n][:, piece] for n in spec.gates}
        y, state = memorize(
            spec,
            weights,
            state,
            *(x[n][:, piece] for n in "qkv"),
            gates,
            valid=valid[:, piece],
            form=form,
        )
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    found = (
        {"y": y}
        | {n: t.double() for n, t in state.leaves().items()}
        | gradients(wave(y.cpu()), x | weights)
    )
    return {n: t.detach().cpu() for n, t in found.items()}


@pytest.mark.parametrize("form", ["parallel", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_gpu_equals_cpu(name: str, form: str) -> None:
    assert_all_close(run(name, "cuda", form), run(name, "cpu", form), tolerance=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_inputs_at_real_sizes(name: str, dtype: torch.dtype) -> None:
    spec = presets.build(name, heads=4, key_dim=64, value_dim=64)
    weights = {n: w.cuda().requires_grad_() for n, w in spec.init_weights().items()}
    q, k, v = (
        torch.randn(2, 300, 4, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gates = default_gates(spec, 2, 300, dtype=dtype, device="cuda")
    y, state = memorize(spec, weights, None, q, k, v, gates)
    y.float().square().mean().backward()
    assert y.dtype == dtype and y.isfinite().all()
    assert all(t.dtype == torch.float32 for n, t in state.leaves().items() if n != "position")
    assert all(x.grad is None or x.grad.isfinite().all() for x in (q, k, v, *weights.values()))
