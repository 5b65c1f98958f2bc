"""A spec is a value: the same before and after JSON, and never a combination that cannot be."""

import dataclasses
import json
import re

import pytest

from atlas_lm.memory import MemorySpec, Timing, presets
from atlas_lm.memory.architectures import MLP, GatedMLP, KeptPairs, Matrix
from atlas_lm.memory.features import (
    Elementwise,
    Exponential,
    Identity,
    Polynomial,
    Sketch,
    Taylor,
    Unit,
)
from atlas_lm.memory.objectives import L2, Dot, Huber
from atlas_lm.memory.optimizers import Descent, ImplicitDescent, Momentum, Muon
from atlas_lm.memory.retention import Decay, DecayToStart, Keep, Renormalise
from atlas_lm.memory.spec import ILLEGAL, PARTS
from atlas_lm.memory.windows import Window
from tests.builders import NAMES, small_spec

SIZES = dict(heads=2, key_dim=4, value_dim=4)
KEPT = dict(architecture=KeptPairs(), features=Exponential())
HAND_MADE = {
    "matrix": dict(architecture=Matrix(norm=True, activation="silu")),
    "mlp": dict(architecture=MLP(depth=3, expansion=2, activation="silu", skip=False)),
    "gated_mlp": dict(architecture=GatedMLP(expansion=3, norm=True)),
    "kept_pairs": KEPT,
    "identity": dict(features=Identity()),
    "unit": dict(features=Unit()),
    "polynomial": dict(features=Polynomial(degree=3, project=2)),
    "taylor": dict(features=Taylor(degree=3)),
    "elementwise": dict(features=Elementwise(degree=4)),
    "sketch": dict(features=Sketch(degree=3, sketch=16)),
    "exponential": KEPT | dict(features=Exponential(scale=0.7, unit=True)),
    "l2": dict(objective=L2()),
    "dot": dict(objective=Dot()),
    "huber": dict(objective=Huber(delta=0.25)),
    "window": dict(window=Window(size=3, gate="pair")),
    "descent": dict(optimizer=Descent(step=0.5)),
    "implicit_descent": dict(optimizer=ImplicitDescent()),
    "momentum": dict(optimizer=Momentum(truncate=True), timing=Timing(chunk=4)),
    "muon": dict(optimizer=Muon(steps=3, schedule="cubic", eps=0.1, carry_per="period")),
    "keep": dict(retention=Keep()),
    "decay": dict(retention=Decay()),
    "decay_to_start": dict(retention=DecayToStart()),
    "renormalise": dict(architecture=MLP(), retention=Renormalise()),
    "timing": dict(timing=Timing(after_retention=True)),
}


def test_every_part_is_made_by_hand_once():
    assert set(HAND_MADE) == {kind for kinds in PARTS.values() for kind in kinds}


@pytest.mark.parametrize("kind", HAND_MADE)
def test_json_round_trip_of_every_part(kind):
    spec = MemorySpec(**SIZES, **HAND_MADE[kind])
    assert kind in {getattr(spec, axis).kind for axis in PARTS}
    again = MemorySpec.from_json(spec.to_json())
    assert again == spec and hash(again) == hash(spec)
    assert again.fingerprint == spec.fingerprint
    assert again.difference(spec) is None


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip_of_every_preset(name):
    for spec in (presets.build(name, heads=4, key_dim=32, value_dim=32), small_spec(name)):
        assert MemorySpec.from_json(spec.to_json()) == spec
        assert MemorySpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def changed(value):
    """Another legal value for a field, by its present one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.5
    return OTHERS[value]


OTHERS = {
    None: 2,
    "gelu": "silu",
    "fixed": "pair",
    "muon": "cubic",
    "token": "period",
}


def all_fields():
    """(kind, field) of every part but those that are fixed by the part itself."""
    fixed = {("matrix", "depth"), ("gated_mlp", "depth")}
    for axis, kinds in PARTS.items():
        for kind, part in kinds.items():
            for field in dataclasses.fields(part):
                if (kind, field.name) not in fixed:
                    yield pytest.param(axis, part, field.name, id=f"{kind}.{field.name}")


# what a part needs beside it to be legal before and after the change
SURROUNDINGS = {
    Exponential: KEPT | dict(objective=Dot()),
    Renormalise: dict(architecture=MLP()),
    Timing: dict(optimizer=Muon()),
    Momentum: dict(timing=Timing(chunk=4)),
    Muon: dict(timing=Timing(chunk=4)),
}


@pytest.mark.parametrize(("axis", "part", "field"), list(all_fields()))
def test_every_field_changes_fingerprint_equality_and_difference(axis, part, field):
    one = part()
    two = dataclasses.replace(one, **{field: changed(getattr(one, field))})
    if part is Timing and field == "period":
        one, two = Timing(chunk=2), Timing(chunk=2, period=2)
    a, b = (MemorySpec(**(SIZES | SURROUNDINGS.get(part, {}) | {axis: p})) for p in (one, two))
    assert a != b
    assert a.fingerprint != b.fingerprint
    wanted = f"{axis}.{field} is {getattr(one, field)!r} and {getattr(two, field)!r}"
    assert a.difference(b) == wanted
    assert MemorySpec.from_json(b.to_json()) == b


@pytest.mark.parametrize("field", SIZES)
def test_sizes_change_the_fingerprint(field):
    a, b = MemorySpec(**SIZES), MemorySpec(**(SIZES | {field: 8}))
    assert a != b and a.fingerprint != b.fingerprint
    assert a.difference(b) == f"{field} is {SIZES[field]} and 8"


def test_difference_of_kinds_names_the_axis():
    a, b = MemorySpec(**SIZES), MemorySpec(**SIZES, objective=Dot())
    assert a.difference(b) == "objective.kind is 'l2' and 'dot'"


def test_fingerprints_of_presets_are_different():
    prints = {name: small_spec(name).fingerprint for name in NAMES if name != "gla"}
    assert len(set(prints.values())) == len(prints)
    assert small_spec("gla") == small_spec("retnet")  # one rule, told apart by who makes the gate


def record():
    return MemorySpec(**SIZES).to_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r | {"extra": 1}, r"unknown fields \['extra'\]"),
        (lambda r: {n: v for n, v in r.items() if n != "window"}, r"misses \['window'\]"),
        (lambda r: {n: v for n, v in r.items() if n != "heads"}, r"misses \['heads'\]"),
        (
            lambda r: r | {"window": {"kind": "door"}},
            "window is of kind 'door', wanted one of window",
        ),
        (
            lambda r: r | {"optimizer": {"step": None}},
            "optimizer is of kind None, wanted one of descent",
        ),
        (
            lambda r: r | {"optimizer": r["optimizer"] | {"momentum": 0.9}},
            r"optimizer descent has fields \['momentum', 'step'\], wanted \['step'\]",
        ),
        (
            lambda r: r | {"timing": {"kind": "timing", "chunk": 2}},
            r"timing timing has fields \['chunk'\], wanted .*'period'",
        ),
        (
            lambda r: (
                r
                | {
                    "features": {
                        "kind": "exponential",
                        "scale": 1.0,
                        "normalise": False,
                        "unit": True,
                    }
                }
            ),
            "this combination cannot be",
        ),
    ],
)
def test_from_dict_refuses_what_it_does_not_know(change, words):
    with pytest.raises(ValueError, match=words):
        MemorySpec.from_dict(change(record()))


# one entry per rule of ILLEGAL: what breaks it, words of its reason, its remedy
BROKEN = [
    (dict(features=Polynomial(project=16)), "more dimensions than it has", "make project at most"),
    (dict(architecture=Matrix(norm=True), value_dim=3), "as many features as", "change value_dim"),
    (dict(features=Exponential()), "no finite image", "use taylor"),
    (KEPT | dict(optimizer=Momentum()), "plain descent only", "use taylor"),
    (KEPT | dict(retention=Decay()), "never forgotten", "use retention keep and chunk 1"),
    (KEPT | dict(objective=Huber()), "linear system", "use l2"),
    (
        KEPT | dict(features=Exponential(normalise=True)),
        "non-negative weights",
        "use dot, or drop normalise",
    ),
    (dict(optimizer=ImplicitDescent(), architecture=MLP()), "closed form", "use descent elsewhere"),
    (dict(timing=Timing(chunk=4, after_retention=True)), "at the anchor", "use chunk 1"),
    (dict(timing=Timing(chunk=4, period=2)), "only muon has it", "use period 1"),
    (
        dict(optimizer=Muon(), timing=Timing(chunk=4, period=3)),
        "end on chunk borders",
        "make chunk a multiple of period",
    ),
    (dict(retention=Renormalise()), "starts at zero", "use a deep memory, or decay"),
    (dict(optimizer=Momentum(truncate=True)), "a border at every token", "use a chunk"),
]


def test_every_rule_is_broken_once():
    for _, text in ILLEGAL:
        assert sum(reason in text for _, reason, _ in BROKEN) == 1, f"no test breaks: {text}"


@pytest.mark.parametrize(("changes", "reason", "remedy"), BROKEN)
def test_illegal_combinations_name_reason_and_remedy(changes, reason, remedy):
    with pytest.raises(ValueError, match="this combination cannot be") as error:
        MemorySpec(**(SIZES | changes))
    message = str(error.value)
    assert reason in message, "another rule was broken first"
    assert remedy in message.split(";")[-1]


@pytest.mark.parametrize(
    "changes",
    [
        dict(architecture=KeptPairs()),
        KEPT | dict(timing=Timing(chunk=4)),
        KEPT | dict(optimizer=Muon()),
        KEPT | dict(optimizer=ImplicitDescent()),
        KEPT | dict(retention=DecayToStart()),
        dict(optimizer=ImplicitDescent(), architecture=Matrix(norm=True)),
        dict(optimizer=ImplicitDescent(), timing=Timing(chunk=4)),
        dict(optimizer=ImplicitDescent(), window=Window(size=2)),
        dict(optimizer=ImplicitDescent(), window=Window(gate="pair")),
        dict(optimizer=ImplicitDescent(), objective=Dot()),
        dict(optimizer=Momentum(), timing=Timing(chunk=4, period=4)),
        dict(architecture=MLP(norm=True), features=Polynomial()),
        dict(architecture=Matrix(norm=True), retention=Renormalise()),
    ],
)
def test_every_clause_of_a_rule_counts(changes):
    with pytest.raises(ValueError, match="this combination cannot be"):
        MemorySpec(**(SIZES | changes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MemorySpec(**(SIZES | {"heads": 0})), "heads is 0, wanted 1 or more"),
        (lambda: MemorySpec(**(SIZES | {"key_dim": -1})), "key_dim is -1, wanted 1 or more"),
        (lambda: MemorySpec(**SIZES, objective=Matrix()), "objective is Matrix.*wanted one of l2"),
        (lambda: Timing(chunk=0), "chunk 0 and period 1, wanted 1 or more"),
        (lambda: Timing(period=0), "chunk 1 and period 0, wanted 1 or more"),
        (lambda: Window(size=0), "window size is 0, wanted 1"),
        (lambda: Window(gate="soft"), "window gate is 'soft', wanted 'offset'"),
        (lambda: Descent(step=0.0), "step is 0.0, wanted a positive number"),
        (lambda: Muon(steps=-1), "steps is -1, wanted 0"),
        (lambda: Muon(schedule="fast"), "schedule is 'fast', wanted one of muon"),
        (lambda: Muon(eps=0.0), "eps is 0.0, wanted a positive number"),
        (lambda: Muon(carry_per="day"), "carry_per is 'day', wanted 'token' or 'period'"),
        (lambda: Huber(delta=0.0), "delta is 0.0, wanted a positive number"),
        (lambda: Polynomial(degree=0), "degree is 0, wanted 1 or more"),
        (lambda: Taylor(project=0), "project is 0, wanted a number of dimensions"),
        (lambda: Sketch(degree=1), "degree 1 and width 64, wanted degree 2"),
        (lambda: MLP(depth=0), "depth 0 and expansion 4, wanted both 1"),
        (lambda: MLP(activation="relu"), "activation is 'relu', wanted one of"),
        (lambda: Matrix(depth=2), "depth 1, got 2; use mlp"),
        (lambda: GatedMLP(depth=3), "depth 2, got 3; use mlp"),
    ],
)
def test_parts_are_checked_when_made(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("features", [Polynomial(project=16), Taylor(project=16)])
def test_a_projection_wider_than_the_key_is_refused_when_made(features):
    """A spec that is legal must be able to build its weights."""
    with pytest.raises(ValueError, match="project"):
        MemorySpec(**SIZES, features=features)


def test_replace_reaches_into_timing():
    spec = small_spec("atlas")
    other = spec.replace(chunk=8, period=4, heads=3)
    assert other.timing == Timing(chunk=8, period=4) and other.heads == 3
    assert other.optimizer == spec.optimizer
    assert spec.timing == Timing(chunk=6, period=3), "the first spec is as it was"
    assert spec.replace(timing=Timing(chunk=9), period=3).timing == Timing(chunk=9, period=3)
    with pytest.raises(ValueError, match="multiple of period"):
        spec.replace(period=4)


def test_build_takes_parts_and_timing():
    spec = presets.build("atlas", **SIZES, features=Unit(), chunk=32, period=8)
    assert spec.timing == Timing(chunk=32, period=8) and spec.features == Unit()
    assert presets.build("lact", **SIZES, chunk=8).timing == Timing(chunk=8, period=8)
    assert presets.build("titans", **SIZES, chunk=8).timing == Timing(chunk=8)


@pytest.mark.parametrize("name", ["linear_attention", "gla", "deltanet", "swla"])
def test_build_gives_an_online_preset_a_chunk(name):
    assert presets.build(name, **SIZES, features=Unit(), chunk=8).timing == Timing(chunk=8)


def test_build_refuses_unknown_presets_and_names_the_known():
    with pytest.raises(ValueError, match=r"preset is 'titan', wanted one of .*titans") as error:
        presets.build("titan", **SIZES)
    assert all(re.search(rf"\b{name}\b", str(error.value)) for name in NAMES)


@pytest.mark.parametrize(
    "value", [small_spec("atlas"), *(getattr(small_spec("atlas"), axis) for axis in PARTS)]
)
def test_specs_and_parts_are_frozen(value):
    name = next((f.name for f in dataclasses.fields(value)), None)
    if name is None:
        assert type(value).__dataclass_params__.frozen
        return
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, getattr(value, name))


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_the_spec_announces(name):
    spec = small_spec(name)
    weights = spec.init_weights(1)
    assert {n: tuple(w.shape) for n, w in weights.items()} == spec.weight_shapes
    assert set(spec.frozen_weights) <= set(weights)
    again = spec.init_weights(1)
    assert all(bool((weights[n] == again[n]).all()) for n in weights)
