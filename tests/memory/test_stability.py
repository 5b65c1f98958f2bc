"""Through 64 chunks at default gates every preset keeps finite gradients and stays alive."""

import pytest
import torch

from atlas_lm.memory import memorize, presets
from atlas_lm.memory.defaults import default_gates, gate_defaults

SIZE, CHUNKS = 16, 64


def stream(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs of a stream of random tokens, and gradients of the loss on its last chunk."""
    torch.manual_seed(0)
    spec = presets.build(name, heads=1, key_dim=SIZE, value_dim=SIZE)
    tokens = CHUNKS * max(spec.timing.chunk, 16)
    weights = {n: w.requires_grad_() for n, w in spec.init_weights().items()}
    x = {n: torch.randn(1, tokens, 1, SIZE).requires_grad_() for n in "qkv"}
    gates = {n: g.requires_grad_() for n, g in default_gates(spec, 1, tokens).items()}
    y, _ = memorize(spec, weights, None, x["q"], x["k"], x["v"], gates, form="parallel")
    leaves = x | gates | weights
    loss = y[:, -max(spec.timing.chunk, 16) :].square().mean()
    found = torch.autograd.grad(loss / loss.detach(), list(leaves.values()))
    return y.detach(), dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_gradients_through_64_chunks_are_finite_and_the_memory_is_alive(name: str) -> None:
    y, gradients = stream(name)
    assert y.isfinite().all()
    for leaf, gradient in gradients.items():
        assert gradient.isfinite().all(), leaf
        # of the logarithm of the loss: a gate that acts on all tokens at once may count a few thousand
        assert gradient.abs().max() < 1e4, (leaf, gradient.abs().max())
    first, last = y[:, :64].std(), y[:, -64:].std()
    assert last > 0.01 * first, "the memory has died"


def test_defaults_are_inside_the_range_of_their_gates() -> None:
    for name in presets.PRESETS:
        spec = presets.build(name, heads=1, key_dim=SIZE, value_dim=SIZE)
        for gate, value in gate_defaults(spec).items():
            assert spec.gates[gate].low <= value <= spec.gates[gate].high


def test_a_truncated_momentum_gives_the_same_values_and_other_gradients() -> None:
    spec = presets.build("titans", heads=1, key_dim=8, value_dim=8, chunk=4)
    cut = spec.replace(optimizer=type(spec.optimizer)(truncate=True))
    weights = {n: w.double() for n, w in spec.init_weights().items()}
    gates = default_gates(spec, 1, 16, dtype=torch.float64)
    k = torch.randn(1, 16, 1, 8, dtype=torch.float64, requires_grad=True)
    results = {}
    for label, one, form in [
        ("whole", spec, "parallel"),
        ("cut", cut, "parallel"),
        ("cut token by token", cut, "reference"),
    ]:
        y, _ = memorize(one, weights, None, k, k, k.detach(), gates, form=form)
        results[label] = (y, torch.autograd.grad(y[:, -1].sum(), k)[0])
    assert torch.equal(results["whole"][0], results["cut"][0])
    assert not torch.allclose(results["whole"][1], results["cut"][1])
    assert torch.allclose(results["cut token by token"][1], results["cut"][1], atol=1e-13)
