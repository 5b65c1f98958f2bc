"""Watch over a run: gates while all is well, and what went wrong where when it is not."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atlas_lm.models.state import StreamState
from atlas_lm.train.learner import Watch
from atlas_lm.train.machine import Machine, inner
from atlas_lm.train.parts import Part

SMOOTH = 0.9  # weight of the past in the smoothed loss


class Stopped(RuntimeError):
    """A run that must not go on."""


class Pulse:
    """Whether the loss of a run has diverged: smoothed, and far above where it began, for a while."""

    def __init__(self, factor: float, patience: int) -> None:
        self.factor, self.patience = factor, patience
        self._smooth: float | None = None
        self._above = 0

    def diverged(self, loss: float, first: Sequence[float]) -> bool:
        """Take the loss of the next step. first: those that the run began with."""
        if not first:
            return False
        before = loss if self._smooth is None else self._smooth
        self._smooth = SMOOTH * before + (1 - SMOOTH) * loss
        above = self._smooth > self.factor * sum(first) / len(first)
        self._above = self._above + 1 if above else 0
        return self._above >= self.patience


def look_inside(
    module: nn.Module, part: Part, state: StreamState | None, rows: int | None = None
) -> Watch:
    """Read a part once more, uncompiled and without gradient, and keep what its blocks saw.

    rows: only the first so many.
    """
    blocks = len(inner(module).backbone.layers)
    watch = Watch(traces=[[] for _ in range(blocks)], hidden=[])
    if rows is not None and part.borders is None:
        part, state = _first_rows(part, state, rows)
    training = module.training
    module.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        module(part, state, watch)
    module.train(training)
    return watch


def _first_rows(
    part: Part, state: StreamState | None, rows: int
) -> tuple[Part, StreamState | None]:
    inside = part.places < rows * part.inputs.shape[1]
    some = Part(
        inputs=part.inputs[:rows],
        places=part.places[inside],
        wanted=part.wanted[inside],
        count=None if part.count is None else part.count[:rows],
        fresh=None if part.fresh is None else part.fresh[:rows],
        borders=None,
    )
    return some, None if state is None else state.map(lambda tensor: tensor[:rows])


def gate_statistics(watch: Watch) -> dict[str, float]:
    """Mean, least and most of every gate of every layer, e.g. `layer 0 alpha mean`."""
    found = {}
    for layer, traces in enumerate(watch.traces):
        for name in traces[0].gates if traces else ():
            gate = torch.cat([trace.gates[name].flatten() for trace in traces])
            found[f"layer {layer} {name} mean"] = gate.mean().item()
            found[f"layer {layer} {name} min"] = gate.min().item()
            found[f"layer {layer} {name} max"] = gate.max().item()
        for trace in traces[:1]:
            found[f"layer {layer} memory norm"] = trace.memory_norm.amax().item()
    return found


def explain(
    module: nn.Module,
    batches: Sequence[Sequence[tuple[Part, StreamState | None]]],
    machine: Machine,
) -> str:
    """Where a step went wrong: the first layer and token whose numbers are not finite, and its gates.

    batches: of each micro-batch its parts, each with the state before it. All processes must call this.
    """
    told = None
    for parts in batches:
        for part, state in parts:
            watch = look_inside(module, part, state)
            told = told or _first_fault(watch, _positions(part, state))
    told = told or _gradient_fault(module)
    everywhere = machine.gather(told)
    found = [(rank, text) for rank, text in enumerate(everywhere) if text]
    if not found:
        return "all activations and gradients are finite when the step is done again"
    rank, text = found[0]
    return text if machine.world == 1 else f"in process {rank}: {text}"


def _positions(part: Part, state: StreamState | None) -> list[int]:
    """Tokens that the stream of each row had before this part."""
    rows = len(part.inputs)
    if state is None:
        return [0] * rows
    fresh = [False] * rows if part.fresh is None else part.fresh.tolist()
    read = state.position.tolist()
    return [0 if begins else n for begins, n in zip(fresh, read, strict=True)]


def _first_fault(watch: Watch, before: list[int]) -> str | None:
    """The first block whose input, or memory, is not finite."""
    for layer, hidden in enumerate(watch.hidden):
        if (place := _not_finite(hidden)) is not None:
            above = "the embedding" if layer == 0 else f"layer {layer - 1}"
            return f"the output of {above} is not finite {_at(place, before, watch, layer - 1)}"
        for trace in watch.traces[layer] if layer < len(watch.traces) else ():
            for name, values in (("memory", trace.memory_norm), ("gradient", trace.surprise)):
                if (place := _not_finite(values)) is not None:
                    return f"the {name} of layer {layer} is not finite {_at(place, before, watch, layer)}"
    return None


def _not_finite(values: Tensor) -> tuple[int, int] | None:
    """Row and token of the first number in [B, T, ...] that is not finite; the earliest token counts."""
    wrong = ~torch.isfinite(values).flatten(2).all(-1)  # [B, T]
    if not bool(wrong.any()):
        return None
    token = int(wrong.any(0).nonzero()[0])
    return int(wrong[:, token].nonzero()[0]), token


def _at(place: tuple[int, int], before: list[int], watch: Watch, layer: int) -> str:
    row, token = place
    traces = watch.traces[layer] if layer >= 0 else []
    gates = {n: g[row, token] for trace in traces[:1] for n, g in trace.gates.items()}
    told = "; ".join(f"{name} {_range(gate)}" for name, gate in gates.items())
    return f"at token {before[row] + token} of row {row}" + (
        f", where its gates are: {told}" if told else ""
    )


def _range(gate: Tensor) -> str:
    low, high = gate.min().item(), gate.max().item()
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _gradient_fault(module: nn.Module) -> str | None:
    """The weights whose gradient is not finite."""
    names = [
        name
        for name, weight in module.named_parameters()
        if weight.grad is not None and not math.isfinite(_norm(weight.grad))
    ]
    if not names:
        return None
    more = f" and of {len(names) - 1} more weights" if len(names) > 1 else ""
    return f"activations are finite, but the gradient of {names[0]} is not{more}"


def _norm(gradient: Tensor) -> float:
    norm = gradient.norm()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
