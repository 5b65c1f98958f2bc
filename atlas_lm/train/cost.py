"""What a run costs: by formula before anything starts, by a trial of its steps, and against the machine."""

import resource
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from atlas_lm.models.counts import TRAINING, flops_per_token, parameters, state_bytes
from atlas_lm.train.loop import Run
from atlas_lm.train.machine import Machine
from atlas_lm.train.parts import cut_up
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Recipe

BYTES = 4  # of a weight, and of each average that an optimizer keeps of it
TRIED = 4  # different shapes of steps that are tried
SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices that the machine's rate is measured with


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of a whole run. Bytes and seconds are of one process."""

    parameters: dict[str, int]
    tokens: int
    flops: float
    weight_bytes: int  # weights, gradients and averages
    carried_bytes: int  # states of the rows that go on
    peak_bytes: int | None  # measured in a trial; None: none was made
    seconds: float | None

    def lines(self) -> list[str]:
        """For people."""
        parts = ", ".join(f"{n} {c:,}" for n, c in self.parameters.items() if c and n != "total")
        told = [
            f"parameters  {self.parameters['total']:,} ({parts})",
            f"tokens      {self.tokens:,}",
            f"products    {self.flops:.3g} FLOP",
            f"memory      {_size(self.weight_bytes)} for weights, gradients and optimizer, "
            f"{_size(self.carried_bytes)} for carried states",
        ]
        if self.peak_bytes is not None:
            told[-1] += f"; {_size(self.peak_bytes)} at the most in a trial"
        if self.seconds is not None:
            told.append(f"time        about {_clock(self.seconds)}, exams left out")
        return told


def estimate(recipe: Recipe, place: Place, machine: Machine, trial: bool = True) -> Estimate:
    """What a run will cost. trial: do one step of each shape, on the real data, and throw it away."""
    counts = Counter(recipe.source.shape(step) for step in range(recipe.steps))
    counted = parameters(recipe.model)
    averages = 2 if recipe.optimizer.kind == "adamw" else 1  # Muon keeps one of most weights
    rows, _ = recipe.source.shape(0)
    seconds, peak = _try(recipe, place, machine, counts) if trial else (None, None)
    return Estimate(
        parameters=counted,
        tokens=sum(rows * length * times for (rows, length), times in counts.items()),
        flops=sum(step_flops(recipe, shape) * times for shape, times in counts.items()),
        weight_bytes=counted["total"] * BYTES * (2 + averages),
        carried_bytes=rows * state_bytes(recipe.model) if recipe.source.carries else 0,
        peak_bytes=peak,
        seconds=seconds,
    )


def step_flops(recipe: Recipe, shape: tuple[int, int], recompute: bool = False) -> float:
    """Products of one step, forward and backward. The head is counted at every token, labelled or not."""
    rows, length = shape
    read = min(recipe.segment or length, length)
    passes = TRAINING + recompute
    return rows * length * passes * flops_per_token(recipe.model, read)["total"]


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP per second of large matrix products on this device: what `share of peak` is a share of."""
    side = SIDE.get(device.type, SIDE["cpu"])
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    a @ b
    times, began = 0, _now(device)
    while _now(device) - began < seconds:
        a @ b
        times += 1
    return times * 2.0 * side**3 / (_now(device) - began)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _try(
    recipe: Recipe, place: Place, machine: Machine, counts: Counter[tuple[int, int]]
) -> tuple[float, int]:
    """Seconds of the whole run and bytes at the most, from steps that are done and forgotten."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(recipe, replace(place, out=Path(folder)), machine)
        largest = sorted(counts, key=lambda shape: shape[0] * shape[1])[-TRIED:]
        found = {shape: _seconds(run, shape) for shape in largest}
    pace = sum(found.values()) / sum(step_flops(recipe, shape) for shape in found)
    seconds = sum(
        times * found.get(shape, pace * step_flops(recipe, shape))
        for shape, times in counts.items()
    )
    return seconds, peak_bytes(machine.device)


def _seconds(run: Run, shape: tuple[int, int]) -> float:
    """Of one step of this shape, the second one: the first warms up."""
    recipe, machine = run.recipe, run.machine
    step = next(s for s in range(recipe.steps) if recipe.source.shape(s) == shape)
    first, count = machine.share(shape[0])
    batch = recipe.source.batch(step, first, count)
    share = cut_up(batch, run.place.micro or count, recipe.segment)
    run.step(share)
    began = _now(machine.device)
    run.step(share)
    return _now(machine.device) - began


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process had so far: of the device, or without one of its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _size(count: float) -> str:
    """
    >>> _size(3 << 19), _size(5 << 30)
    ('1.5 MiB', '5.0 GiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _clock(seconds: float) -> str:
    """
    >>> _clock(59.4), _clock(3725)
    ('59 s', '1 h 02 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
