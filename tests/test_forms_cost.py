"""What the parallel form costs: no weight matrix per token, and less time than token by token."""

import time

import pytest
import torch

from atlas_lm.memory import presets
from atlas_lm.memory.architectures import Matrix
from benchmarks.forms import disagreement, draw, run, saved_for_backward

SIZES = dict(heads=2, key_dim=32, value_dim=32, chunk=64)
LINEAR = {
    "titans": dict(preset="titans"),
    "omeganet": dict(preset="omeganet"),
    "titans_atlas": dict(preset="titans_atlas"),
    "matrix with momentum": dict(preset="titans", architecture=Matrix()),
}


def build(preset, **changes):
    return presets.build(preset, **SIZES, **changes)


def per_token_weights(spec):
    """Entries of one weight matrix per token of a chunk, B = 1: what must never be stored."""
    return spec.heads * spec.timing.chunk * max(o * i for o, i in spec.fast_shapes.values())


@pytest.mark.parametrize("case", LINEAR)
def test_descent_and_momentum_store_no_weights_per_token(case):
    """At two chunks all tokens together are far smaller than a chunk of weights."""
    spec = build(**LINEAR[case])
    _, largest = saved_for_backward(spec, tokens=2 * spec.timing.chunk)
    assert largest < per_token_weights(spec) / 8


@pytest.mark.parametrize("case", LINEAR)
def test_memory_for_the_backward_pass_grows_linearly(case):
    spec = build(**LINEAR[case])
    short, long = (saved_for_backward(spec, tokens=64 * n)[0] for n in (4, 12))
    assert long < 1.1 * short


def test_the_measure_sees_weights_per_token_where_they_are():
    """Newton-Schulz at every token has to form them: the bound is one that can be crossed."""
    spec = build("atlas", period=1)
    _, largest = saved_for_backward(spec, tokens=2 * spec.timing.chunk)
    assert largest >= per_token_weights(spec)


def seconds(spec, form, mode, runs):
    """Processor time of the fastest run at T = 256."""
    drawn, times = draw(spec, 256), []
    run(spec, draw(spec, 65), form, mode)
    for _ in range(runs):
        begin = time.process_time()
        run(spec, drawn, form, mode)
        times.append(time.process_time() - begin)
    return min(times)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("case", ["titans", "omeganet"])
def test_parallel_is_faster_than_token_by_token(case, mode):
    spec = build(**LINEAR[case])
    assert torch.get_num_threads() == 1
    assert seconds(spec, "parallel", mode, runs=3) < 0.5 * seconds(spec, "reference", mode, runs=1)


def test_the_benchmark_would_notice_a_difference(monkeypatch):
    spec = presets.build("deltanet", heads=1, key_dim=4, value_dim=4)
    assert disagreement(spec) < 1e-9
    tampered = torch.linalg.solve_triangular
    monkeypatch.setattr(
        torch.linalg, "solve_triangular", lambda *a, **k: 1.000001 * tampered(*a, **k)
    )
    assert disagreement(spec) > 1e-9
