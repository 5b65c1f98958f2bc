"""Which form runs: whether Triton kernels can run on some tensors, and a word where they cannot."""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Collection

import torch
from torch import Tensor

log = logging.getLogger("atlas_lm")
HALVES = (torch.bfloat16, torch.float16)
COMPILED_FOR = {"cuda"}  # types of device that run compiled kernels; tests emulate another
SAID: set[str] = set()  # what `say_once` has said


def why_not_triton(*tensors: Tensor) -> str | None:
    """Why Triton kernels cannot run on these tensors; None: they can."""
    if torch.compiler.is_compiling():
        return "torch.compile traces the parallel form"
    if not _has_triton():
        return "Triton is not installed (pip install atlas-lm[triton])"
    if any(x.dtype == torch.float64 for x in tensors):
        return "Triton kernels compute in fp32 and below, and inputs are fp64"
    if not interpreted() and any(x.device.type not in COMPILED_FOR for x in tensors):
        return f"Triton kernels need a CUDA device, and inputs are on {tensors[0].device.type}"
    if interpreted() and any(x.dtype == torch.bfloat16 for x in tensors):
        return "Triton's interpreter multiplies bf16 wrongly; use fp16 or fp32 there"
    return None


def choose(
    op: str,
    form: str,
    forms: Collection[str],
    like: Tensor,
    why_not: Callable[[], str | None],
    unproven: str | None = None,
) -> str:
    """The form that an op runs on tensors like this one: the one asked for, or for "auto" fused on a CUDA
    device unless something speaks against it, which is said once, else parallel.

    why_not: why the fused form cannot run   unproven: why it should not run unasked
    """
    if form not in ("auto", *forms):
        raise ValueError(f"form is {form!r}, wanted 'auto' or one of {', '.join(forms)}")
    if form not in ("auto", "fused"):
        return form
    if form == "auto" and not like.is_cuda:
        return "parallel"
    reason = why_not() or (unproven if form == "auto" else None)
    if form == "fused" and reason is not None:
        raise ValueError(f"{op} has no fused form here: {reason}; use form='parallel'")
    if reason is not None:
        say_once(f"{op} runs its parallel form: {reason}")
        return "parallel"
    return "fused"


def interpreted() -> bool:
    """Kernels run under Triton's interpreter, on the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def say_once(reason: str) -> None:
    """Warn, the first time. Nothing is said while torch.compile traces: what it traces has no log."""
    if not torch.compiler.is_compiling() and reason not in SAID:
        SAID.add(reason)
        log.warning(reason)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
