"""Whole models of every block x rule are held to the laws of a causal memory, gradients included."""

import pytest
import torch

from atlas_lm.doctor import judge
from atlas_lm.doctor.laws import LAWS
from atlas_lm.doctor.model_subject import ModelSubject
from tests.models.builders import KINDS, small_model

# where an error would hide below the rounding of fp32
SHARP = ("cuts", "padding", "packing")


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("block", "rule"), KINDS, ids=str)
def test_in_fp32(block: str, rule: str, law: str) -> None:
    verdict = judge(ModelSubject(name=block, model=small_model(block, rule)), law)
    assert verdict.status == "holds", verdict


@pytest.mark.parametrize("law", SHARP)
@pytest.mark.parametrize(("block", "rule"), KINDS, ids=str)
def test_in_fp64(block: str, rule: str, law: str) -> None:
    subject = ModelSubject(name=block, model=small_model(block, rule), dtype=torch.float64)
    verdict = judge(subject, law)
    assert verdict.status == "holds" and (verdict.limit or 1) < 1e-8, verdict


def test_hybrids_of_several_blocks() -> None:
    model = small_model(["lmm", "sliding", "mac"], "omeganet", num_hidden_layers=3)
    for law in ("causality", "cuts", "padding", "save_load"):
        verdict = judge(ModelSubject(name="hybrid", model=model, dtype=torch.float64), law)
        assert verdict.status == "holds", verdict


def test_the_doctor_sees_a_model_that_reads_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("lmm", "titans")
    gates = model.model.layers[0].mixer.memory.gates
    ahead = type(gates).forward
    monkeypatch.setattr(gates, "forward", lambda x: ahead(gates, x.roll(-1, dims=1)))
    assert judge(ModelSubject(name="ahead", model=model), "causality").status == "broken"
    assert judge(ModelSubject(name="ahead", model=model), "cuts").status == "broken"
