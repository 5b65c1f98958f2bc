"""Random legal points of the space: whatever parts meet, the forms agree and streams can be cut."""

import random

import pytest

from atlas_lm.doctor import RuleSubject, judge
from atlas_lm.memory import MemorySpec, Timing
from atlas_lm.memory.architectures import MLP, GatedMLP, KeptPairs, Matrix
from atlas_lm.memory.features import Elementwise, Exponential, Polynomial, Sketch, Taylor, Unit
from atlas_lm.memory.objectives import L2, Dot, Huber
from atlas_lm.memory.optimizers import Descent, ImplicitDescent, Momentum, Muon
from atlas_lm.memory.parallel import declines
from atlas_lm.memory.retention import Decay, DecayToStart, Keep, Renormalise
from atlas_lm.memory.windows import Window

CHOICES = {
    "architecture": [
        Matrix(),
        Matrix(norm=True),
        MLP(expansion=2),
        MLP(depth=3, expansion=1, activation="silu", skip=False),
        GatedMLP(expansion=2),
        KeptPairs(),
    ],
    "features": [
        Unit(),
        Polynomial(degree=2, project=2),
        Taylor(degree=2, project=2),
        Elementwise(),
        Sketch(sketch=4),
        Exponential(scale=0.5),
        Exponential(normalise=True, unit=True),
    ],
    "objective": [L2(), Dot(), Huber(), Huber(delta=0.5)],
    "window": [Window(size=c, gate=g) for c in (1, 3, 7) for g in ("offset", "pair", "fixed")],
    "optimizer": [
        Descent(),
        Descent(step=0.1),
        ImplicitDescent(),
        Momentum(),
        Muon(steps=2, schedule="polar_express"),
        Muon(steps=0, carry_per="period"),
    ],
    "retention": [Keep(), Decay(), DecayToStart(), Renormalise()],
    "timing": [
        Timing(),
        Timing(after_retention=True),
        Timing(chunk=4),
        Timing(chunk=5),
        Timing(chunk=6, period=3),
        Timing(chunk=4, period=4),
    ],
}


def points(count: int, seed: int) -> list[MemorySpec]:
    """Legal specs with a parallel form, each drawn by choosing every part at random."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        parts = {axis: draw.choice(choices) for axis, choices in CHOICES.items()}
        try:
            spec = MemorySpec(heads=2, key_dim=3, value_dim=draw.choice([3, 4]), **parts)
        except ValueError:
            continue
        if declines(spec) is None:
            found.append(spec)
    return found


@pytest.mark.parametrize("law", ["forms", "cuts", "padding", "packing"])
@pytest.mark.parametrize("spec", points(30, seed=0), ids=lambda spec: spec.fingerprint)
def test_law(spec: MemorySpec, law: str) -> None:
    subject = RuleSubject(name=spec.fingerprint, spec=spec, length=16)
    verdict = judge(subject, law)
    assert verdict.status == "holds", (verdict, spec)
