"""The coefficients of a chunk: the loop against products written out, kernels against the loop."""

import contextlib
import dataclasses
import functools
import math
import warnings

import pytest
import torch

from atlas_lm.ops.chunk_weights import ChunkWeights, chunk_weights, chunk_weights_reference
from atlas_lm.ops.sequences import even_rows, packed
from tests.builders import leaf, seeded

pytest.importorskip("triton", reason="the fused form is written in Triton")
from atlas_lm.ops.chunk_weights.fused import chunk_weights_fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    momentum: bool = False
    window: int | None = None  # None: no gamma
    decays: bool = True
    chunk: int = 8
    halo: int = 0
    tokens: int = 21
    past: tuple[int, ...] | None = None  # existing pairs of each row, out of `halo`
    length: tuple[int, ...] | None = None
    borders: tuple[int, ...] | None = None
    heads: int = 1
    zeros: bool = False  # tokens with alpha, theta, eta, gamma zero

    def sequences(self):
        if self.borders is not None:
            return packed(torch.tensor(self.borders, device=DEVICE), self.chunk, self.borders[-1])
        rows = {n: x and torch.tensor(x, device=DEVICE) for n, x in self._rows().items()}
        before = 0 if self.past is None else self.halo
        return even_rows(2, self.tokens, self.chunk, DEVICE, before=before, **rows)

    def _rows(self):
        return {"past": self.past, "length": self.length}

    def draw(self):
        """eta, log_alpha, theta, gamma [R, H(, c)], those that there are; exact in fp32."""
        generator = seeded(self.tokens)
        count = 2 * self.tokens if self.borders is None else self.borders[-1]

        def uniform(low, high, *shape):
            drawn = torch.rand(count, self.heads, *shape, generator=generator)
            return (low + (high - low) * drawn).double()

        drawn = {
            "eta": uniform(0.1, 1),
            "log_alpha": uniform(-0.5, 0) if self.decays else None,
            "theta": uniform(0.3, 1) if self.momentum else None,
            "gamma": uniform(0, 1, self.window) if self.window else None,
        }
        if self.zeros:
            drawn["eta"][2:4] = 0
            for name, place, value in (
                ("log_alpha", slice(3, 6), -math.inf),
                ("log_alpha", slice(9, 12), 0),
                ("theta", slice(5, 7), 0),
                ("gamma", slice(1, 3), 0),
            ):
                if drawn[name] is not None:
                    drawn[name][place] = value
        return {n: x if x is None else x.to(DEVICE) for n, x in drawn.items()}


def named(case):
    """What differs from the plain case."""
    fields = dataclasses.asdict(case).items()
    changed = [f"{n}={x}" for n, x in fields if x != getattr(Case(), n)]
    return " ".join(changed) or "plain"


CASES = [
    Case(),
    Case(momentum=True),
    Case(momentum=True, decays=False, tokens=8),
    Case(window=4, halo=4, past=(2, 0)),
    Case(window=1),
    Case(momentum=True, window=3, halo=2, decays=False, heads=2),
    Case(momentum=True, window=4, halo=3, past=(3, 1), length=(21, 9), heads=2),
    Case(momentum=True, window=9, halo=8, length=(0, 12)),
    Case(momentum=True, window=4, halo=4, borders=(0, 5, 21, 42)),
    Case(momentum=True, window=4, halo=4, past=(4, 0), zeros=True),
    Case(window=2, halo=4, zeros=True),
    Case(momentum=True, window=16, halo=16, chunk=64, tokens=70),
]


def outputs_and_gradients(case, weights_of, dtype):
    gates = {n: x if x is None else leaf(x.to(dtype)) for n, x in case.draw().items()}
    sequences = case.sequences()
    made = written(weights_of(*gates.values(), sequences, case.halo), case.halo)
    t0 = torch.arange(sequences.chunks, device=DEVICE) - sequences.first_chunk[sequences.sequence]
    held = t0 * case.chunk < sequences.length[sequences.sequence]  # the others hold nothing
    found = {n: x[held] for n, x in made._asdict().items() if x is not None}
    wanted = {n: x for n, x in gates.items() if x is not None}
    grads = torch.autograd.grad(sum(map(weighed, found.values())), list(wanted.values()))
    return found | {f"d{n}": g for n, g in zip(wanted, grads, strict=True)}


def written(weights, halo):
    """Zero where kernels leave the mix unwritten: a token has no weight for pairs after it."""
    rows, columns = weights.mix.shape[-2:]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=DEVICE).tril(halo)
    return weights._replace(mix=torch.where(seen, weights.mix, 0.0))


def weighed(x):
    weights = torch.randn(x.shape, generator=seeded(x.dim()), dtype=torch.float64)
    return (x * weights.to(x)).sum()


def reference(*given):
    return chunk_weights_reference(*given[:-1], halo=given[-1])


@functools.cache
def truth(case):
    return outputs_and_gradients(case, reference, torch.float64)


def assert_near(got, wanted, tolerance):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert got[name].isfinite().all(), f"{name} is not finite"
        scale = wanted[name].norm().clamp_min(1e-30)
        error = ((got[name].double() - wanted[name]).norm() / scale).item()
        assert error <= tolerance, f"{name}: off by {error:.1e}, allowed {tolerance:.0e}"


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


def by_products(eta, log_alpha, theta, gamma, sequences, halo):
    """W = La [Lth] diag(eta) Ms, chunk by chunk, each factor a matrix written out."""
    made = []
    for i in range(sequences.chunks):
        n = int(sequences.sequence[i])
        t0 = (i - int(sequences.first_chunk[n])) * sequences.chunk
        count = max(0, min(sequences.chunk, int(sequences.length[n]) - t0))
        rows = slice(int(sequences.start[n]) + t0, int(sequences.start[n]) + t0 + count)
        alpha = torch.ones_like(eta[rows]) if log_alpha is None else log_alpha[rows].exp()
        gates = torch.ones_like(eta[rows]).unsqueeze(-1) if gamma is None else gamma[rows]
        oldest = -int(sequences.past[n]) - t0
        windows = window_matrix(gates, sequences.chunk, halo, oldest)  # [H, count, halo + b]
        writes = eta[rows].T.unsqueeze(-1) * windows
        retain = steps_between(alpha)
        steps = writes if theta is None else steps_between(theta[rows]) @ writes
        parts = [retain @ steps, alpha.cumprod(0).T]
        if theta is not None:
            carried = theta[rows].cumprod(0).T
            parts.append((retain @ carried.unsqueeze(-1)).squeeze(-1))
        parts = [
            torch.cat([x, last(x).expand_as(behind(x, sequences.chunk))], dim=1) for x in parts
        ]
        if theta is not None:
            parts += [last(steps)[:, 0], last(carried)[:, 0]]
        made.append(parts)
    stacked = [torch.stack(column) for column in zip(*made, strict=True)]
    return ChunkWeights(*stacked, *[None] * (5 - len(stacked)))


def window_matrix(gates, chunk, halo, oldest):
    """gates: [n, H, c] -> [H, n, halo + chunk], gamma_{t, t - pair} where token t sees that pair"""
    count, heads, size = gates.shape
    matrix = gates.new_zeros(heads, count, halo + chunk)
    for t in range(count):
        for j in range(size):
            if t - j >= oldest:
                matrix[:, t, halo + t - j] = gates[t, :, j]
    return matrix


def steps_between(gate):
    """gate: [n, H] -> [H, n, n], the product of the gates after token s up to t, zero above"""
    count = gate.shape[0]
    matrix = gate.new_zeros(gate.shape[1], count, count)
    for t in range(count):
        for s in range(t + 1):
            matrix[:, t, s] = gate[s + 1 : t + 1].prod(0)
    return matrix


def last(rows):
    """[H, n, ...] -> [H, 1, ...]; zero where there is none"""
    return rows[:, -1:] if rows.shape[1] else rows.new_zeros(rows.shape[0], 1, *rows.shape[2:])


def behind(rows, size):
    """The shape of what is missing of [H, size, ...] behind [H, n, ...]"""
    return rows.new_empty(rows.shape[0], size - rows.shape[1], *rows.shape[2:])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_loop_is_the_products(case):
    assert_near(truth(case), outputs_and_gradients(case, by_products, torch.float64), 1e-12)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_fused_is_the_loop(case):
    with poisoned():
        got = outputs_and_gradients(case, chunk_weights_fused, torch.float32)
    assert_near(got, truth(case), 1e-6)


def test_momentum_of_zero_is_descent():
    case = Case(momentum=True, window=3, halo=4)
    gates, sequences = case.draw(), case.sequences()
    gates = {n: x.float() for n, x in gates.items()} | {
        "theta": torch.zeros_like(gates["eta"]).float()
    }
    got, wanted = (
        written(chunk_weights_fused(*given.values(), sequences, case.halo), case.halo)
        for given in (gates, gates | {"theta": None})
    )
    assert torch.equal(got.mix, wanted.mix) and torch.equal(got.keep, wanted.keep)
    assert not got.push.any() and not got.tail_keep.any()


@pytest.mark.parametrize("part", ["mix", "keep", "push", "tail_mix", "tail_keep"])
def test_each_part_has_its_own_gradients(part):
    case, grads = Case(momentum=True, window=3, halo=4, tokens=11), []
    for weights_of, dtype in ((chunk_weights_fused, torch.float32), (reference, torch.float64)):
        gates = {n: leaf(x.to(dtype)) for n, x in case.draw().items()}
        made = written(weights_of(*gates.values(), case.sequences(), case.halo), case.halo)
        weighed(getattr(made, part)).backward()
        grads.append(
            {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in gates.items()}
        )
    assert_near(*grads, 1e-6)


def test_one_gate_alone_may_ask_for_its_gradient():
    case = Case(momentum=True, window=3, halo=4, tokens=11)
    gates = {n: x.float() for n, x in case.draw().items()}
    theta = leaf(gates["theta"])
    made = chunk_weights_fused(*(gates | {"theta": theta}).values(), case.sequences(), case.halo)
    weighed(made.push).backward()
    assert theta.grad is not None and theta.grad.any()


def test_views_are_read_as_they_look():
    case = Case(momentum=True, window=3, halo=4, heads=2)
    gates = [x.float() for x in case.draw().values()]
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in gates]
    made = (
        written(chunk_weights_fused(*given, case.sequences(), case.halo), case.halo)
        for given in (views, gates)
    )
    assert all(torch.equal(got, wanted) for got, wanted in zip(*made, strict=True))


def test_gradients_of_gradients_are_refused():
    case = Case(tokens=3)
    eta = leaf(case.draw()["eta"].float())
    made = chunk_weights_fused(eta, None, None, None, case.sequences(), 0)
    (grad,) = torch.autograd.grad(made.mix[..., 0].square().sum(), eta, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_double_precision_takes_the_loop():
    case = Case(momentum=True)
    gates = case.draw()
    got = chunk_weights(*gates.values(), case.sequences())
    wanted = reference(*gates.values(), case.sequences(), 0)
    assert got.mix.dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
