"""What the doors promise beyond the laws: `recall` reads what was written, `trace` tells the truth."""

import logging

import pytest
import torch

from atlas_lm.memory import memorize, presets, recall
from atlas_lm.ops.backend import SAID
from tests.builders import (
    NAMES,
    assert_close,
    random_gates,
    random_inputs,
    random_weights,
    small_spec,
)

TOKENS = 17


def stream(name: str, form: str, **options):
    spec = small_spec(name)
    q, k, v = random_inputs(spec, 2, TOKENS)
    gates = random_gates(spec, 2, TOKENS)
    return memorize(spec, random_weights(spec), None, q, k, v, gates, form=form, **options)


@pytest.mark.parametrize("name", NAMES)
def test_recall_is_the_read_after_the_last_write_and_changes_nothing(name: str) -> None:
    spec = small_spec(name)
    y, state = stream(name, "parallel")
    q, _, _ = random_inputs(spec, 2, TOKENS)
    before = state.clone()
    answers = recall(spec, random_weights(spec), state, q)
    assert_close("last", answers[:, -1], y[:, -1], 1e-12)
    assert (answers[:, 0] - y[:, 0]).abs().max() > 1e-6, "earlier reads saw an earlier memory"
    for leaf, tensor in state.leaves().items():
        assert torch.equal(tensor, before.leaves()[leaf])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_both_forms_tell_the_same(name: str, masked: bool) -> None:
    valid = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.3
    options = dict(trace=True, valid=valid if masked else None)
    _, _, got = stream(name, "parallel", **options)
    _, _, wanted = stream(name, "reference", **options)
    assert_close("surprise", got.surprise, wanted.surprise, 1e-9)
    assert_close("memory", got.memory_norm, wanted.memory_norm, 1e-9)
    assert (got.momentum_norm is None) == (wanted.momentum_norm is None)
    if got.momentum_norm is not None:
        assert_close("momentum", got.momentum_norm, wanted.momentum_norm, 1e-9)
    if masked:
        assert not got.surprise[~valid].any() and not got.memory_norm[~valid].any()


def test_surprise_is_the_size_of_the_gradient() -> None:
    """Delta rule: |G_t| = |M_{t-1} k_t - v_t| |k_t|, and the step is read back from the gates."""
    spec = presets.build("deltanet", heads=1, key_dim=4, value_dim=4)
    k, v = torch.randn(2, 1, 6, 1, 4, dtype=torch.float64).unbind()
    eta = torch.rand(1, 6, 1, dtype=torch.float64)
    weights = {n: w.double() for n, w in spec.init_weights().items()}
    _, state, trace = memorize(spec, weights, None, k, k, v, {"eta": eta}, trace=True)
    memory, unit = torch.zeros(4, 4, dtype=torch.float64), torch.nn.functional.normalize(k, dim=-1)
    for t in range(6):
        error = memory @ unit[0, t, 0] - v[0, t, 0]
        assert_close("surprise", trace.surprise[0, t, 0], error.norm(), 1e-12)
        memory = memory - eta[0, t, 0] * torch.outer(error, unit[0, t, 0])
        assert_close("size", trace.memory_norm[0, t, 0], memory.norm(), 1e-12)
    assert torch.equal(trace.gates["eta"], eta)
    assert_close("memory", state.memory["w0"][0, 0], memory, 1e-12)


def test_a_packed_trace_comes_back_in_the_packed_order() -> None:
    spec = small_spec("titans")
    weights = random_weights(spec)
    q, k, v = random_inputs(spec, 1, TOKENS)
    gates = random_gates(spec, 1, TOKENS)
    borders = torch.tensor([0, 5, TOKENS])
    _, _, packed = memorize(spec, weights, None, q, k, v, gates, cu_seqlens=borders, trace=True)
    second = {n: g[:, 5:] for n, g in gates.items()}
    _, _, alone = memorize(spec, weights, None, q[:, 5:], k[:, 5:], v[:, 5:], second, trace=True)
    assert packed.surprise.shape == (1, TOKENS, spec.heads)
    assert_close("surprise", packed.surprise[:, 5:], alone.surprise, 1e-12)
    assert_close("alpha", packed.gates["alpha"], gates["log_alpha"].exp(), 1e-12)


def test_a_declined_form_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    SAID.clear()
    spec = presets.build("yaad", heads=1, key_dim=4, value_dim=4, chunk=1)
    q, k, v = random_inputs(spec, 1, 3)
    gates = random_gates(spec, 1, 3)
    with caplog.at_level(logging.WARNING, logger="atlas_lm"):
        for _ in range(2):
            memorize(spec, random_weights(spec), None, q, k, v, gates)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "token by token" in said[0] and "not linear" in said[0]
