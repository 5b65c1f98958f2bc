"""Streams written token by token in single launches: the reference's outputs and states."""

import pytest
import torch
from torch import Tensor

from atlas_lm.memory import MemorySpec, MemoryState, initial_state, memorize, step
from atlas_lm.memory.architectures import MLP, GatedMLP, Matrix
from atlas_lm.memory.features import Polynomial, Unit
from atlas_lm.memory.gates import head_major
from atlas_lm.memory.objectives import Dot, Huber
from atlas_lm.memory.optimizers import Descent, ImplicitDescent, Momentum
from atlas_lm.memory.retention import Decay, DecayToStart, Keep
from atlas_lm.memory.spec import Timing
from atlas_lm.memory.tokens import Tokens
from atlas_lm.memory.windows import Window
from tests.builders import (
    assert_all_close,
    assert_close,
    random_gates,
    random_inputs,
    random_weights,
    seeded,
    small_spec,
)

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ONLINE, AFTER, CHUNKED = Timing(), Timing(after_retention=True), Timing(chunk=8)
OFFSET, PAIR, FIXED = (Window(size=4, gate=gate) for gate in ("offset", "pair", "fixed"))
RULES = {  # every value of every axis, and every pair of them that share a line of a kernel
    "matrix online": dict(architecture=Matrix(), retention=Keep(), timing=ONLINE),
    "matrix after": dict(architecture=Matrix(), retention=Decay(), timing=AFTER),
    "matrix implicit": dict(architecture=Matrix(), optimizer=ImplicitDescent(), timing=ONLINE),
    "matrix window": dict(
        architecture=Matrix(), window=OFFSET, optimizer=Momentum(), timing=ONLINE
    ),
    "matrix pairs": dict(
        architecture=Matrix(), window=PAIR, retention=DecayToStart(), timing=AFTER
    ),
    "matrix chunked": dict(
        architecture=Matrix(skip=True),
        window=FIXED,
        optimizer=Momentum(),
        retention=Decay(),
        timing=CHUNKED,
    ),
    "matrix dot": dict(
        architecture=Matrix(),
        objective=Dot(),
        optimizer=Descent(step=1.0),
        window=OFFSET,
        timing=CHUNKED,
    ),
    "matrix features": dict(
        architecture=Matrix(),
        features=Polynomial(degree=2, project=3),
        retention=Decay(),
        timing=CHUNKED,
    ),
    "mlp titans": dict(
        architecture=MLP(), optimizer=Momentum(), retention=DecayToStart(), timing=CHUNKED
    ),
    "mlp window": dict(architecture=MLP(), window=OFFSET, retention=Decay(), timing=CHUNKED),
    "mlp pairs": dict(
        architecture=MLP(skip=False), window=PAIR, optimizer=Momentum(), timing=CHUNKED
    ),
    "mlp online": dict(
        architecture=MLP(activation="silu"), window=FIXED, retention=DecayToStart(), timing=AFTER
    ),
    "mlp online momentum": dict(
        architecture=MLP(), optimizer=Momentum(), retention=Decay(), timing=ONLINE
    ),
    "mlp huber": dict(architecture=MLP(), objective=Huber(), window=PAIR, timing=CHUNKED),
    "mlp features": dict(
        architecture=MLP(), features=Polynomial(degree=2, project=3), window=OFFSET, timing=CHUNKED
    ),
    "gated chunked": dict(
        architecture=GatedMLP(),
        window=OFFSET,
        optimizer=Momentum(),
        retention=DecayToStart(),
        timing=CHUNKED,
    ),
    "gated online": dict(
        architecture=GatedMLP(activation="silu", skip=False), retention=Decay(), timing=AFTER
    ),
    "gated dot": dict(architecture=GatedMLP(), objective=Dot(), window=FIXED, timing=CHUNKED),
}


def made(parts: dict, heads: int = 1) -> MemorySpec:
    return MemorySpec(heads=heads, key_dim=4, value_dim=4, **({"features": Unit()} | parts))


def at(t: int, q: Tensor, k: Tensor, v: Tensor, gates: dict, valid: Tensor | None = None) -> Tokens:
    """Token t of a stretch, head-major."""

    def one(x: Tensor) -> Tensor:
        return head_major(x[:, t : t + 1])

    valid = None if valid is None else valid[:, t : t + 1]
    return Tokens(one(q), one(k), one(v), {n: one(g) for n, g in gates.items()}, valid)


def stepped(
    spec: MemorySpec, weights: dict, state: MemoryState, stretch: tuple, valid: Tensor | None = None
) -> tuple[Tensor, MemoryState]:
    """A stretch token by token: y [B, T, H, V] and the state."""
    outputs = []
    for t in range(stretch[0].shape[1]):
        tokens = at(t, *stretch, valid)
        assert step.declines(spec, weights, state, tokens) is None
        y, state = step.run(spec, weights, state, tokens)
        outputs.append(y)
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def single(tensors):
    if isinstance(tensors, dict):
        return {n: single(x) for n, x in tensors.items()}
    if isinstance(tensors, tuple):
        return tuple(map(single, tensors))
    return tensors.float().to(DEVICE)


@pytest.mark.parametrize("name", RULES)
def test_a_stream_of_steps_is_that_of_the_reference(name: str) -> None:
    """Rows lose tokens to padding, so that they stand at different places of their chunks."""
    spec, tokens = made(RULES[name]), 19
    weights, gates = random_weights(spec), random_gates(spec, 2, tokens)
    stretch = (*random_inputs(spec, 2, tokens), gates)
    valid = torch.rand(2, tokens, generator=seeded(5)) > torch.tensor([[0.0], [0.3]])
    wanted, truth = memorize(spec, weights, None, *stretch, valid=valid, form="reference")
    mine = single(weights)
    y, state = stepped(spec, mine, initial_state(spec, mine, 2), single(stretch), valid.to(DEVICE))
    assert_close("y", y.cpu().double(), wanted, 1e-5)
    leaves = {n: x.cpu().to(truth.leaves()[n]) for n, x in state.leaves().items()}
    assert_all_close(leaves, truth.leaves(), 1e-5)


def test_heads_and_rows_do_not_meet() -> None:
    spec = made(RULES["mlp window"], heads=2)
    weights = random_weights(spec, dtype=torch.float32)
    weights = single(weights)
    stretch = single((*random_inputs(spec, 3, 2), random_gates(spec, 3, 2)))
    state = initial_state(spec, weights, 3)
    y, after = stepped(spec, weights, state, stretch)
    other = [torch.cat([x[:1], 2 * x[1:]]) for x in stretch[:3]]
    z, apart = stepped(spec, weights, state, (*other, stretch[3]))
    assert torch.equal(y[0], z[0])
    assert torch.equal(after.memory["w0"][0], apart.memory["w0"][0])


def test_two_states_take_turns() -> None:
    spec = made(RULES["mlp titans"])
    weights = single(random_weights(spec))
    stretch = single((*random_inputs(spec, 2, 11), random_gates(spec, 2, 11)))
    state = initial_state(spec, weights, 2)
    wanted, truth = stepped(spec, weights, state, stretch)
    here, outputs = state.clone(), []
    there = step.twin(here)
    for t in range(11):
        y, after = step.run(spec, weights, here, at(t, *stretch), into=there)
        assert after is there
        here, there = there, here
        outputs.append(y)
    assert torch.equal(torch.cat(outputs, dim=2).transpose(1, 2), wanted)
    for name, tensor in truth.leaves().items():
        assert torch.equal(here.leaves()[name], tensor), name


def test_what_is_declined_says_why() -> None:
    def reason(spec: MemorySpec, tokens: int = 1, dtype=torch.float32, **options) -> str:
        weights, gates = (
            random_weights(spec, dtype=dtype),
            random_gates(spec, 2, tokens, dtype=dtype),
        )
        q, k, v = random_inputs(spec, 2, tokens, dtype=dtype)
        major = {n: head_major(g) for n, g in gates.items()}
        given = Tokens(head_major(q), head_major(k), head_major(v), major, None)
        state = initial_state(spec, weights, 2, dtype=dtype)
        if options.pop("grad", False):
            weights = {n: w.requires_grad_() for n, w in weights.items()}
        return step.declines(spec, weights, state, given, **options) or ""

    titans = made(RULES["mlp titans"])
    if not GPU:
        assert not reason(titans)
        assert "backward" in reason(titans, grad=True)
        with torch.no_grad():
            assert not reason(titans, grad=True)
        assert "Newton-Schulz" in reason(small_spec("atlas"))
        assert "norm" in reason(small_spec("ttt_mlp"))
        assert "kept pairs" in reason(small_spec("dot_pairs"))
        assert "Huber" in reason(made(dict(architecture=Matrix(), objective=Huber())))
        assert "depth" in reason(made(dict(architecture=MLP(depth=3), timing=CHUNKED)))
        assert "window of 65" in reason(made(dict(window=Window(size=65))))
    assert "one token" in reason(titans, tokens=2)
    assert "trace" in reason(titans, trace=True)
    assert "fp64" in reason(titans, dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["titans", "omeganet", "titans_atlas", "gated_deltanet", "swla"])
def test_a_hundred_steps_are_the_parallel_form(name: str) -> None:
    from atlas_lm.memory import presets
    from atlas_lm.memory.defaults import default_gates

    torch.manual_seed(0)
    spec = presets.build(name, heads=4, key_dim=64, value_dim=64)
    weights = {n: w.cuda() for n, w in spec.init_weights().items()}
    q, k, v = (torch.randn(3, 100, 4, 64, device="cuda").bfloat16() for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    gates = default_gates(spec, 3, 100, device="cuda")
    stretch = (q.float(), k.float(), v.float(), gates)
    exact = [{n: x.double() for n, x in weights.items()}, None, *(x.double() for x in stretch[:3])]
    exact.append({n: x.double() for n, x in gates.items()})
    truth, _ = memorize(spec, *exact, form="parallel")
    plain, _ = memorize(spec, weights, None, *stretch, form="parallel")
    y, state = stepped(spec, weights, initial_state(spec, weights, 3), stretch)
    error, allowed = ((x.double() - truth).norm() / truth.norm() for x in (y, plain))
    assert error <= max(2 * allowed, 1e-5), (error, allowed)
    assert state.position.tolist() == [100] * 3
