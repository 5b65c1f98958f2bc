"""Rows of this package: matrix memories, the exact delta rule, Newton-Schulz."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.kernel_bench.cases import Call, Case, Matrices, Tensors, Tokens
from benchmarks.kernel_bench.counts import (
    delta_flops,
    linear_flops,
    matrix_bytes,
    newton_schulz_flops,
    token_bytes,
)
from benchmarks.kernel_bench.inputs import delta_inputs, linear_inputs, matrix_inputs
from benchmarks.kernel_bench.peers import BASE, LONG, found

SMALL = Tokens(2, 131, states=True)
WINDOW = 16
STEPS = 5  # of Newton-Schulz
STACKS = (Matrices(4096, 64, 256), Matrices(8192, 64, 64))
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


# Truth is the parallel form in fp64, which the tests hold to the token-by-token reference; the reference
# itself takes ten seconds on a GPU at these lengths.


def linear(form: str, objective: str, keep: str) -> Call:
    def call(inputs: Tensors) -> Tensors:
        linear_memory = found("atlas_lm.ops.linear_memory", "linear_memory")
        y, state = linear_memory(**inputs, objective=objective, form=form, keep=keep)
        ends = dict(memory=state.memory, anchor=state.anchor)
        if "theta" in inputs:
            ends["momentum"] = state.momentum
        return {"y": y} | {f"end {n}": x for n, x in ends.items() if x is not None}

    return call


def linear_case(
    name: str,
    *,
    window: int = 1,
    momentum: bool = False,
    objective: str = "l2",
    keep: str = "states",
) -> Case:
    gates = 4 * (
        2 + momentum + (window if window > 1 else 0)
    )  # eta, log_alpha, theta, gamma in fp32
    return Case(
        name=f"linear_memory {name}",
        group="linear_memory",
        shapes=LONG,
        small=SMALL,
        draw=partial(linear_inputs, window=window, momentum=momentum),
        call=linear("fused", objective, keep),
        plain=linear("parallel", objective, "states"),
        truth=linear("parallel", objective, "states"),
        flops=partial(linear_flops, window=window, momentum=momentum, dot=objective == "dot"),
        bytes=partial(token_bytes, gates=gates),
        base=BASE,
    )


def delta(form: str, after_retention: bool) -> Call:
    def call(inputs: Tensors) -> Tensors:
        delta_rule = found("atlas_lm.ops.delta_rule", "delta_rule")
        y, memory = delta_rule(**inputs, after_retention=after_retention, form=form)
        return {"y": y, "end memory": memory}

    return call


def delta_case(window: int, *, after_retention: bool = False) -> Case:
    return Case(
        name=f"delta_rule window {window}",
        group="delta_rule",
        shapes=LONG,
        small=SMALL,
        draw=partial(delta_inputs, window=window),
        call=delta("fused", after_retention),
        plain=delta("parallel", after_retention),
        truth=delta("parallel", after_retention),
        flops=partial(delta_flops, window=window),
        bytes=partial(token_bytes, gates=4 * (2 + (window if window > 1 else 0))),
        base=BASE,
    )


def newton_schulz(form: str) -> Call:
    def call(inputs: Tensors) -> Tensors:
        function = found("atlas_lm.ops.newton_schulz", "newton_schulz")
        return {"x": function(inputs["matrix"], STEPS, form=form)}

    return call


@cache
def compiled_newton_schulz() -> Callable[..., Tensor]:
    """The plain form through torch.compile, once for each shape."""
    function = found("atlas_lm.ops.newton_schulz", "newton_schulz")
    return torch.compile(partial(function, steps=STEPS, form="parallel"), dynamic=False)


def compiled(inputs: Tensors) -> Tensors:
    return {"x": compiled_newton_schulz()(inputs["matrix"])}


def newton_schulz_case(kind: str, dtype: torch.dtype) -> Case:
    """kind: fused, plain (PyTorch as it is, the base), or compiled (the same through torch.compile)."""
    plain = newton_schulz("parallel")
    calls = {"fused": newton_schulz("fused"), "plain": plain, "compiled": compiled}
    return Case(
        name=f"newton_schulz {kind} {SHORT[dtype]}",
        group="compiled" if kind == "compiled" else "newton_schulz",
        shapes=STACKS,
        small=Matrices(5, 64, 256),
        draw=partial(matrix_inputs, dtype=dtype),
        call=calls[kind],
        plain=plain,
        truth=plain,
        flops=partial(newton_schulz_flops, steps=STEPS),
        bytes=partial(matrix_bytes, element=dtype.itemsize),
        base=f"newton_schulz plain {SHORT[dtype]}",
        dtype=dtype,
        peer=kind != "fused",
    )


OURS: tuple[Case, ...] = (
    linear_case("descent"),
    linear_case("descent (checkpoints)", keep="checkpoints"),
    linear_case("momentum", momentum=True),
    linear_case(f"window {WINDOW}", window=WINDOW),
    linear_case(f"window {WINDOW} + momentum", window=WINDOW, momentum=True),
    linear_case("dot", objective="dot"),
    delta_case(1, after_retention=True),
    delta_case(2),
    delta_case(4),
    *(
        newton_schulz_case(kind, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for kind in ("plain", "fused")
    ),
)
COMPILED = (newton_schulz_case("compiled", torch.bfloat16),)
