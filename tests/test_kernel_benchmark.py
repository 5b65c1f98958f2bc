"""The benchmark of kernels counts right, times nothing that is wrong, and goes on when a case breaks."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from atlas_lm.ops.newton_schulz import newton_schulz
from benchmarks import kernels
from benchmarks.kernel_bench import counts, report
from benchmarks.kernel_bench.cases import Case, Matrices, Passes, Tokens, pick, reshape
from benchmarks.kernel_bench.checking import check
from benchmarks.kernel_bench.inputs import delta_inputs, learned, linear_inputs, matrix_inputs
from benchmarks.kernel_bench.measuring import Limits, ceilings
from benchmarks.kernel_bench.plot import plot

CPU = torch.device("cpu")
TINY = Tokens(1, 64, heads=1, features=8, values=4)


def counted(run):
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


def one_chunk(window, momentum, dot):
    """The products of a chunk as PyTorch does them, forward, and with the gradients of everything."""
    b, n, f, v = 64, 64 + window - 1, TINY.features, TINY.values
    shapes = dict(
        q=(b, f), k=(n, f), v=(n, v), mix=(b, n), tail=(n, 1), memory=(v, f), moved=(v, f)
    )
    x = learned(**{name: torch.rand(shape) for name, shape in shapes.items()})

    def forward():
        errors = -x["v"] if dot else x["k"] @ x["memory"].T - x["v"]
        y = x["q"] @ x["memory"].T + (x["mix"] * (x["q"] @ x["k"].T)) @ errors
        ends = [(x["tail"] * errors).T @ x["k"] for _ in range(2 if momentum else 1)]
        return [y + x["q"] @ x["moved"].T if momentum else y, *ends]

    def both():
        outputs = forward()
        torch.autograd.grad(
            outputs, list(x.values()), [y.detach() for y in outputs], allow_unused=True
        )

    return Passes(counted(forward), counted(both))


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("dot", [False, True])
def test_flops_of_a_chunk(window, momentum, dot):
    options = dict(window=window, momentum=momentum, dot=dot)
    assert counts.linear_flops(TINY, **options) == one_chunk(**options)


def test_flops_of_many_chunks_and_heads():
    many = Tokens(3, 130, heads=2, features=8, values=4)
    assert counts.linear_flops(many).both == 3 * 2 * 3 * counts.linear_flops(TINY).both


def test_flops_of_newton_schulz():
    matrix = torch.rand(3, 4, 6)
    shape = Matrices(3, 4, 6)
    assert counts.newton_schulz_flops(shape, steps=5).forward == counted(
        lambda: newton_schulz(matrix, 5)
    )


def test_flops_of_attention():
    pairs = sum(1 for t in range(TINY.tokens) for i in range(TINY.tokens) if i <= t)
    each = 2 * (TINY.features + TINY.values)
    assert counts.attention_flops(TINY).forward == pairs * each


@pytest.mark.parametrize("window", [1, 4])
def test_bytes_are_those_of_the_tensors(window):
    shape = Tokens(2, 65, heads=2, features=8, values=4)
    inputs = linear_inputs(shape, CPU, window=window, momentum=True)
    read = sum(x.nbytes for x in inputs.values())
    y = inputs["v"].nbytes
    gates = 4 * (3 + (window if window > 1 else 0))
    assert counts.token_bytes(shape, gates=gates) == (read + y, 3 * read + 2 * y)
    matrix = matrix_inputs(Matrices(3, 4, 6), CPU, dtype=torch.bfloat16)["matrix"]
    assert counts.matrix_bytes(Matrices(3, 4, 6), element=2) == (
        2 * matrix.nbytes,
        5 * matrix.nbytes,
    )


def test_inputs_stay_where_models_train():
    inputs = delta_inputs(Tokens(1, 32, heads=2, features=8, values=4), CPU, window=4)
    assert torch.allclose(inputs["k"].float().norm(dim=-1), torch.ones(1, 32, 2), atol=0.02)
    assert inputs["log_alpha"].max() < 0 and inputs["gamma"].max() < 1 / 4


class Doubling(torch.autograd.Function):
    """y = 2 q, with a slope that can be wrong."""

    @staticmethod
    def forward(ctx, q, slope):
        ctx.slope = slope
        return 2 * q

    @staticmethod
    def backward(ctx, dy):
        return ctx.slope * dy, None


def fake(name, call, **changes):
    return Case(
        **dict(
            name=name,
            group="fake",
            shapes=(Tokens(1, 64), Tokens(1, 32)),
            small=Tokens(1, 7),
            draw=lambda shape, device: learned(
                q=torch.rand(shape.tokens, device=device).bfloat16()
            ),
            call=call,
            plain=lambda inputs: {"y": inputs["q"] + inputs["q"]},
            truth=lambda inputs: {"y": inputs["q"] + inputs["q"]},
            flops=lambda shape: Passes(shape.tokens, 3 * shape.tokens),
            bytes=lambda shape: Passes(4 * shape.tokens, 10 * shape.tokens),
            base="right",
        )
        | changes
    )


def doubling(slope):
    return lambda inputs: {"y": Doubling.apply(inputs["q"], slope)}


def broken(inputs):
    raise RuntimeError("out of luck\nat length")


def absent(inputs):
    import a_package_that_nobody_has  # noqa: F401


RIGHT = fake("right", doubling(2.0))
FAKES = [
    RIGHT,
    fake("wrong", doubling(2.1)),
    fake("wrong peer", doubling(2.1), peer=True),
    fake("doubtful peer", doubling(2.1), peer=True, caution=lambda: "known to be wrong"),
    fake("broken", broken),
    fake("absent", absent),
    fake("one way", lambda inputs: {"y": 2 * inputs["q"]}, backward=False),
]


@pytest.fixture(scope="module")
def bench():
    return kernels.Bench(CPU, ceilings(CPU), Limits(repeats=5, seconds=0.01))


@pytest.fixture(scope="module")
def figures(bench):
    return report.with_ratios(list(bench.run(FAKES)))


@pytest.fixture(scope="module")
def machine(bench):
    return report.describe(CPU, bench.ceilings, "abc123")


def test_only_what_is_right_is_timed(figures):
    found = {figure.case: figure.status for figure in figures}
    assert found == {
        "right": "timed",
        "wrong": "refused",
        "wrong peer": "timing only",
        "doubtful peer": "timing only",
        "broken": "failed",
        "absent": "missing",
        "one way": "timed",
    }
    refused = next(figure for figure in figures if figure.case == "wrong")
    assert "slope of q is off by" in refused.note
    assert refused.forward_ms is None and refused.both_ms is None


def test_nan_does_not_pass():
    assert not check(fake("nan", lambda inputs: {"y": inputs["q"] * torch.nan}), CPU).passed


def test_an_output_that_is_missing_is_an_error():
    case = fake("half", doubling(2.0), truth=lambda inputs: {"y": inputs["q"], "z": inputs["q"]})
    with pytest.raises(ValueError, match="wanted"):
        check(case, CPU)


def test_failures_say_why_in_one_line(figures):
    notes = {figure.case: figure.note for figure in figures}
    assert notes["broken"] == "RuntimeError: out of luck"
    assert "a_package_that_nobody_has" in notes["absent"]


def test_ratios_and_shares_follow_from_the_times(figures, bench):
    rows = [figure for figure in figures if figure.timed]
    bases = {figure.shape: figure for figure in rows if figure.case == "right"}
    for row in rows:
        assert row.forward_ratio == pytest.approx(bases[row.shape].forward_ms / row.forward_ms)
        tokens = int(row.shape.split("x")[1])
        floor = max(
            tokens / bench.ceilings.matrix[torch.bfloat16], 4 * tokens / bench.ceilings.bandwidth
        )
        assert row.forward_share == pytest.approx(1e3 * floor / row.forward_ms)
        assert row.forward_rate == pytest.approx(tokens / row.forward_ms / 1e3)
    assert all((row.both_ms is None) == (row.case == "one way") for row in rows)


def test_after_the_budget_nothing_is_begun(bench):
    late = kernels.Bench(CPU, bench.ceilings, bench.limits, deadline=0.0)
    assert [row.status for row in late.run([RIGHT])] == ["skipped"]


def test_after_the_device_is_lost_nothing_is_begun(bench, monkeypatch):
    def lost(self, case, where, trouble):
        raise kernels.DeviceLost("gone")

    monkeypatch.setattr(kernels.Bench, "trouble", lost)
    rows = list(bench.run([fake("broken", broken), RIGHT]))
    assert [(row.status, "gone" in row.note) for row in rows] == [
        ("failed", True),
        ("skipped", True),
    ]


def test_the_file_gives_back_what_was_saved(figures, machine, tmp_path):
    report.save(tmp_path / "deep" / "kernels.csv", figures, machine)
    assert report.load(tmp_path / "deep" / "kernels.csv") == (figures, machine)


def test_the_table_has_all_rows_and_fits(figures):
    text = report.table(figures)
    assert max(map(len, text.splitlines())) <= 200
    assert all(figure.case in text for figure in figures)
    assert "refused: wrong" in text


def test_the_plot_is_written(figures, machine, tmp_path):
    pytest.importorskip("matplotlib")
    plot(figures, machine, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_cases_have_names_of_their_own_bases_that_exist_and_a_check():
    names = [case.name for case in kernels.CASES]
    assert len(set(names)) == len(names)
    assert {case.base for case in kernels.CASES} <= set(names)
    assert all(case.small is not None and case.truth is not None for case in kernels.CASES)
    assert all(case.plain is not None for case in kernels.CASES if not case.peer)


def test_cases_are_picked_and_reshaped():
    assert [case.name for case in pick(FAKES, ["broken", "right"])] == ["right", "broken"]
    with pytest.raises(ValueError, match="no case or group 'left'"):
        pick(FAKES, ["left"])
    assert [shape.label for shape in reshape(RIGHT, [(2, 8)]).shapes] == ["2x8"]
    chosen = kernels.wanted(["base,delta_rule window 2"], "2x128")
    assert [(case.name, case.shapes[0].label) for case in chosen] == [
        ("fla gated_delta_rule", "2x128"),
        ("delta_rule window 2", "2x128"),
    ]
