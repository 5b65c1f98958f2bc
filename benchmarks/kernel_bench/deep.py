"""Rows of memories with two layers: the fused form, and the plain one as PyTorch runs and compiles it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernel_bench.cases import Call, Case, Passes, Tensors, Tokens
from benchmarks.kernel_bench.counts import mlp_bytes, mlp_flops, muon_flops
from benchmarks.kernel_bench.inputs import mlp_inputs
from benchmarks.kernel_bench.peers import BASE, found

SIZES = dict(heads=16, features=64, values=64, hidden=256)
LONG = (Tokens(16, 4096, **SIZES), Tokens(1, 65536, **SIZES))
SMALL = Tokens(2, 131, heads=16, features=64, values=64, hidden=256, states=True)
WIDE = 160  # features of polynomials of 16 numbers, in sixteens
WINDOW = 16
STATES = ("memory", "momentum", "start")


@dataclass(frozen=True)
class Rule:
    """What sets a row apart. It is as wide as its values, and skips, unless features are given."""

    window: int = 1
    momentum: bool = False
    gated: bool = False
    start: bool = False
    period: int = 0  # of Muon, 0 for none
    features: int = SIZES["features"]

    @property
    def moving(self) -> bool:
        """Whether there is a momentum."""
        return self.momentum or self.period > 0

    def at(self, shape: Tokens) -> Tokens:
        return replace(shape, features=self.features)

    def draw(self, shape: Tokens, device: torch.device) -> Tensors:
        return mlp_inputs(
            shape,
            device,
            window=self.window,
            momentum=self.momentum,
            gated=self.gated,
            start=self.start,
            period=self.period,
        )

    def flops(self, shape: Tokens) -> Passes:
        kind = dict(window=self.window, gated=self.gated, start=self.start)
        if self.period:
            return muon_flops(shape, period=self.period, **kind)
        return mlp_flops(shape, momentum=self.momentum, **kind)

    def bytes(self, shape: Tokens) -> Passes:
        """Of gates: eta, log_alpha, theta, gamma in fp32."""
        gates = 2 + self.moving + (self.window if self.window > 1 else 0)
        return mlp_bytes(shape, gates=4 * gates, momentum=self.moving, gated=self.gated)


def run(inputs: Tensors, *, period: int, form: str) -> Tensors:
    mlp_memory, weights_of, muon = (
        found("atlas_lm.ops.mlp_memory", name) for name in ("mlp_memory", "Weights", "Muon")
    )
    given: dict[str, Any] = {n: x for n, x in inputs.items() if "." not in n}
    for state in STATES:
        weights = {n.split(".")[1]: x for n, x in inputs.items() if n.startswith(f"{state}.")}
        if weights:
            given[state] = weights_of(**weights)
    skip = inputs["q"].shape[-1] == inputs["v"].shape[-1]
    y, ends = mlp_memory(
        **given, skip=skip, muon=muon(period=period) if period else None, form=form
    )
    return {"y": y} | dict(leaves(ends))


def leaves(ends: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a state by name."""
    states = {n: weights for n, weights in ends._asdict().items() if weights is not None}
    return [
        (f"end {state}.{n}", w)
        for state, weights in states.items()
        for n, w in weights._asdict().items()
        if w is not None
    ]


@cache
def compiled_run(period: int) -> Callable[[Tensors], Tensors]:
    """The plain form through torch.compile: its loop stays a loop, what is compiled is a chunk."""
    return torch.compile(partial(run, period=period, form="parallel"), dynamic=False)


@cache
def uncompiled() -> tuple[Any, Callable[..., Any]]:
    """Where the coefficients of all chunks are computed, and the function kept from the compiler: 64 steps
    that would become one graph of thousands of nodes."""
    module = importlib.import_module("atlas_lm.ops.mlp_memory.parallel")
    return module, torch.compiler.disable(module.chunk_weights_reference)


def compiled(period: int) -> Call:
    def call(inputs: Tensors) -> Tensors:
        module, coefficients = uncompiled()
        with patch.object(module, "chunk_weights_reference", coefficients):
            return compiled_run(period)(inputs)

    return call


def let_go() -> None:
    compiled_run.cache_clear()
    torch.compiler.reset()


def deep_case(name: str, rule: Rule) -> Case:
    plain = partial(run, period=rule.period, form="parallel")
    return Case(
        name=f"mlp_memory {name}",
        group="mlp_memory",
        shapes=tuple(map(rule.at, LONG)),
        small=rule.at(SMALL),
        draw=rule.draw,
        call=partial(run, period=rule.period, form="fused"),
        plain=plain,
        truth=plain,
        flops=rule.flops,
        bytes=rule.bytes,
        base=BASE,
    )


def plain_case(name: str, rule: Rule, *, by_compiler: bool) -> Case:
    """The yardstick itself. At 1 x 65536 its loop takes a second and more, so --shapes must ask for that."""
    plain = partial(run, period=rule.period, form="parallel")
    kind = "compiled" if by_compiler else "plain"
    return Case(
        name=f"mlp_memory {kind} {name}",
        group="deep_peers",
        shapes=(rule.at(LONG[0]),),
        small=rule.at(SMALL),
        draw=rule.draw,
        call=compiled(rule.period) if by_compiler else plain,
        plain=plain,
        truth=plain,
        flops=rule.flops,
        bytes=rule.bytes,
        base=BASE,
        release=let_go if by_compiler else lambda: None,
        peer=True,
    )


OMEGA, JUMPS = Rule(window=WINDOW), Rule(period=64)

DEEP: tuple[Case, ...] = (
    deep_case("descent", Rule()),
    deep_case("momentum", Rule(momentum=True)),
    deep_case(f"window {WINDOW}", OMEGA),
    deep_case(f"window {WINDOW} + momentum", Rule(window=WINDOW, momentum=True)),
    deep_case(f"window {WINDOW} + start", Rule(window=WINDOW, start=True)),
    deep_case(f"{WIDE} features", Rule(window=WINDOW, momentum=True, start=True, features=WIDE)),
    deep_case(f"gated window {WINDOW}", Rule(window=WINDOW, gated=True)),
    deep_case("muon 64", JUMPS),
    deep_case("gated muon 64", Rule(period=64, gated=True)),
    deep_case("muon 16", Rule(period=16)),
)
PLAIN: tuple[Case, ...] = tuple(
    plain_case(name, rule, by_compiler=by_compiler)
    for by_compiler in (False, True)
    for name, rule in ((f"window {WINDOW}", OMEGA), ("muon 64", JUMPS))
)
