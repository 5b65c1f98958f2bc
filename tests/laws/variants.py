"""Points of the space that no preset stands on: every part, and the crossings that could go wrong."""

from atlas_lm.doctor import RuleSubject
from atlas_lm.memory import MemorySpec, Timing
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
from atlas_lm.memory.optimizers import Descent, Momentum, Muon
from atlas_lm.memory.retention import Decay, DecayToStart, Keep, Renormalise
from atlas_lm.memory.windows import Window

OFFSETS, OF_PAIRS = Window(size=5, gate="offset"), Window(size=5, gate="pair")
LONG = Window(size=40, gate="offset")  # longer than the stream and than a chunk
CHUNKED = Timing(chunk=6)
TOKENS = 20  # three chunks of six and a rest, four windows; every cut is tried, so few are many

VARIANTS: dict[str, dict[str, object]] = {
    "online_omega_momentum": dict(
        features=Unit(), window=OFFSETS, optimizer=Momentum(), retention=Decay()
    ),
    "online_omega_after_retention": dict(
        features=Unit(),
        window=OF_PAIRS,
        optimizer=Descent(),
        retention=DecayToStart(),
        timing=Timing(after_retention=True),
    ),
    "online_window_beyond_stream": dict(features=Unit(), window=LONG, retention=Decay()),
    "chunked_window_beyond_chunk": dict(
        architecture=MLP(),
        features=Unit(),
        window=Window(size=40),
        optimizer=Momentum(),
        timing=CHUNKED,
    ),
    "chunked_matrix_momentum": dict(
        features=Unit(), window=OF_PAIRS, optimizer=Momentum(), retention=Decay(), timing=CHUNKED
    ),
    "deep_to_start": dict(
        architecture=MLP(depth=3, activation="silu"),
        features=Unit(),
        window=Window(size=3),
        optimizer=Momentum(),
        retention=DecayToStart(),
        timing=CHUNKED,
    ),
    "huber_over_pairs": dict(
        architecture=GatedMLP(norm=True),
        features=Unit(),
        objective=Huber(),
        window=OF_PAIRS,
        retention=Decay(),
        timing=CHUNKED,
    ),
    "huber_constant": dict(
        architecture=MLP(), features=Unit(), objective=Huber(delta=0.7), timing=CHUNKED
    ),
    "muon_every_token": dict(
        architecture=MLP(),
        features=Polynomial(degree=3, project=2),
        window=OFFSETS,
        optimizer=Muon(steps=3, schedule="polar_express"),
        retention=DecayToStart(),
        timing=CHUNKED,
    ),
    "muon_off": dict(
        architecture=MLP(),
        features=Unit(),
        optimizer=Muon(steps=0),
        retention=Decay(),
        timing=Timing(chunk=6, period=2),
    ),
    "muon_once_per_chunk": dict(
        architecture=GatedMLP(),
        features=Unit(),
        window=OFFSETS,
        optimizer=Muon(schedule="cubic", carry_per="period"),
        retention=Decay(),
        timing=Timing(chunk=6, period=6),
    ),
    "muon_on_a_matrix": dict(
        features=Identity(), optimizer=Muon(), retention=Keep(), timing=Timing(chunk=4, period=2)
    ),
    "momentum_dot_matrix": dict(
        features=Elementwise(degree=3), objective=Dot(), optimizer=Momentum(), retention=Decay()
    ),
    "sketched": dict(
        features=Sketch(degree=3, sketch=8), window=OFFSETS, optimizer=Momentum(), retention=Decay()
    ),
    "renormalised_every_token": dict(
        architecture=MLP(), features=Taylor(degree=2), optimizer=Descent(), retention=Renormalise()
    ),
    "deep_online": dict(architecture=MLP(), features=Unit(), window=OFFSETS, retention=Decay()),
    "pairs_of_pairs": dict(
        architecture=KeptPairs(), features=Exponential(scale=0.5), objective=L2(), window=OF_PAIRS
    ),
    "normalised_window": dict(
        architecture=KeptPairs(),
        features=Exponential(normalise=True, unit=True),
        objective=Dot(),
        window=OFFSETS,
    ),
    "plain_matrix": dict(
        architecture=Matrix(norm=True), features=Identity(), timing=Timing(chunk=5)
    ),
}


def variant_subject(name: str) -> RuleSubject:
    spec = MemorySpec(heads=2, key_dim=4, value_dim=4, **VARIANTS[name])  # type: ignore[arg-type]
    return RuleSubject(name=name, spec=spec, length=TOKENS)
