"""Two-layer memories with a chunk anchor: the token loop against autograd, the other forms against it."""

import pytest
import torch

from tests.ops.judging import assert_near
from tests.ops.mlp_cases import DRAWS, Case, assert_twice_plain, draw, named, run

pytest.importorskip("triton", reason="the fused form is written in Triton")

CASES = [
    Case(tokens=1),
    Case(tokens=17, window=4, momentum=True, start=True, heads=2),
    Case(tokens=40, gated=True, features=24, values=20, hidden=48, heads=3),
    Case(tokens=40, window=17, momentum=True, gated=True, start=True),
    Case(tokens=40, window=20, chunk=32, momentum=True, decays=False, heads=2),
    Case(tokens=40, window=4, objective="dot", gated=True, activation="silu", heads=2),
    Case(
        tokens=20,
        window=4,
        momentum=True,
        batch=2,
        before=3,
        past=(2, 3),
        length=(20, 7),
        start=True,
    ),
    Case(tokens=20, window=17, batch=2, before=3, past=(0, 3), length=(0, 18)),
    Case(window=4, momentum=True, borders=(0, 5, 22, 40)),
    Case(tokens=33, features=70, values=24, chunk=32, window=2, start=True),
    Case(tokens=34, features=130, momentum=True, gated=True, start=True, hidden=48),
    Case(tokens=34, features=130, window=4, hidden=48),
    Case(tokens=40, window=4, norm=True, gated=True, start=True, heads=2),
    Case(tokens=33, norm=True, momentum=True, objective="dot", length=(33, 5), batch=2),
]
MUON = [
    Case(tokens=32, period=16),
    Case(tokens=41, period=4, window=4, start=True, heads=2),
    Case(
        tokens=40,
        period=16,
        window=17,
        chunk=32,
        gated=True,
        features=24,
        values=20,
        hidden=48,
        heads=2,
    ),
    Case(tokens=40, period=8, norm=True, window=4, heads=2),
    Case(tokens=4, period=1, objective="dot", decays=False, batch=2),
    Case(
        tokens=33,
        period=8,
        gated=True,
        start=True,
        activation="silu",
        window=4,
        borders=(0, 5, 6, 33),
    ),
    Case(
        tokens=20,
        period=8,
        window=4,
        batch=3,
        before=3,
        past=(2, 3, 0),
        length=(20, 7, 0),
        start=True,
    ),
]


@pytest.mark.parametrize("case", CASES + MUON, ids=named)
def test_parallel_is_the_token_loop(case):
    found, wanted = (
        run(case, form, draw(case), torch.float64) for form in ("parallel", "reference")
    )
    assert_near(found, wanted, 1e-10)


@pytest.mark.parametrize("case", CASES + MUON, ids=named)
def test_fused_is_as_good_as_plain(case):
    # gates gather their gradients from the most sums where all of this comes together
    scattered = case.period or (case.momentum and case.gated)
    assert_twice_plain(case, torch.float32, draws=DRAWS if scattered else 1)


@pytest.mark.parametrize("case", CASES[6:9], ids=named)
def test_the_backward_pass_may_go_in_parts(case, monkeypatch):
    """One sequence after the other gives the same bits."""
    from atlas_lm.ops.mlp_memory import launch

    inputs = draw(case)
    whole = run(case, "fused", inputs, torch.float32)
    monkeypatch.setattr(launch, "PROGRAMS", 1)
    for name, parts in run(case, "fused", inputs, torch.float32).items():
        if name.startswith("dstart"):
            torch.testing.assert_close(parts, whole[name])  # a sum over sequences
        else:
            assert torch.equal(parts, whole[name]), name


# gradients of retention are sums over a whole memory, which borders have in halves and plain PyTorch in fp32:
# those of wide memories in few tokens are up to five times as far off (docs/kernels.md, section 2)
HALF = [case for case in CASES if (case.momentum or case.gated) and case.features < 100] + MUON


@pytest.mark.parametrize("case", HALF, ids=named)
def test_half_precision_is_as_good_as_plain(case):
    """fp16, since Triton's interpreter cannot multiply bf16; bf16 is compared on the device."""
    assert_twice_plain(case, torch.float16, draws=DRAWS if case.period else 2)
