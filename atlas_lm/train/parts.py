"""A step cut up for one process: micro-batches of rows, each in segments, as tensors ready to be moved."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atlas_lm.data.rows import NOTHING
from atlas_lm.data.source import Batch


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a model reads in one call."""

    inputs: Tensor  # [N, T] int64
    places: Tensor  # [M] where something should be said, counted row after row
    wanted: Tensor  # [M] what should be said there
    count: Tensor | None  # [N] tokens that count; None: all
    fresh: Tensor | None  # [N] rows that begin a stream; None: as the state says
    borders: Tensor | None  # [S + 1] of packed sequences

    def to(self, device: torch.device) -> "Part":
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Part":
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Part":
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name: change(tensor) for name, tensor in found.items() if tensor is not None}
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process does of a step: of each micro-batch its segments, in order."""

    batches: list[list[Part]]
    tokens: int
    labelled: int

    def pin_memory(self) -> "Share":
        pinned = [[part.pin_memory() for part in parts] for parts in self.batches]
        return Share(batches=pinned, tokens=self.tokens, labelled=self.labelled)


def cut_up(batch: Batch, micro: int, segment: int | None) -> Share:
    """Cut a batch into micro-batches of at most `micro` rows, and these into segments of so many tokens."""
    rows = len(batch.inputs)
    edges = [*range(0, rows, micro), rows]
    return Share(
        batches=[_segments(_rows(batch, *pair), segment) for pair in pairwise(edges)],
        tokens=batch.tokens,
        labelled=batch.labelled,
    )


def _rows(batch: Batch, first: int, last: int) -> Batch:
    def some(array: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if array is None else array[first:last]

    borders, length = batch.borders, batch.inputs.shape[1]
    if borders is not None:
        inside = (borders >= first * length) & (borders <= last * length)
        borders = borders[inside] - first * length
    return Batch(
        inputs=batch.inputs[first:last],
        labels=batch.labels[first:last],
        fresh=some(batch.fresh),
        count=some(batch.count),
        borders=borders,
    )


def _segments(batch: Batch, segment: int | None) -> list[Part]:
    length = batch.inputs.shape[1]
    size = min(segment or length, length)
    if batch.borders is not None and size < length:
        raise ValueError(
            f"rows of {length} tokens hold packed sequences and cannot be read in segments of {size}; "
            "set segment to None"
        )
    return [_part(batch, begin, min(begin + size, length)) for begin in range(0, length, size)]


def _part(batch: Batch, begin: int, end: int) -> Part:
    inputs, labels = batch.inputs[:, begin:end], batch.labels[:, begin:end].ravel()
    places = np.flatnonzero(labels != NOTHING)
    count = None if batch.count is None else np.clip(batch.count - begin, 0, end - begin)
    if count is not None and (count == end - begin).all():
        count = None  # without padding layers are spared the mask
    first = begin == 0
    return Part(
        inputs=torch.from_numpy(np.ascontiguousarray(inputs)),
        places=torch.from_numpy(places),
        wanted=torch.from_numpy(labels[places]),
        count=None if count is None else torch.from_numpy(count),
        fresh=None if batch.fresh is None or not first else torch.from_numpy(batch.fresh.copy()),
        borders=None if batch.borders is None else torch.from_numpy(batch.borders),
    )
