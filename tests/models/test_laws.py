"""Whole models of every block x rule are held to the laws of a causal memory, gradients included."""

import pytest
import torch

from atlas_lm.doctor import judge
from atlas_lm.doctor.laws import LAWS
from atlas_lm.doctor.model_subject import ModelSubject
from tests.models.builders import KINDS, SHORT, small_model

# where an error would hide below the rounding of fp32
SHARP = ("cuts", "padding", "packing")
# two segments of 9, three chunks of 6, three windows of 7, and a rest of each; few enough for every cut
TOKENS = 23


def subject(block: str, rule: str, dtype: torch.dtype) -> ModelSubject:
    return ModelSubject(name=block, model=small_model(block, rule), dtype=dtype, length=TOKENS)


# sharp laws on one of each block: fp64 holds all kinds to them, with a limit ten thousand times as strict
IN_FP32 = [(*kind, law) for kind in KINDS for law in LAWS if law not in SHARP or kind in SHORT]


@pytest.mark.parametrize(("block", "rule", "law"), IN_FP32, ids=str)
def test_in_fp32(block: str, rule: str, law: str) -> None:
    verdict = judge(subject(block, rule, torch.float32), law)
    assert verdict.status == "holds", verdict


@pytest.mark.parametrize("law", SHARP)
@pytest.mark.parametrize(("block", "rule"), KINDS, ids=str)
def test_in_fp64(block: str, rule: str, law: str) -> None:
    verdict = judge(subject(block, rule, torch.float64), law)
    assert verdict.status == "holds" and (verdict.limit or 1) < 1e-8, verdict


def test_hybrids_of_several_blocks() -> None:
    model = small_model(["lmm", "sliding", "mac"], "omeganet", num_hidden_layers=3)
    hybrid = ModelSubject(name="hybrid", model=model, dtype=torch.float64, length=TOKENS)
    for law in ("causality", "cuts", "padding", "save_load"):
        verdict = judge(hybrid, law)
        assert verdict.status == "holds", verdict


def test_the_doctor_sees_a_model_that_reads_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("lmm", "titans")
    gates = model.model.layers[0].mixer.memory.gates
    ahead = type(gates).forward
    monkeypatch.setattr(gates, "forward", lambda x: ahead(gates, x.roll(-1, dims=1)))
    assert judge(ModelSubject(name="ahead", model=model), "causality").status == "broken"
    assert judge(ModelSubject(name="ahead", model=model), "cuts").status == "broken"
