"""Reasons against kernels, each by its cause, and that each is said once."""

import logging

import pytest
import torch

from atlas_lm.ops import backend
from atlas_lm.ops.backend import SAID, choose, say_once, why_not_triton

X = torch.zeros(2)


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    monkeypatch.setattr(backend, "_has_triton", lambda: True)


def test_without_triton(monkeypatch):
    monkeypatch.setattr(backend, "_has_triton", lambda: False)
    assert "not installed (pip install" in why_not_triton(X)


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_double_precision(monkeypatch, interpret):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert "fp64" in why_not_triton(X, X.double())


def test_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "need a CUDA device, and inputs are on cpu" in why_not_triton(X)


def test_under_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not_triton(X, X.half()) is None
    assert "bf16" in why_not_triton(X, X.bfloat16())


def test_under_the_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile" in why_not_triton(X)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert why_not_triton(X.to("cuda", dtype)) is None
    assert "need a CUDA device" in why_not_triton(X.cuda(), X)


def test_a_reason_is_said_once(caplog):
    SAID.clear()
    with caplog.at_level(logging.WARNING, logger="atlas_lm"):
        for reason in ("one", "two", "one", "two"):
            say_once(reason)
    assert [record.message for record in caplog.records] == ["one", "two"]
    SAID.clear()


def test_nothing_is_said_or_looked_up_while_the_compiler_traces(caplog):
    """Warnings are errors here, and Dynamo warns of caches that it has to look through."""

    @torch.compile(backend="eager", fullgraph=True)
    def double(x):
        say_once(why_not_triton(x))
        return 2 * x

    SAID.clear()
    with caplog.at_level(logging.WARNING, logger="atlas_lm"):
        assert torch.equal(double(X), X)
    assert not caplog.records
    assert not SAID


class OnDevice:
    """All of a tensor that a choice looks at."""

    def __init__(self, is_cuda):
        self.is_cuda = is_cuda


@pytest.mark.parametrize(
    ("form", "cuda", "reason", "chosen"),
    [
        ("auto", True, None, "fused"),
        ("auto", False, None, "parallel"),
        ("auto", True, "too wide", "parallel"),
        ("fused", False, None, "fused"),
        ("reference", True, None, "reference"),
    ],
)
def test_which_form_runs(form, cuda, reason, chosen, caplog):
    SAID.clear()
    forms = ("fused", "parallel", "reference")
    for _ in range(2):
        assert choose("op", form, forms, OnDevice(cuda), lambda: reason) == chosen
    said = [record.message for record in caplog.records]
    assert said == ([f"op runs its parallel form: {reason}"] if form == "auto" and reason else [])
    SAID.clear()


@pytest.mark.parametrize(("form", "chosen"), [("auto", "parallel"), ("fused", "fused")])
def test_what_is_not_proven_runs_by_name_only(form, chosen):
    SAID.clear()
    forms = ("fused", "parallel")
    assert choose("op", form, forms, OnDevice(True), lambda: None, "not seen right yet") == chosen
    assert ({"op runs its parallel form: not seen right yet"} if form == "auto" else set()) == SAID
    SAID.clear()


def test_a_form_that_cannot_run_is_refused():
    with pytest.raises(
        ValueError, match="op has no fused form here: too wide; use form='parallel'"
    ):
        choose("op", "fused", ("fused", "parallel"), X, lambda: "too wide")
    with pytest.raises(ValueError, match="form is 'fast', wanted 'auto' or one of fused, parallel"):
        choose("op", "fast", ("fused", "parallel"), X, lambda: None)
