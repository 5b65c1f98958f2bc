"""Examine a model while it is trained: loss and share of right answers on rows that it never learns from."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atlas_lm.data.source import Exam
from atlas_lm.models.state import StreamState
from atlas_lm.train.machine import Machine
from atlas_lm.train.parts import Part, cut_up

BUCKETS = 16  # at most, of positions


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What an exam found."""

    nats: float  # mean over all places
    right: float  # share of the places
    places: int
    # mean nats of the places in each of equal stretches of a row; None where a stretch has none
    by_position: tuple[float | None, ...]


def examine(
    module: nn.Module,
    exams: Mapping[str, Exam],
    machine: Machine,
    *,
    rows: int,
    segment: int | None,
) -> dict[str, Mark]:
    """Every exam, at most so many rows of a process at once, read in segments with the memory carried on."""
    module.eval()
    with torch.no_grad():
        marks = {name: _mark(module, exam, machine, rows, segment) for name, exam in exams.items()}
    module.train()
    return marks


def _mark(module: nn.Module, exam: Exam, machine: Machine, rows: int, segment: int | None) -> Mark:
    buckets = min(BUCKETS, exam.length)
    sums = torch.zeros(3, buckets, dtype=torch.float64, device=machine.device)
    turn = min(rows, -(-exam.rows // machine.world))  # all processes take as many turns
    for first in range(machine.rank * turn, exam.rows + machine.rank * turn, turn * machine.world):
        count = min(turn, exam.rows - first)
        # a process without rows left reads some again, because the others wait for it, and counts nothing
        batch = exam.batch(first if count > 0 else 0, count if count > 0 else 1)
        [parts] = cut_up(batch, len(batch.inputs), segment).batches
        found = _read_all(module, parts, machine.device, exam.length, buckets)
        sums += found if count > 0 else 0 * found
    nats, right, places = machine.sum(sums).cpu()
    total = max(1.0, places.sum().item())
    return Mark(
        nats=nats.sum().item() / total,
        right=right.sum().item() / total,
        places=int(places.sum()),
        by_position=tuple(
            sum_ / number if number else None
            for sum_, number in zip(nats.tolist(), places.tolist(), strict=True)
        ),
    )


def _read_all(
    module: nn.Module, parts: list[Part], device: torch.device, length: int, buckets: int
) -> Tensor:
    """[3, buckets]: nats, right ones and places, of one batch read segment by segment."""
    sums = torch.zeros(3, buckets, dtype=torch.float64, device=device)
    state: StreamState | None = None
    begin = 0
    for part in parts:
        part = part.to(device)
        said = module(part, state)
        size = part.inputs.shape[1]
        where = (begin + part.places % size) * buckets // length
        values = torch.stack([said.nats, said.right, torch.ones_like(said.nats)]).double()
        sums.index_add_(1, where, values)
        state, begin = said.state, begin + size
    return sums
