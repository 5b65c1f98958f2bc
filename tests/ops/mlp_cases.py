"""Cases of a two-layer memory with a chunk anchor, run by any form."""

import contextlib
import dataclasses

import torch

from atlas_lm.ops.mlp_memory import Muon, Norm, Weights, mlp_memory
from tests.builders import gradients, leaf, seeded
from tests.ops.judging import assert_within_twice
from tests.ops.linear_cases import DEVICE, HALVES, SLACK, poisoned, weighed

DRAWS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int = 40
    chunk: int = 16
    window: int = 1
    momentum: bool = False
    gated: bool = False
    start: bool = False
    norm: bool = False
    features: int = 16
    hidden: int = 32
    values: int = 16
    heads: int = 1
    batch: int = 1
    objective: str = "l2"
    activation: str = "gelu"
    period: int = 0  # of Muon; 0: none
    before: int = 0  # pairs in front of each row
    past: tuple[int, ...] | None = None
    length: tuple[int, ...] | None = None
    borders: tuple[int, ...] | None = None
    decays: bool = True

    def options(self):
        rows = {"past": self.past, "length": self.length, "cu_seqlens": self.borders}
        rows = {n: x and torch.tensor(x, device=DEVICE) for n, x in rows.items()}
        skip = self.features == self.values
        muon = Muon(period=self.period) if self.period else None
        rule = dict(chunk=self.chunk, objective=self.objective, activation=self.activation)
        return rows | rule | {"skip": skip, "muon": muon}


def named(case):
    """What differs from the plain case."""
    fields = dataclasses.asdict(case).items()
    changed = [f"{n}={x}" for n, x in fields if x != getattr(Case(), n)]
    return " ".join(changed) or "plain"


def draw(case, dtype=torch.float16, turn=0):
    """Inputs by name in fp64, exact in the dtype in which they will be given; fp32 takes those of fp16."""
    dtype = torch.float16 if dtype == torch.float32 else dtype
    generator = seeded(case.tokens + case.window + 1000 * turn)
    rows = (case.batch, case.tokens, case.heads)
    pairs = (case.batch, case.before + case.tokens, case.heads)
    count = case.batch if case.borders is None else len(case.borders) - 1

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    drawn = {
        "q": torch.nn.functional.normalize(normal(*rows, case.features), dim=-1),
        "k": torch.nn.functional.normalize(normal(*pairs, case.features), dim=-1),
        "v": normal(*pairs, case.values),
        "eta": uniform(0.2, 1, *rows) / case.chunk,
        "log_alpha": uniform(-0.1, 0, *rows) if case.decays else None,
        "theta": uniform(0.2, 0.9, *rows) if case.momentum or case.period else None,
        "gamma": uniform(0.2, 1, *rows, case.window) / case.window if case.window > 1 else None,
    }
    states = ["memory"] + ["momentum"] * bool(case.momentum or case.period) + ["start"] * case.start
    for state in states:
        lead = () if state == "start" else (count,)
        size = 0.1 if state == "momentum" else 1.0
        for name, shape, width in (
            ("w0", (case.hidden, case.features), case.hidden),
            ("w1", (case.values, case.hidden), case.hidden),
            ("gate", (case.hidden, case.features), case.hidden),
        ):
            if name != "gate" or case.gated:
                drawn[f"{state}.{name}"] = normal(*lead, case.heads, *shape) * size * 2 / width**0.5
    if case.norm:
        drawn["norm.scale"] = uniform(0.5, 1.5, case.heads, case.values)
        drawn["norm.bias"] = normal(case.heads, case.values)
    given = {n: x for n, x in drawn.items() if x is not None}
    return {n: x.to(dtype if n in HALVES else x.dtype).double() for n, x in given.items()}


def run(case, form, inputs, dtype):
    """All outputs by name, and the gradients of a loss over them."""
    wide = torch.promote_types(dtype, torch.float32)
    given = {n: leaf(x.to(DEVICE, dtype if n in HALVES else wide)) for n, x in inputs.items()}
    plain = {n: x for n, x in given.items() if "." not in n}
    for state in ("memory", "momentum", "start"):
        weights = {n.split(".")[1]: x for n, x in given.items() if n.startswith(f"{state}.")}
        if weights:
            plain[state] = Weights(**weights)
    if case.norm:
        plain["norm"] = Norm(given["norm.scale"], given["norm.bias"])
    with poisoned() if form == "fused" else contextlib.nullcontext():
        y, state = mlp_memory(**plain, **case.options(), form=form)
        found = {"y": y}
        for group, weights in state._asdict().items():
            names = {} if weights is None else weights._asdict()
            found |= {f"{group}.{n}": x for n, x in names.items() if x is not None}
        assert y.dtype == dtype and state.memory.w0.dtype == wide
        loss = sum(weighed(x, n) for n, x in found.items())
        grads = gradients(loss, given)
    return {n: x.detach() for n, x in found.items()} | {f"d{n}": g for n, g in grads.items()}


def assert_twice_plain(case, dtype, draws=DRAWS):
    """Every error at most twice that of the plain form in the same dtype, over some draws together: the
    gradient of a gate is a few sums of products of either sign, whose error in one draw is easily a third or
    three times what it is in another, in both forms. Returns the last fused results."""
    wanted = pooled(case, "parallel", torch.float64, dtype, draws)
    plain, fused = (pooled(case, form, dtype, dtype, draws) for form in ("parallel", "fused"))
    assert_within_twice(fused, plain, wanted, SLACK[dtype])
    return {name: x[-1] for name, x in fused.items()}


def pooled(case, form, compute, dtype, draws):
    """Of all draws of inputs in a dtype, computed in another"""
    found = [run(case, form, draw(case, dtype, turn), compute) for turn in range(draws)]
    return {name: torch.stack([x[name] for x in found]) for name in found[0]}
