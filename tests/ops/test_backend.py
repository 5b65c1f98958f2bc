"""Reasons against kernels, each by its cause, and that each is said once."""

import logging

import pytest
import torch

from atlas_lm.ops import backend
from atlas_lm.ops.backend import choose, say_once, unproven, why_not_triton

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
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="atlas_lm"):
        for reason in ("one", "two", "one", "two"):
            say_once(reason)
    assert [record.message for record in caplog.records] == ["one", "two"]
    say_once.cache_clear()


def test_wide_keys_take_no_kernel_unasked():
    assert unproven(128) is None
    assert "keys have 129 features" in unproven(129) and "form='fused'" in unproven(129)


class OnDevice:
    """All of a tensor that a choice looks at."""

    def __init__(self, is_cuda):
        self.is_cuda = is_cuda


@pytest.mark.parametrize(
    ("form", "cuda", "reason", "unasked", "chosen"),
    [
        ("auto", True, None, None, "fused"),
        ("auto", False, None, None, "parallel"),
        ("auto", True, "too wide", None, "parallel"),
        ("auto", True, None, "never seen right", "parallel"),
        ("fused", False, None, "never seen right", "fused"),
        ("reference", True, None, None, "reference"),
    ],
)
def test_which_form_runs(form, cuda, reason, unasked, chosen, caplog):
    say_once.cache_clear()
    forms = ("fused", "parallel", "reference")
    for _ in range(2):
        assert choose("op", form, forms, OnDevice(cuda), lambda: reason, unasked) == chosen
    said = [record.message for record in caplog.records]
    wanted = reason or unasked
    assert said == ([f"op runs its parallel form: {wanted}"] if form == "auto" and wanted else [])
    say_once.cache_clear()


def test_a_form_that_cannot_run_is_refused():
    with pytest.raises(
        ValueError, match="op has no fused form here: too wide; use form='parallel'"
    ):
        choose("op", "fused", ("fused", "parallel"), X, lambda: "too wide")
    with pytest.raises(ValueError, match="form is 'fast', wanted 'auto' or one of fused, parallel"):
        choose("op", "fast", ("fused", "parallel"), X, lambda: None)
