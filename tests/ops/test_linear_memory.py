"""Matrix memories with a chunk anchor: the token loop against plain numbers, the other forms against it."""

import dataclasses
import math

import numpy
import pytest
import torch

from atlas_lm.ops.linear_memory import linear_memory
from tests.builders import gradients, leaf
from tests.ops.judging import assert_near, distance
from tests.ops.linear_cases import (
    DEVICE,
    HALVES,
    Case,
    assert_twice_plain,
    draw,
    named,
    run,
    truth,
    weighed,
)

pytest.importorskip("triton", reason="the fused form is written in Triton")
from atlas_lm.ops.chunk_walk import fused as chunk_walk

CASES = [
    Case(tokens=1),
    Case(tokens=15, window=4, momentum=True),
    Case(tokens=16, window=17, heads=2, values=40),
    Case(tokens=17, momentum=True, features=24, values=20),
    Case(tokens=40, window=4, features=24, values=20),
    Case(tokens=40, window=17, momentum=True),
    Case(tokens=70, window=4, momentum=True, chunk=32, features=24, values=20),
    Case(tokens=70, momentum=True, chunk=64),
    Case(tokens=70, window=20, chunk=64),
    Case(window=4, momentum=True, objective="dot", heads=2),
    Case(objective="dot", decays=False, warm=False, values=72),
    Case(tokens=20, window=4, momentum=True, batch=2, before=3, past=(2, 3), length=(20, 7)),
    Case(tokens=20, window=17, batch=2, before=3, past=(0, 3), length=(0, 18)),
    Case(window=4, momentum=True, borders=(0, 5, 22, 40), keep="checkpoints"),
    Case(borders=(0, 16, 17, 40), keep="checkpoints"),
    Case(tokens=20, window=4, momentum=True, decays=False, warm=False, before=1),
]


def by_numbers(case, inputs):
    """One sequence, one head: errors of all pairs at all memories first, then the rule. [T, V], states."""
    x = {n: t.numpy()[0, :, 0] for n, t in inputs.items() if n not in ("memory", "momentum")}
    memories = [inputs["memory"].numpy()[0, 0]]
    momentum = inputs["momentum"].numpy()[0, 0] if case.momentum else 0.0
    reads = []
    for t in range(case.tokens):
        anchor = memories[t - t % case.chunk]
        slopes = anchor @ x["k"].T * (case.objective == "l2") - x["v"].T  # [V, pairs]
        weight = numpy.zeros(len(x["k"]))
        for j in range(min(case.window, case.before + t + 1)):
            weight[case.before + t - j] = x["gamma"][t, j] if "gamma" in x else 1.0
        step = -x["eta"][t] * (slopes * weight) @ x["k"]
        momentum = x["theta"][t] * momentum + step if case.momentum else step
        memories.append(numpy.exp(x["log_alpha"][t]) * memories[-1] + momentum)
        reads.append(memories[-1] @ x["q"][t])
    anchor = memories[(case.tokens - 1) // case.chunk * case.chunk]
    return {"y": reads, "memory": memories[-1], "anchor": anchor, "momentum": momentum}


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(window=4, momentum=True),
        Case(window=5, momentum=True, before=3, objective="dot"),
        Case(window=17, before=3),
    ],
    ids=named,
)
def test_the_token_loop_is_the_equations(case):
    inputs = draw(case)
    y, state = linear_memory(**inputs, **case.options() | {"past": None}, form="reference")
    got = {"y": y[0, :, 0]} | {n: x[0, 0] for n, x in state._asdict().items() if x is not None}
    wanted = by_numbers(case, inputs)
    assert_near(got, {n: torch.tensor(numpy.array(wanted[n])) for n in got}, 1e-13)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_parallel_is_the_token_loop(case):
    assert_near(run(case, "parallel", draw(case), torch.float64), truth(case), 1e-10)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_fused_is_as_good_as_plain(case):
    assert_twice_plain(case, torch.float32, truth(case))


HALF = [Case(tokens=17, values=72), *(c for c in CASES if c.momentum and c.window > 1)][:6]


@pytest.mark.parametrize("case", HALF, ids=named)
def test_half_precision_is_as_good_as_plain(case):
    """fp16, since Triton's interpreter cannot multiply bf16; bf16 is compared on the device."""
    assert_twice_plain(case, torch.float16, truth(case))


SCANS = [
    Case(tokens=68, window=4, momentum=True),
    Case(tokens=70, batch=2, chunk=32, window=4, length=(70, 20), keep="checkpoints"),
    Case(tokens=50, momentum=True, features=24, values=20, batch=2, length=(0, 50)),
    Case(tokens=64, borders=(0, 32, 64), values=20),
]


@pytest.mark.parametrize("case", SCANS, ids=named)
def test_many_runs_are_as_good_as_plain(case, scans):
    assert_twice_plain(case, torch.float32, truth(case))
    assert min(scans) > 1


def test_many_runs_are_one(scans, monkeypatch):
    case = Case(tokens=36, window=4, momentum=True)
    many = run(case, "fused", draw(case), torch.float32)
    monkeypatch.setattr(chunk_walk, "PROGRAMS", 1)
    one = run(case, "fused", draw(case), torch.float32)
    assert scans[0] > 1 and scans[-1] == 1
    assert_near(many, one, 1e-6)


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("window", [1, 4])
def test_extreme_gates(window, momentum):
    """Everything forgotten, nothing written, everything kept: exact, and no NaN in any gradient."""
    case = Case(window=window, momentum=momentum)
    inputs = draw(case)
    inputs["log_alpha"][:, 3] = inputs["log_alpha"][:, 20:22] = -math.inf
    inputs["log_alpha"][:, 5:12] = 0.0
    inputs["eta"][:, 7:18] = 0.0
    if momentum:
        inputs["theta"][:, 10:14] = 0.0
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 1e-6)


def test_momentum_of_zero_is_descent():
    case = Case(momentum=True, window=4)
    inputs = draw(case)
    inputs |= {n: torch.zeros_like(inputs[n]) for n in ("theta", "momentum")}
    got = run(case, "fused", inputs, torch.float32, outputs=("y", "memory", "anchor"))
    plain = {n: x for n, x in inputs.items() if n not in ("theta", "momentum")}
    wanted = run(dataclasses.replace(case, momentum=False), "fused", plain, torch.float32)
    assert_near({n: got[n] for n in wanted}, wanted, 1e-6)


def test_a_window_that_sees_one_pair_is_none():
    case = Case(window=4, momentum=True)
    inputs = draw(case)
    inputs["gamma"] = torch.zeros_like(inputs["gamma"])
    inputs["gamma"][..., 0] = 1.0
    got = run(case, "fused", inputs, torch.float32)
    one = dataclasses.replace(case, window=1)
    plain = {n: x for n, x in inputs.items() if n != "gamma"}
    wanted = run(one, "fused", plain, torch.float32)
    assert_near({n: got[n] for n in wanted}, wanted, 1e-6)


def test_a_window_of_one_may_have_a_gate():
    case = Case(tokens=20)
    inputs = draw(case)
    inputs["gamma"] = torch.linspace(0, 1, 20, dtype=torch.float64).view(1, 20, 1, 1)
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 1e-6)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("output", ["y", "memory", "anchor", "momentum"])
def test_each_output_has_its_own_gradients(output, several, monkeypatch):
    monkeypatch.setattr(chunk_walk, "SHORTEST", 1 if several else 8)
    case = Case(momentum=True, window=4, tokens=33)
    got = run(case, "fused", draw(case), torch.float32, outputs=(output,))
    assert_near(got, run(case, "reference", draw(case), torch.float64, outputs=(output,)), 1e-6)


@pytest.mark.parametrize("names", [("v",), ("eta", "gamma", "memory")], ids=str)
def test_some_inputs_alone_may_ask_for_gradients(names):
    case = Case(momentum=True, window=4, tokens=20)
    inputs = {n: x.float().to(DEVICE) for n, x in draw(case).items()}
    given = inputs | {n: leaf(inputs[n]) for n in names}
    y, _ = linear_memory(**given, **case.options(), form="fused")
    grads = gradients(weighed(y, "y"), given)
    assert grads.keys() == set(names)
    wanted = run(case, "fused", draw(case), torch.float32, outputs=("y",))
    for name in names:
        assert torch.equal(grads[name], wanted[f"d{name}"]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_twice_the_same(dtype):
    case = Case(tokens=17, momentum=True, window=4)
    first, second = (run(case, "fused", draw(case), dtype) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_what_is_kept_does_not_change_results():
    case = Case(tokens=17, momentum=True, window=4)
    walked = dataclasses.replace(case, keep="checkpoints")
    kept, again = (run(c, "fused", draw(c), torch.float32) for c in (case, walked))
    for name in kept:
        assert torch.equal(kept[name], again[name]), name


def test_views_are_read_as_they_look():
    case = Case(tokens=20, momentum=True, window=4, heads=2)
    inputs = {n: x.float().to(DEVICE) for n, x in draw(case).items()}
    views = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs.items()}
    (got, end), (wanted, same) = (
        linear_memory(**given, chunk=16, form="fused") for given in (views, inputs)
    )
    assert torch.equal(got, wanted)
    assert all(torch.equal(a, b) for a, b in zip(end, same, strict=True))


def test_memory_and_gates_may_be_left_out():
    case = Case(tokens=20)
    bare = {n: x.to(DEVICE) for n, x in draw(case).items() if n in (*HALVES, "eta")}
    wanted, end = linear_memory(**bare, chunk=16, form="reference")
    for form in ("parallel", "fused"):
        y, state = linear_memory(**{n: x.float() for n, x in bare.items()}, chunk=16, form=form)
        assert distance(y, wanted) < 1e-6 and distance(state.memory, end.memory) < 1e-6
        assert state.momentum is None


def test_auto_takes_no_kernel_on_the_cpu():
    case = Case(tokens=20)
    inputs = {n: x.float() for n, x in draw(case).items()}
    y, _ = linear_memory(**inputs, chunk=16)
    assert torch.equal(y, linear_memory(**inputs, chunk=16, form="parallel")[0])


def test_gradients_of_gradients_are_refused():
    case = Case(tokens=3)
    inputs = {n: leaf(x.float().to(DEVICE)) for n, x in draw(case).items()}
    y, _ = linear_memory(**inputs, chunk=16, form="fused")
    (grad,) = torch.autograd.grad(y.square().sum(), inputs["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def zeros(*shape, **options):
    return torch.zeros(*shape, device=DEVICE, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": "fast"}, "form is 'fast', wanted 'auto' or one of fused, parallel, reference"),
        ({"chunk": 8}, "chunks of 16, 32, 64 tokens, and the chunk is 8; use form='parallel'"),
        (
            {n: zeros(1, 4, 1, 512) for n in ("q", "k")},
            "up to 256 features and values, got 512 and 16",
        ),
        ({"v": zeros(1, 4, 1, 257)}, "up to 256 features and values, got 16 and 257"),
        ({"gamma": zeros(1, 4, 1, 18)}, "windows up to the chunk and one pair more, got 18"),
        (
            {n: zeros(1, 4, 1, 129) for n in ("q", "k")}
            | {"gamma": zeros(1, 4, 1, 18), "chunk": 32},
            "more than 128 features kernels take windows up to 17, got 129 features and a window of 18",
        ),
        ({n: zeros(1, 4, 1, 16).double() for n in HALVES}, "inputs are fp64; use form='parallel'"),
        ({"eta": zeros(1, 4, 2)}, "eta has shape .* axis H is 2 here and 1 elsewhere"),
        ({"theta": zeros(1, 4)}, "theta has shape .*, wanted 3 axes"),
        ({"memory": zeros(2, 1, 16, 16)}, "memory has shape .* axis N is 2 here and 1 elsewhere"),
        ({"q": zeros(1, 5, 1, 16), "eta": zeros(1, 5, 1)}, "1 rows of 5 tokens, k 4 pairs each"),
        ({"objective": "huber"}, "objective is 'huber' and keep 'states', wanted 'l2' or 'dot'"),
        ({"keep": "nothing"}, "keep 'nothing', wanted .* 'states' or 'checkpoints'"),
        (
            {n: zeros(2, 4, 1, 16) for n in HALVES}
            | {"eta": zeros(2, 4, 1), "cu_seqlens": torch.tensor([0, 2, 4])},
            "q has 2 rows of 4 tokens, k 4 pairs each; .* with cu_seqlens one row",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 3])},
            "cu_seqlens is .0, 3., wanted rising borders 0, ..., 4",
        ),
        ({"cu_seqlens": torch.tensor([0, 2, 2, 4])}, "none of them empty; cumulate the lengths"),
        ({n: zeros(1, 0, 1, 16) for n in HALVES} | {"eta": zeros(1, 0, 1)}, "at least one token"),
        ({"k": zeros(1, 4, 1, 16).half()}, "float32, torch.float16, .* wanted one dtype"),
        ({"momentum": zeros(1, 1, 16, 16)}, "momentum came without theta"),
        ({"length": torch.ones(2)}, "length has shape .* axis B is 2 here and 1 elsewhere"),
        (
            {"length": torch.ones(1), "cu_seqlens": torch.tensor([0, 4])},
            "length and cu_seqlens both say where sequences end",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, words):
    inputs = {n: zeros(1, 4, 1, 16) for n in HALVES} | {"eta": zeros(1, 4, 1)}
    with pytest.raises(ValueError, match=words):
        linear_memory(**{"form": "fused", "chunk": 16} | inputs | change)


def test_what_kernels_refuse_the_parallel_form_takes():
    case = Case(tokens=20, window=18, chunk=8, features=5, values=3)
    assert_near(run(case, "parallel", draw(case), torch.float64), truth(case), 1e-10)
