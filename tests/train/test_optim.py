"""Outer optimizers against their formulas, and curves of the rate."""

import math

import pytest
import torch
from torch import nn

from atlas_lm.models.sizes import configure
from atlas_lm.ops.newton_schulz import newton_schulz_reference
from atlas_lm.train.learner import LanguageLearner
from atlas_lm.train.optim import Muon, build_optimizers, set_rate, split_weights
from atlas_lm.train.recipe import Optimizer, Schedule
from atlas_lm.train.schedule import share_of_rate


def test_muon_is_its_formula() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 9, dtype=torch.float64))
    by_hand, momentum = weight.detach().clone(), torch.zeros(6, 9, dtype=torch.float64)
    optimizer = Muon([weight], lr=0.03, momentum=0.9, steps=5, weight_decay=0.1)
    for step in range(4):
        gradient = torch.randn(6, 9, dtype=torch.float64)
        weight.grad = gradient.clone()
        set_rate([optimizer], 0.03 / (step + 1))
        optimizer.step()
        rate = 0.03 / (step + 1)
        momentum = 0.9 * momentum + 0.1 * gradient
        ahead = 0.1 * gradient + 0.9 * momentum
        move = newton_schulz_reference(ahead, 5)
        by_hand = by_hand * (1 - rate * 0.1) - rate * 0.2 * math.sqrt(9) * move
        torch.testing.assert_close(weight.detach(), by_hand, rtol=1e-12, atol=1e-12)


def test_muon_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\]"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_every_weight_is_moved_by_one_optimizer_and_only_linear_maps_decay() -> None:
    learner = LanguageLearner(configure("atlas", block="mag", size="tiny"))
    names = {id(weight): name for name, weight in learner.named_parameters()}
    matrices, others = ([names[id(w)] for w in some] for some in split_weights(learner))
    assert sorted(matrices + others) == sorted(names.values())
    assert all(name.endswith("weight") for name in matrices)
    for part in ("embed_tokens", "norm", "bias", "weights.memory", "conv", "persistent", "lm_head"):
        assert not any(part in name for name in matrices), part
    for kind in ("adamw", "muon"):
        found = build_optimizers(learner, Optimizer(kind=kind, decay=0.3))
        groups = [group for optimizer in found for group in optimizer.param_groups]
        moved = [names[id(w)] for group in groups for w in group["params"]]
        assert sorted(moved) == sorted(names.values())
        decaying = [names[id(w)] for g in groups if g["weight_decay"] == 0.3 for w in g["params"]]
        assert sorted(decaying) == sorted(matrices)
    assert isinstance(found[0], Muon)


def test_curves_of_the_rate() -> None:
    cosine = [share_of_rate(Schedule(warm=0.2, floor=0.1), step, 10) for step in range(10)]
    assert cosine[:2] == [0.5, 1.0]
    wanted = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert cosine[2:] == pytest.approx(wanted)
    constant = Schedule(curve="constant", warm=0.0)
    assert {share_of_rate(constant, step, 7) for step in range(7)} == {1.0}
    wsd = [share_of_rate(Schedule(curve="wsd", warm=0.0, fall=0.3), s, 10) for s in range(10)]
    assert wsd[:7] == [1.0] * 7 and wsd[7:] == pytest.approx([0.75, 0.5, 0.25])
    with pytest.raises(ValueError, match="curve is 'line', wanted one of cosine, wsd, constant"):
        Schedule(curve="line")
    with pytest.raises(ValueError, match="warm and fall together"):
        Schedule(warm=0.6, fall=0.6)
