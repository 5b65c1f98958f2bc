"""Each part alone: slopes against autograd and finite differences, and the two ways in which
a part says its rule against each other."""

import pytest
import torch

from atlas_lm.memory import memorize
from atlas_lm.memory.architectures import MLP, GatedMLP, Matrix, dense
from atlas_lm.memory.basis import DENSE, MEMORY, MOMENTUM, START
from atlas_lm.memory.objectives import L2, Dot, Huber
from atlas_lm.memory.optimizers import Descent, ImplicitDescent, Momentum, Muon
from atlas_lm.memory.retention import Decay, DecayToStart, Keep, Renormalise
from atlas_lm.memory.windows import Window
from tests.builders import (
    assert_all_close,
    assert_close,
    assert_finite,
    gradients,
    leaf,
    leaves,
    random_gates,
    random_inputs,
    random_weights,
    seeded,
    small_spec,
    wave,
)

ARCHITECTURES = {
    "matrix": Matrix(),
    "matrix, norm": Matrix(norm=True),
    "one layer": MLP(depth=1),
    "two layers, gelu": MLP(expansion=2),
    "two layers, silu": MLP(expansion=2, activation="silu"),
    "two layers, no skip": MLP(expansion=2, skip=False),
    "two layers, norm": MLP(expansion=2, norm=True),
    "three layers, gelu": MLP(depth=3, expansion=2),
    "three layers, silu, norm": MLP(depth=3, expansion=2, activation="silu", norm=True),
    "gated, gelu": GatedMLP(expansion=2),
    "gated, silu, no skip": GatedMLP(expansion=2, activation="silu", skip=False),
    "gated, norm": GatedMLP(expansion=2, norm=True),
}
OBJECTIVES = {"l2": L2(), "dot": Dot(), "huber": Huber(), "huber, fixed": Huber(delta=0.8)}
BATCH, HEADS, PAIRS, WIDTH = 2, 2, 5, 3


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


class Problem:
    """One memory, a few pairs, and the summed loss of an objective over them."""

    def __init__(self, architecture, objective, features=WIDTH, values=WIDTH):
        self.architecture, self.objective = architecture, objective
        shapes = architecture.shapes(features, values)
        self.memory = {
            n: draw(BATCH, HEADS, *shape, seed=i) for i, (n, shape) in enumerate(shapes.items())
        }
        self.weights = {
            "architecture.norm_weight": 1 + 0.3 * draw(HEADS, values, seed=20),
            "architecture.norm_bias": draw(HEADS, values, seed=21),
        }
        self.x = draw(BATCH, HEADS, PAIRS, features, seed=22)
        self.v = 2 * draw(BATCH, HEADS, PAIRS, values, seed=23)
        self.gates = {"delta": 0.3 + 2 * draw(BATCH, HEADS, PAIRS, seed=24).abs()}

    def loss(self, memory):
        prediction, _ = self.architecture.predict(dense(memory), self.x, self.weights)
        return self.objective.value(prediction, self.v, self.gates).sum()

    def slopes(self, memory):
        prediction, tape = self.architecture.predict(dense(memory), self.x, self.weights)
        error = self.objective.slope(prediction, self.v, self.gates)
        factors = self.architecture.slopes(memory, tape, error, self.weights)
        return {n: left.mT @ right for n, (left, right) in factors.items()}


def finite_differences(function, tensors, step=1e-6):
    """Central differences of a scalar, entry by entry."""
    result = {}
    for name, tensor in tensors.items():
        slope = torch.zeros_like(tensor)
        for i in range(tensor.numel()):
            bump = torch.zeros_like(tensor)
            bump.view(-1)[i] = step
            up, down = (function(tensors | {name: tensor + s * bump}) for s in (1, -1))
            slope.view(-1)[i] = (up - down) / (2 * step)
        result[name] = slope
    return result


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slopes_match_autograd_and_finite_differences(architecture, objective):
    problem = Problem(ARCHITECTURES[architecture], OBJECTIVES[objective])
    memory = leaves(problem.memory)
    explicit = problem.slopes(problem.memory)
    assert_all_close(explicit, gradients(problem.loss(memory), memory), 1e-12)
    assert_all_close(explicit, finite_differences(problem.loss, problem.memory), 1e-6)


@pytest.mark.parametrize("architecture", [Matrix(), MLP(depth=3), GatedMLP()])
def test_slopes_match_autograd_without_room_for_a_skip(architecture):
    problem = Problem(architecture, L2(), features=5, values=2)
    memory = leaves(problem.memory)
    assert_all_close(problem.slopes(problem.memory), gradients(problem.loss(memory), memory), 1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slopes_of_slopes_match_autograd(architecture):
    """The outer gradient runs through the explicit slopes: their derivative must be right too."""
    problem = Problem(ARCHITECTURES[architecture], L2())
    one, two = leaves(problem.memory), leaves(problem.memory)
    explicit = sum(wave(slope) for slope in problem.slopes(one).values())
    inner = torch.autograd.grad(problem.loss(two), list(two.values()), create_graph=True)
    order = dict(zip(two, inner, strict=True))
    automatic = sum(wave(order[n]) for n in problem.slopes(problem.memory))
    assert_all_close(gradients(explicit, one), gradients(automatic, two), 1e-11)


@pytest.mark.parametrize("architecture", ["two layers, gelu", "gated, gelu"])
def test_skip_adds_the_input(architecture):
    problem = Problem(ARCHITECTURES[architecture], L2())
    zero = {n: torch.zeros_like(m) for n, m in problem.memory.items()}
    prediction, _ = problem.architecture.predict(dense(zero), problem.x, problem.weights)
    assert torch.equal(prediction, problem.x)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_slope_is_the_derivative_of_its_value(objective):
    objective = OBJECTIVES[objective]
    p, v, gates = draw(2, 3, 7, 4), draw(2, 3, 7, 4, seed=1), {"delta": draw(2, 3, 7).abs() + 0.1}
    point = leaf(p)
    slope = objective.slope(p, v, gates)
    automatic = gradients(objective.value(point, v, gates).sum(), {"p": point})["p"]
    assert_close("slope", slope, automatic, 1e-13)
    differences = finite_differences(lambda t: objective.value(t["p"], v, gates).sum(), {"p": p})
    assert_close("slope", slope, differences["p"], 1e-6)


def along_a_ray(lengths):
    """Errors of given lengths in one direction, against v = 0."""
    direction = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    return torch.as_tensor(lengths, dtype=torch.float64).unsqueeze(-1) * direction


def test_huber_is_continuous_at_delta():
    p = along_a_ray([0.7 - 1e-9, 0.7, 0.7 + 1e-9])
    huber, v = Huber(delta=0.7), torch.zeros(3, dtype=torch.float64)
    for of in (huber.slope, huber.value):
        below, at, above = of(p, v, {})
        assert_close("below", below, at, 2e-9)
        assert_close("above", above, at, 2e-9)


def test_huber_slope_is_clipped_to_delta_and_never_grows():
    p, v = along_a_ray(torch.linspace(0, 5, 101)), torch.zeros(3, dtype=torch.float64)
    slope = Huber(delta=0.7).slope(p, v, {})
    assert_close("length", slope.norm(dim=-1), p.norm(dim=-1).clamp_max(0.7), 1e-12)
    assert_close(
        "direction", slope * p.norm(dim=-1, keepdim=True), p * slope.norm(dim=-1, keepdim=True)
    )


@pytest.mark.parametrize("delta", [0.7, 0.0])
def test_huber_at_zero_error_is_zero_with_a_finite_gradient(delta):
    p = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    gates = {"delta": torch.full((2,), delta, dtype=torch.float64, requires_grad=True)}
    v = torch.zeros(2, 3, dtype=torch.float64)
    slope, value = Huber().slope(p, v, gates), Huber().value(p, v, gates)
    assert torch.equal(slope, torch.zeros_like(slope)) and torch.equal(
        value, torch.zeros_like(value)
    )
    assert_finite(gradients(slope.sum() + value.sum(), {"p": p} | gates))


GATES_OF_WINDOWS = ("offset", "pair", "fixed")


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("gate", GATES_OF_WINDOWS)
def test_window_weights_agree_token_by_token_and_as_a_matrix(gate, size):
    window, tokens, halo = Window(size=size, gate=gate), 7, size - 1
    columns = tokens + halo
    gates = {"gamma": torch.rand(2, 3, tokens, size, generator=seeded(0))}
    pairs = {
        "gamma": torch.rand(2, 3, columns, generator=seeded(1)),
        "v": torch.ones(2, 3, columns, 4),
    }
    present = torch.rand(2, columns, generator=seeded(2)) > 0.3
    matrix = window.weight_matrix(gates, pairs, present.unsqueeze(1).expand(-1, tokens, -1))
    assert matrix.shape == (2, 3, tokens, columns)
    for t in range(tokens):
        here = slice(t, t + size)
        row = window.weights_at(
            {"gamma": gates["gamma"][:, :, t]},
            {n: p[:, :, here] for n, p in pairs.items()},
            present[:, here],
        )
        wanted = torch.zeros(2, 3, columns)
        wanted[:, :, here] = row
        assert torch.equal(matrix[:, :, t], wanted)


def test_window_gates_mean_what_they_say():
    """Offset j weighs the pair j tokens back; a pair's gate stays with it; fixed is 1/size."""
    v = torch.ones(1, 1, 3, 2)
    here = torch.ones(1, 3, dtype=torch.bool)
    gamma = torch.tensor([[[0.1, 0.2, 0.3]]])
    got = Window(size=3, gate="offset").weights_at({"gamma": gamma}, {"v": v}, here)
    assert_close("offset", got, gamma.flip(-1))
    got = Window(size=3, gate="pair").weights_at({}, {"gamma": gamma, "v": v}, here)
    assert_close("pair", got, gamma)
    got = Window(size=3).weights_at({}, {"v": v}, here)
    assert_close("fixed", got, torch.full((1, 1, 3), 1 / 3), 1e-7)


def along(coefficients, bases):
    """sum_r c[..., t, r] base_r over a list of dense matrices: [..., T, O, I]."""
    return torch.einsum("bhtr,bhroi->bhtoi", coefficients, bases)


def rule(tokens=6, slopes=4):
    """Random dense bases (memory, momentum, start, slopes) and the gates of a stretch."""
    bases = draw(2, 2, DENSE + slopes, 3, 5)
    writes = torch.nn.functional.pad(draw(2, 2, tokens, slopes, seed=1), (DENSE, 0))
    eta, theta = (draw(2, 2, tokens, seed=s).sigmoid() for s in (2, 3))
    return bases, writes, eta, theta, -draw(2, 2, tokens, seed=4).abs()


@pytest.mark.parametrize("part", [Keep(), Decay(), DecayToStart()])
def test_retention_keeps_as_it_unrolls(part):
    bases, steps, _, _, log_alpha = rule()
    if type(part) is Keep:
        log_alpha = torch.zeros_like(log_alpha)  # what the forms hand to a rule without the gate
    path = along(part.unroll(steps, log_alpha), bases)
    memory, start, moves = bases[:, :, MEMORY], bases[:, :, START], along(steps, bases)
    for t in range(steps.shape[2]):
        memory = part.keep(memory, log_alpha[:, :, t, None, None], start) + moves[:, :, t]
        assert_close(f"token {t}", path[:, :, t], memory, 1e-12)


def test_decay_to_start_rests_at_the_start_and_decay_at_zero():
    memory, start = draw(1, 1, 3, 4), draw(1, 1, 3, 4, seed=1)
    log_alpha = torch.full((1, 1, 1, 1), -50.0, dtype=torch.float64)
    assert_close("start", DecayToStart().keep(memory, log_alpha, start), start, 1e-12)
    assert_close("zero", Decay().keep(memory, log_alpha, start), 0 * start, 1e-12)
    assert torch.equal(Keep().keep(memory, log_alpha, start), memory)


@pytest.mark.parametrize("part", [Descent(), Momentum(), Muon(steps=0)])
def test_optimizer_updates_as_it_unrolls(part):
    """Momentum for all, steps for those whose steps are linear."""
    bases, writes, eta, theta, _ = rule()
    momenta, steps = (along(c, bases) for c in part.unroll(writes, eta, theta))
    grads, s = along(writes, bases), bases[:, :, MOMENTUM]
    due = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    for t in range(writes.shape[2]):
        at = eta[:, :, t, None, None], theta[:, :, t, None, None]
        step, s = part.update(grads[:, :, t], s, *at, due)
        if not isinstance(part, Muon):
            assert_close("step", steps[:, :, t], step, 1e-12)
        if part.has_momentum:
            assert_close("momentum", momenta[:, :, t], s, 1e-12)


def test_muon_moves_only_when_due_and_never_stores_the_result():
    part, grad, s = Muon(), draw(2, 1, 3, 4), draw(2, 1, 3, 4, seed=1)
    one = torch.ones(2, 1, 1, 1, dtype=torch.float64)
    due = torch.tensor([True, False])[:, None, None, None]
    step, after = part.update(grad, s, 0.5 * one, 0.9 * one, due)
    assert_close("momentum", after, 0.9 * s + grad, 1e-13)
    assert_close("step", step[0], -0.5 * part.orthogonalise(after)[0], 1e-13)
    assert bool((step[1] == 0).all())


def test_implicit_step_solves_its_own_problem():
    """min |M - M0|^2 + eta |M phi - v|^2: the gradient vanishes after the step."""
    phi, v, before, eta = draw(4), draw(3, seed=1), draw(3, 4, seed=2), torch.tensor(0.7).double()
    rate = ImplicitDescent().rate({"eta": eta}, phi.square().sum())
    after = before - rate * torch.outer(before @ phi - v, phi)
    gradient = (after - before) + eta * torch.outer(after @ phi - v, phi)
    assert_close("gradient", gradient, torch.zeros_like(gradient), 1e-12)


def test_renormalise_returns_rows_to_their_first_length():
    start = draw(1, 2, 3, 4)
    moved = Renormalise().settle(start + draw(1, 2, 3, 4, seed=1), start)
    assert_close("length", moved.norm(dim=-1), start.norm(dim=-1), 1e-12)
    assert (moved - start).abs().max() > 0.1


@pytest.mark.parametrize("form", ["parallel", "reference"])
def test_a_renormalised_memory_keeps_its_row_lengths_through_a_stream(form):
    spec = small_spec("lact")
    weights, tokens = random_weights(spec), 2 * spec.timing.chunk
    q, k, v = random_inputs(spec, 2, tokens)
    _, state = memorize(spec, weights, None, q, k, v, random_gates(spec, 2, tokens), form=form)
    for name, memory in state.memory.items():
        start = weights[f"memory.{name}"].expand_as(memory)
        assert_close(name, memory.norm(dim=-1), start.norm(dim=-1), 1e-12)
        assert (memory - start).abs().max() > 1e-2
