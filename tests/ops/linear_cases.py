"""Cases of a matrix memory with a chunk anchor, run by any form, and two ways to judge them."""

import contextlib
import dataclasses
import functools
import warnings

import torch

from atlas_lm.ops.linear_memory import linear_memory
from tests.builders import gradients, leaf, seeded
from tests.ops.judging import assert_within_twice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = ("q", "k", "v")  # inputs in the dtype of the case; gates and states are fp32
# beside twice the plain error, a tenth of a rounding, in fp32 two: gradients of few gates scatter
SLACK = {torch.float32: 1.2e-7, torch.float16: 5e-5, torch.bfloat16: 4e-4}


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int = 40
    chunk: int = 16
    window: int = 1
    momentum: bool = False
    features: int = 16
    values: int = 16
    heads: int = 1
    batch: int = 1
    objective: str = "l2"
    before: int = 0  # pairs in front of each row
    past: tuple[int, ...] | None = None
    length: tuple[int, ...] | None = None
    borders: tuple[int, ...] | None = None
    keep: str = "states"
    decays: bool = True
    warm: bool = True

    def options(self):
        rows = {"past": self.past, "length": self.length, "cu_seqlens": self.borders}
        rows = {n: x and torch.tensor(x, device=DEVICE) for n, x in rows.items()}
        return rows | {"chunk": self.chunk, "objective": self.objective, "keep": self.keep}


def named(case):
    """What differs from the plain case."""
    fields = dataclasses.asdict(case).items()
    changed = [f"{n}={x}" for n, x in fields if x != getattr(Case(), n)]
    return " ".join(changed) or "plain"


def draw(case, dtype=torch.float16):
    """Inputs by name in fp64, exact in the dtype in which they will be given; fp32 takes those of fp16."""
    dtype = torch.float16 if dtype == torch.float32 else dtype
    generator = seeded(case.tokens + case.window)
    rows = (case.batch, case.tokens, case.heads)
    pairs = (case.batch, case.before + case.tokens, case.heads)
    count = case.batch if case.borders is None else len(case.borders) - 1
    states = (count, case.heads, case.values, case.features)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    drawn = {
        "q": torch.nn.functional.normalize(normal(*rows, case.features), dim=-1),
        "k": torch.nn.functional.normalize(normal(*pairs, case.features), dim=-1),
        "v": normal(*pairs, case.values),
        "eta": uniform(0.05, 0.3, *rows),
        "log_alpha": uniform(-0.2, 0, *rows) if case.decays else None,
        "theta": uniform(0.2, 0.95, *rows) if case.momentum else None,
        "gamma": uniform(0.2, 1, *rows, case.window) / case.window if case.window > 1 else None,
        "memory": normal(*states) if case.warm else None,
        "momentum": normal(*states) / 4 if case.warm and case.momentum else None,
    }
    given = {n: x for n, x in drawn.items() if x is not None}
    return {n: x.to(dtype if n in HALVES else x.dtype).double() for n, x in given.items()}


def run(case, form, inputs, dtype, outputs=("y", "memory", "anchor", "momentum")):
    """All outputs by name, and the gradients of a loss over `outputs`."""
    wide = torch.promote_types(dtype, torch.float32)
    given = {n: leaf(x.to(DEVICE, dtype if n in HALVES else wide)) for n, x in inputs.items()}
    with poisoned() if form == "fused" else contextlib.nullcontext():
        y, state = linear_memory(**given, **case.options(), form=form)
        found = {"y": y} | {n: x for n, x in state._asdict().items() if x is not None}
        assert y.dtype == dtype and state.memory.dtype == wide
        loss = sum(weighed(found[n], n) for n in outputs if n in found)
        grads = gradients(loss, given)
    return {n: x.detach() for n, x in found.items()} | {f"d{n}": g for n, g in grads.items()}


@contextlib.contextmanager
def poisoned():
    """Freshly allocated memory holds NaN, so that a cell read before it is written shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def weighed(x, name):
    weights = torch.randn(x.shape, generator=seeded(len(name)), dtype=torch.float64)
    return (x * weights.to(x.device, x.dtype)).sum()


@functools.cache
def truth(case):
    return run(case, "reference", draw(case), torch.float64)


def assert_twice_plain(case, dtype, wanted):
    """Every error at most twice that of the plain form in the same dtype. Returns the fused results."""
    plain, fused = (run(case, form, draw(case, dtype), dtype) for form in ("parallel", "fused"))
    assert_within_twice(fused, plain, wanted, SLACK[dtype])
    return fused
