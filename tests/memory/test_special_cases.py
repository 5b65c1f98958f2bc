"""Where one rule becomes another: mathematics.md, sections 1 and 2, as equal values and gradients."""

from collections.abc import Mapping
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from atlas_lm.doctor.papers import PAPERS
from atlas_lm.memory import MemorySpec, memorize, parallel
from atlas_lm.memory.architectures import Matrix
from atlas_lm.memory.features import Unit
from atlas_lm.memory.memorize import Form
from atlas_lm.memory.optimizers import Descent, Momentum, Muon
from atlas_lm.memory.retention import Decay, DecayToStart, Keep
from atlas_lm.memory.windows import Window
from tests.builders import (
    gradients,
    leaf,
    leaves,
    random_gates,
    random_inputs,
    random_weights,
    wave,
)
from tests.builders import small_spec as small

Tensors = dict[str, Tensor]
FORMS: tuple[Form, ...] = ("reference", "parallel")
ROWS, TOKENS = 2, 20
ONLINE: dict[str, Any] = dict(architecture=Matrix(), features=Unit(), chunk=1)  # the matrix rules

both_forms = pytest.mark.parametrize("form", FORMS)


def draw(spec: MemorySpec, tokens: int = TOKENS) -> Tensors:
    """q, k, v, gates and weights by name, as leaves; a memory never starts at zero."""
    inputs = dict(zip("qkv", random_inputs(spec, ROWS, tokens), strict=True))
    weights = random_weights(spec, jitter=0.3)
    return leaves(inputs | random_gates(spec, ROWS, tokens) | weights)


def summary(y: Tensor, memory: Mapping[str, Tensor], given: Tensors) -> Tensors:
    """What two rules must share: y, the last memory, and the gradients of both in what was given."""
    found = {"y": y, **{f"M {name}": weight for name, weight in memory.items()}}
    grads = gradients(torch.stack([wave(x) for x in found.values()]).sum(), given)
    return {n: x.detach() for n, x in found.items()} | {f"d {n}": x for n, x in grads.items()}


def outcome(
    spec: MemorySpec, given: Tensors, form: Form, /, only: Tensors | None = None, **gates: Tensor
) -> Tensors:
    """The rule's summary. Gates come from `given` unless named; gradients are those in `only`."""
    weights = {name: given[name] for name in spec.weight_shapes}
    chosen = {name: gates.get(name, given.get(name)) for name in spec.gates}
    q, k, v = given["q"], given["k"], given["v"]
    y, state = memorize(spec, weights, None, q, k, v, chosen, form=form)  # type: ignore[arg-type]
    return summary(y, state.memory, given if only is None else only)


def assert_same(got: Tensors, truth: Tensors, tolerance: float = 1e-10) -> None:
    assert got.keys() == truth.keys()
    for name in truth:
        scale = truth[name].abs().max().item()
        assert scale > 1e-6, f"{name} says nothing"
        error = (got[name] - truth[name]).abs().max().item() / scale
        assert error <= tolerance, f"{name} differs by {error:.1e}"


def without(given: Tensors, *names: str) -> Tensors:
    return {name: x for name, x in given.items() if name not in names}


@both_forms
def test_one_pair_descent_matrix_online_is_the_delta_rule(form: Form) -> None:
    omega, delta = small("omeganet", **ONLINE, window=Window()), small("deltanet")
    given = draw(delta)
    truth = outcome(delta, given, form)
    got = outcome(omega, given, form, log_alpha=torch.zeros_like(given["eta"]))
    assert_same(got, truth)
    weights, gates = {"memory.w0": given["memory.w0"]}, {"eta": given["eta"]}
    y = PAPERS["deltanet"](delta, weights, given["q"], given["k"], given["v"], gates)
    assert_same({"y": got["y"]}, {"y": y.detach()})


@both_forms
@pytest.mark.parametrize("changes", [{}, dict(chunk=3), ONLINE], ids=["deep", "chunk", "online"])
@pytest.mark.parametrize("name", ["titans", "titans_atlas"])
def test_no_carry_turns_momentum_into_descent(
    name: str, changes: dict[str, Any], form: Form
) -> None:
    spec = small(name, **changes)
    plain = spec.replace(optimizer=Descent())
    given = draw(plain)
    got = outcome(spec, given, form, theta=torch.zeros_like(given["eta"]))
    assert_same(got, outcome(plain, given, form))


@both_forms
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("omeganet", {}),
        ("omeganet", ONLINE),
        ("titans_atlas", {}),
        ("titans_atlas", ONLINE),
        ("swla", {}),
        ("swdt_pairs", {}),
        ("dot_pairs", {}),
    ],
)
def test_gates_open_for_the_present_alone_give_the_online_rule(
    name: str, changes: dict[str, Any], form: Form
) -> None:
    """gamma_{t,0} stays as a factor of the step."""
    spec = small(name, **changes)
    single = spec.replace(window=Window())
    given = draw(single)
    first = {"gamma": random_gates(spec, ROWS, TOKENS)["gamma"][..., :1].requires_grad_()}
    padded = pad(first["gamma"], (0, spec.window.size - 1))
    got = outcome(spec, given, form, only=given | first, gamma=padded)
    eta = given["eta"] * first["gamma"][..., 0]
    assert_same(got, outcome(single, given, form, only=given | first, eta=eta))


@both_forms
def test_gates_open_for_the_present_alone_turn_atlas_into_its_online_rule(form: Form) -> None:
    """Here the step stands outside Newton-Schulz, so gamma_{t,0} must be 1."""
    spec = small("atlas")
    single = spec.replace(window=Window())
    given = draw(single)
    gamma = pad(torch.ones_like(given["eta"])[..., None], (0, spec.window.size - 1))
    assert_same(outcome(spec, given, form, gamma=gamma), outcome(single, given, form))


@both_forms
@pytest.mark.parametrize("name", ["omeganet", "dot_pairs"])
def test_gates_of_pairs_and_fixed_gates_are_gates_of_offsets(name: str, form: Form) -> None:
    """gamma_{t,j} = gamma_{t-j} where the gate belongs to the pair, and 1/c where there is none."""
    spec = small(name)
    c = spec.window.size
    fixed, pair = (spec.replace(window=Window(size=c, gate=gate)) for gate in ("fixed", "pair"))
    given = draw(pair)
    age = torch.arange(TOKENS)[:, None] - torch.arange(c)  # place of pair t-j, [T, c]
    offsets = given["gamma"][:, age.clamp_min(0)].movedim(2, 3)  # [B, T, H, c]
    assert_same(outcome(spec, given, form, gamma=offsets), outcome(pair, given, form))
    rest = without(given, "gamma")
    level = torch.full_like(offsets, 1 / c)
    assert_same(outcome(spec, rest, form, gamma=level), outcome(fixed, rest, form))


def matrix_rule(given: Tensors, spec: MemorySpec) -> Tensors:
    """Section 1 for a matrix memory of unit keys and the L2 objective, token by token."""
    z, x, v = (normalize(given["k"], dim=-1), normalize(given["q"], dim=-1), given["v"])
    first = given["memory.w0"].expand(ROWS, -1, -1, -1)  # [B, H, V, K]
    M, S, border, y = first, torch.zeros_like(first), first, []
    for t in range(v.shape[1]):
        g = {n: given[n][:, t, :, None, None] for n in spec.gates if n != "gamma"}
        drift = first if isinstance(spec.retention, DecayToStart) else 0 * first
        kept = drift + g["log_alpha"].exp() * (M - drift)
        border = M if t % spec.timing.chunk == 0 else border
        anchor = kept if spec.timing.after_retention else border
        G = torch.zeros_like(M)
        for j in range(min(t + 1, spec.window.size)):
            key, value = z[:, t - j, :, :, None], v[:, t - j, :, :, None]
            G = G + given["gamma"][:, t, :, j, None, None] * (anchor @ key - value) @ key.mT
        if isinstance(spec.optimizer, Muon):
            S = g["theta"] * S + G
            M = kept - g["eta"] * S
        else:
            S = (g["theta"] * S if isinstance(spec.optimizer, Momentum) else 0) - g["eta"] * G
            M = kept + S
        y.append((M @ x[:, t, :, :, None]).squeeze(-1))
    return summary(torch.stack(y, 1), {"w0": M}, given)


@pytest.mark.parametrize(("chunk", "form"), [(1, "reference"), (6, "reference"), (6, "parallel")])
def test_muon_without_newton_schulz_is_momentum(chunk: int, form: Form) -> None:
    """S_t = theta_t S_{t-1} + G_t, M_t = alpha_t M_{t-1} - eta_t S_t."""
    changes = ONLINE | dict(chunk=chunk, period=1, optimizer=Muon(steps=0))
    spec = small("atlas", **changes)
    given = draw(spec)
    assert_same(outcome(spec, given, form), matrix_rule(given, spec))


@pytest.mark.parametrize(
    ("changes", "form"),
    [({}, "reference"), ({}, "parallel"), (ONLINE, "reference")],
    ids=["deep-reference", "deep-parallel", "online-reference"],
)
def test_atlas_without_its_parts_is_titans(changes: dict[str, Any], form: Form) -> None:
    """Under a constant step, which commutes with the momentum's sum."""
    titans = small("titans", **changes)
    bare = small("atlas", **(dict(features=Unit(), period=1) | changes), window=Window())
    bare = bare.replace(optimizer=Muon(steps=0))
    given = without(draw(titans), "eta")
    step = {"step": torch.tensor(0.2, dtype=torch.float64, requires_grad=True)}
    eta = step["step"].expand(given["theta"].shape)
    got = outcome(bare, given, form, only=given | step, eta=eta)
    assert_same(got, outcome(titans, given, form, only=given | step, eta=eta))


@both_forms
def test_dot_of_one_pair_is_a_triangular_solve(form: Form) -> None:
    """(I + diag(eta) tril(exp(K K^T), -1)) W = diag(eta) V, then Y = tril(exp(Q K^T)) W."""
    spec = small("dot_pairs", window=Window())
    given = draw(spec)
    q, k = (normalize(given[n], dim=-1).transpose(1, 2) for n in "qk")
    v, eta = given["v"].transpose(1, 2), given["eta"].transpose(1, 2)[..., None]
    system = torch.eye(TOKENS) + eta * (k @ k.mT).exp().tril(-1)
    y = ((q @ k.mT).exp().tril() @ torch.linalg.solve(system, eta * v)).transpose(1, 2)
    gates = {"eta": given["eta"]}
    got, _ = memorize(spec, {}, None, given["q"], given["k"], given["v"], gates, form=form)
    assert_same(summary(got, {}, given), summary(y, {}, given))


@both_forms
@pytest.mark.parametrize("retention", [Decay(), DecayToStart()], ids=lambda r: r.kind)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("titans", {}),
        ("omeganet", {}),
        ("atlas", {}),
        ("omeganet", ONLINE),
        ("titans_atlas", ONLINE),
        ("gated_deltanet", {}),
        ("swla", {}),
    ],
)
def test_an_open_retention_gate_keeps(
    name: str, changes: dict[str, Any], retention: Decay, form: Form
) -> None:
    spec = small(name, **changes).replace(retention=retention)
    keep = spec.replace(retention=Keep())
    given = draw(keep)
    got = outcome(spec, given, form, log_alpha=torch.zeros_like(given["eta"]))
    assert_same(got, outcome(keep, given, form))


@pytest.mark.parametrize(
    ("size", "optimizer", "retention", "after"),
    [*product((1, 2, 5, 17), (Descent(), Momentum()), (Decay(), DecayToStart()), (False, True))],
    ids=lambda x: getattr(x, "kind", str(x)),
)
def test_online_omega_rule_in_parallel_is_exact(
    size: int, optimizer: Descent, retention: Decay, after: bool
) -> None:
    """Over 13 tokens, so that the window of 17 never fills."""
    window = Window(size=size, gate="offset")
    spec = small(
        "omeganet", **ONLINE, window=window, optimizer=optimizer, after_retention=after
    ).replace(retention=retention)
    given = draw(spec, tokens=13)
    truth = matrix_rule(given, spec)
    for form in FORMS:
        assert_same(outcome(spec, given, form), truth)


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("optimizer", [Descent(), Momentum()], ids=lambda o: o.kind)
def test_tiles_of_the_online_rule_change_nothing(
    monkeypatch: pytest.MonkeyPatch, optimizer: Descent, tile: int
) -> None:
    spec = small("omeganet", **ONLINE, optimizer=optimizer)
    given = draw(spec)
    truth = outcome(spec, given, "parallel")
    tiles = Mock(return_value=tile)
    monkeypatch.setattr(parallel, "tile_size", tiles)
    assert_same(outcome(spec, given, "parallel"), truth, 1e-12)
    tiles.assert_called()


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("name", ["linear_attention", "retnet", "swla"])
def test_tiles_of_the_linear_rules_change_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, tile: int
) -> None:
    spec = small(name)
    given = draw(spec)
    truth = outcome(spec, given, "parallel")
    monkeypatch.setattr(parallel, "LINEAR_TILE", tile)
    assert_same(outcome(spec, given, "parallel"), truth, 1e-12)


@both_forms
@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["steps", "tiny steps"])
@pytest.mark.parametrize("name", ["omeganet", "titans_atlas"])
def test_a_window_cut_at_chunk_borders_is_another_rule(name: str, scale: float, form: Form) -> None:
    """Closing the gates of all pairs before a border cuts the window there, and nothing heals that.

    The memory misses about 30 % of the way it went, however small the steps.
    """
    spec = small(name).replace(retention=Keep())
    given = draw(spec)
    chunk, size = spec.timing.chunk, spec.window.size
    inside = torch.arange(size) <= (torch.arange(TOKENS) % chunk)[:, None]  # [T, c]
    given["eta"] = leaf(given["eta"] * scale)
    whole = outcome(spec, given, form)
    cut = outcome(spec, given, form, gamma=given["gamma"] * inside[:, None])
    assert torch.equal(whole["y"][:, :chunk], cut["y"][:, :chunk])  # no border yet, no difference
    for weight in ("w0", "w1"):
        way = whole[f"M {weight}"] - given[f"memory.{weight}"]
        missed = whole[f"M {weight}"] - cut[f"M {weight}"]
        assert missed.norm() > 0.2 * way.norm()
