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
PROVEN = 128  # features of a key up to which the kernels of many tokens were seen right on a device
COMPILED_FOR = {"cuda"}  # types of device that run compiled kernels; tests emulate another


def why_not_triton(*tensors: Tensor) -> str | None:
    """Why Triton kernels cannot run on these tensors; None: they can."""
    if not _has_triton():
        return "Triton is not installed (pip install atlas-lm[triton])"
    if any(x.dtype == torch.float64 for x in tensors):
        return "Triton kernels compute in fp32 and below, and inputs are fp64"
    if not interpreted() and any(x.device.type not in COMPILED_FOR for x in tensors):
        return f"Triton kernels need a CUDA device, and inputs are on {tensors[0].device.type}"
    if interpreted() and any(x.dtype == torch.bfloat16 for x in tensors):
        return "Triton's interpreter multiplies bf16 wrongly; use fp16 or fp32 there"
    if torch.compiler.is_compiling():
        return "torch.compile traces the parallel form"
    return None


def unproven(features: int) -> str | None:
    """Why kernels of many tokens are not taken unasked for so many features of a key; None: they are."""
    if features <= PROVEN:
        return None
    return (
        f"keys have {features} features, and beyond {PROVEN} Triton 3.6 compiled some kernels wrongly "
        "(docs/kernels.md); ask for form='fused' to take them all the same"
    )


def choose(
    op: str,
    form: str,
    forms: Collection[str],
    like: Tensor,
    why_not: Callable[[], str | None],
    unasked: str | None = None,
) -> str:
    """The form that an op runs on tensors like this one: the one asked for, or for "auto" fused on a CUDA
    device unless something speaks against it, which is said once, else parallel.

    why_not: why the fused form cannot run   unasked: why it should run only where it is asked for
    """
    if form not in ("auto", *forms):
        raise ValueError(f"form is {form!r}, wanted 'auto' or one of {', '.join(forms)}")
    if form not in ("auto", "fused"):
        return form
    if form == "auto" and not like.is_cuda:
        return "parallel"
    reason = why_not()
    if form == "fused" and reason is not None:
        raise ValueError(f"{op} has no fused form here: {reason}; use form='parallel'")
    if form == "auto" and (reason := reason or unasked):
        say_once(f"{op} runs its parallel form: {reason}")
        return "parallel"
    return "fused"


def interpreted() -> bool:
    """Kernels run under Triton's interpreter, on the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def say_once(reason: str) -> None:
    log.warning(reason)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
