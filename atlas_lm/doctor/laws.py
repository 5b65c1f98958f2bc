"""The laws of a causal memory that any layer can be held to (docs/mathematics.md, section 8).

A law takes a subject and returns a finding: one figure, the limit it must keep, and a note.
"""

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from atlas_lm.doctor.measure import as_leaves, distance, leaves, weighted_sum, with_gradients
from atlas_lm.doctor.subjects import Inputs, Subject, cut_inputs

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
INFLUENCE = 1e-9  # relative change that counts as one


@dataclass(frozen=True)
class Finding:
    """`figure` must not exceed `limit`, or, where `at_least` is set, must reach it."""

    figure: float
    limit: float
    note: str = ""
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


@dataclass(frozen=True)
class NotApplicable:
    reason: str


Law = Callable[[Any], Finding | NotApplicable]


def causality(subject: Subject) -> Finding:
    """Position t never depends on tokens after t."""
    x, other = subject.inputs(2, subject.length, 1), subject.inputs(2, subject.length, 2)
    y, _ = subject.run(x)
    worst, where = 0.0, 0
    for t in _places(subject.length - 1):
        changed = {n: torch.cat([v[:, : t + 1], other[n][:, t + 1 :]], dim=1) for n, v in x.items()}
        z, _ = subject.run(changed)
        error = distance({"y": z[:, : t + 1]}, {"y": y[:, : t + 1]})
        worst, where = (error, t) if error > worst else (worst, where)
    note = f"outputs up to token {where} see what follows" if worst > 0 else ""
    return Finding(worst, _rounding(subject), note)


def rows(subject: Subject) -> Finding:
    """Rows of a batch never meet: a row alone equals the row beside others, whatever these are."""
    x, other = subject.inputs(3, subject.length, 1), subject.inputs(3, subject.length, 2)
    y, _ = subject.run(x)
    beside = {n: torch.cat([v[:1], other[n][1:]]) for n, v in x.items()}
    z, _ = subject.run(beside)
    alone, _ = subject.run({n: v[:1] for n, v in x.items()})
    error = max(distance({"y": one[:1]}, {"y": y[:1]}) for one in (z, alone))
    return Finding(error, _rounding(subject))


def cuts(subject: Subject) -> Finding | NotApplicable:
    """Any cut of the stream gives the whole: outputs, the final state, and every gradient."""
    if not subject.has_state:
        return NotApplicable("the layer takes no state, so a stream cannot be continued")
    x = as_leaves(subject.inputs(2, subject.length, 1))
    wanted = x | subject.weights()
    whole = with_gradients(lambda: _in_pieces(subject, x, []), wanted)
    ways = [[t] for t in _places(subject.length - 1, first=1)]
    ways.append(list(range(1, subject.length)))  # token by token
    worst, where = 0.0, ways[0]
    for way in ways:
        pieces = with_gradients(lambda way=way: _in_pieces(subject, x, way), wanted)  # type: ignore[misc]
        error = distance(pieces, whole)
        worst, where = (error, way) if error > worst else (worst, where)
    note = f"worst cut: {where[0] if len(where) == 1 else 'token by token'}" if worst > 0 else ""
    return Finding(worst, _rounding(subject), note)


def padding(subject: Subject) -> Finding | NotApplicable:
    """Tokens that are not valid change nothing: not outputs, gates, momentum, window or clock."""
    if not subject.has_mask:
        return NotApplicable("the layer takes no mask (`valid` or `mask`)")
    length = subject.length
    x = as_leaves(subject.inputs(2, length, 1))
    tail = as_leaves(subject.inputs(2, min(length, 7), 3))
    rubbish = subject.inputs(2, length + 9, 2)
    generator = torch.Generator().manual_seed(4)
    order = torch.stack([torch.randperm(length + 9, generator=generator) for _ in range(2)])
    valid = torch.zeros(2, length + 9, dtype=torch.bool)
    valid.scatter_(1, order[:, :length], True)

    def clean() -> dict[str, Tensor]:
        y, state = subject.run(x)
        return {"y": y} | _go_on(subject, tail, state)

    def padded() -> dict[str, Tensor]:
        stuffed = {n: _stuff(v, rubbish[n], valid) for n, v in x.items()}
        y, state = subject.run(stuffed, valid=valid)
        return {"y": y[valid].reshape(2, length, *y.shape[2:])} | _go_on(subject, tail, state)

    wanted = (
        x
        | subject.weights()
        | ({f"tail.{n}": v for n, v in tail.items()} if subject.has_state else {})
    )
    error = distance(with_gradients(padded, wanted), with_gradients(clean, wanted))
    return Finding(error, _rounding(subject))


def packing(subject: Subject) -> Finding | NotApplicable:
    """Packed sequences (`cu_seqlens`) = the same ones apart."""
    if not subject.has_packing:
        return NotApplicable("the layer takes no packed sequences (`cu_seqlens`)")
    borders = [0, 1, 9, 14, subject.length]
    x = as_leaves(subject.inputs(1, subject.length, 1))
    tails = subject.inputs(len(borders) - 1, 5, 3)
    wanted = x | subject.weights()

    def packed() -> dict[str, Tensor]:
        y, state = subject.run(x, cu_seqlens=torch.tensor(borders))
        return {"y": y} | _go_on(subject, tails, state)

    def apart() -> dict[str, Tensor]:
        outputs, after = [], []
        for n, (start, stop) in enumerate(itertools.pairwise(borders)):
            y, state = subject.run(cut_inputs(x, start, stop))
            tail = {name: t[n : n + 1] for name, t in tails.items()}
            outputs.append(y)
            after.append(_go_on(subject, tail, state)["after"])
        return {"y": torch.cat(outputs, dim=1), "after": torch.cat(after)}

    error = distance(with_gradients(packed, wanted), with_gradients(apart, wanted))
    return Finding(error, _rounding(subject))


def modes(subject: Subject) -> Finding:
    """train, eval, no_grad and inference_mode agree: a memory that learns only in training is none."""
    x = subject.inputs(2, subject.length, 1)
    with subject.training(True):
        truth, _ = subject.run(x)
    worst, where = 0.0, ""
    grad_modes = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    for training in (True, False):
        for name, mode in grad_modes.items():
            with subject.training(training), mode():
                y, _ = subject.run(x)
                error = distance({"y": y.clone()}, {"y": truth.detach()})
            if error > worst:
                worst, where = error, f"{'train' if training else 'eval'} under {name} differs"
    return Finding(worst, _rounding(subject), where)


def gradients(subject: Subject) -> Finding:
    """Every outer weight, and every input, receives a gradient that is not zero."""
    x = as_leaves(subject.inputs(2, subject.length, 1))
    wanted = x | subject.weights()
    with subject.training(True):
        y, _ = subject.run(x)
    found = torch.autograd.grad(weighted_sum([y]), list(wanted.values()), allow_unused=True)
    dead = [n for n, g in zip(wanted, found, strict=True) if g is None or not bool(g.any())]
    return Finding(len(dead), 0, f"no gradient: {', '.join(dead)}" if dead else "")


def one_token(subject: Subject) -> Finding:
    """One token is enough to write: changing the first one alone changes something later."""
    x, other = subject.inputs(1, subject.length, 1), subject.inputs(1, subject.length, 2)
    y, _ = subject.run(x)
    changed = {n: torch.cat([other[n][:, :1], v[:, 1:]], dim=1) for n, v in x.items()}
    z, _ = subject.run(changed)
    change, size = (z - y)[:, 1:].detach().abs().flatten(2).amax(-1)[0], y.detach().abs().max()
    influence = (change / size).nan_to_num(
        nan=0.0, posinf=0.0
    )  # what is not a number shows nothing
    shows = (influence > INFLUENCE).nonzero()
    note = f"first shows at token {int(shows[0]) + 1}" if len(shows) else "never shows"
    return Finding(influence.max().item(), INFLUENCE, note, at_least=True)


def finite(subject: Subject) -> Finding:
    """Zero inputs, one token, and fully masked stretches give no NaN, in outputs or gradients."""
    bad, where = 0, ""
    cases: list[tuple[str, Inputs, Tensor | None]] = [
        (
            "zeros",
            {n: torch.zeros_like(v) for n, v in subject.inputs(2, subject.length, 1).items()},
            None,
        ),
        ("one token", subject.inputs(2, 1, 1), None),
    ]
    if subject.has_mask:
        masked = torch.zeros(2, subject.length, dtype=torch.bool)
        cases.append(("all masked", subject.inputs(2, subject.length, 1), masked))
    for name, x, valid in cases:
        x = as_leaves(x)
        y, _ = subject.run(x, valid=valid)
        found = [y]
        if y.requires_grad:
            wanted = list((x | subject.weights()).values())
            found += [
                g
                for g in torch.autograd.grad(weighted_sum([y]), wanted, allow_unused=True)
                if g is not None
            ]
        count = sum(int((~t.isfinite()).sum()) for t in found)
        bad, where = bad + count, where or (name if count else "")
    return Finding(bad, 0, f"not finite with {where}" if bad else "")


def save_load(subject: Subject) -> Finding | NotApplicable:
    """Save, load, continue: bit-equal to never having stopped."""
    if not subject.has_state:
        return NotApplicable("the layer takes no state, so there is nothing to save")
    x, tail = subject.inputs(2, subject.length, 1), subject.inputs(2, 7, 3)
    with torch.no_grad():
        _, state = subject.run(x)
        truth, _ = subject.run(tail, state)
        flat, tree = pytree.tree_flatten(state)
        tensors = {str(i): t.contiguous() for i, t in enumerate(flat) if isinstance(t, Tensor)}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            save_file({n: t.clone() for n, t in tensors.items()}, path)
            # cloned: a file's tensors stand at odd addresses, which alone can move the rounding
            loaded = {n: t.clone() for n, t in load_file(path).items()}
        reopened = [loaded.get(str(i), item) for i, item in enumerate(flat)]
        y, _ = subject.run(tail, pytree.tree_unflatten(reopened, tree))
    return Finding(distance({"y": y}, {"y": truth}), 0.0)


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        causality,
        rows,
        cuts,
        padding,
        packing,
        modes,
        gradients,
        one_token,
        finite,
        save_load,
    )
}


def _rounding(subject: Subject) -> float:
    return ROUNDING[subject.dtype]


def _places(stop: int, first: int = 0, most: int = 30) -> list[int]:
    """All places of a short stream, evenly chosen ones of a long one."""
    step = max(1, -(-(stop - first) // most))
    return [*range(first, stop, step), *([stop] if first > 0 and step > 1 else [])]


def _in_pieces(subject: Subject, x: Inputs, borders: list[int]) -> dict[str, Tensor]:
    """Outputs and final state of a stream that is handed over in pieces."""
    outputs, state = [], None
    length = next(iter(x.values())).shape[1]
    for start, stop in zip([0, *borders], [*borders, length], strict=True):
        y, state = subject.run(cut_inputs(x, start, stop), state)
        outputs.append(y)
    differentiable = {n: t for n, t in leaves(state).items() if t.requires_grad}
    return {"y": torch.cat(outputs, dim=1)} | differentiable


def _go_on(subject: Subject, tail: Inputs, state: Any) -> dict[str, Tensor]:
    return {"after": subject.run(tail, state)[0]} if subject.has_state else {}


def _stuff(clean: Tensor, rubbish: Tensor, valid: Tensor) -> Tensor:
    """Spread the clean tokens over the valid places of a longer stream, rubbish between them."""
    places = (valid.cumsum(1) - 1).clamp_min(0)
    index = places.reshape(*places.shape, *[1] * (clean.dim() - 2)).expand(-1, -1, *clean.shape[2:])
    mask = valid.reshape(*valid.shape, *[1] * (clean.dim() - 2))
    return torch.where(mask, clean.gather(1, index), rubbish)
