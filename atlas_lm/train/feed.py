"""Steps made by workers ahead of time, in order, the same however many workers there are."""

import time
from collections.abc import Iterator

from torch.utils.data import DataLoader, Dataset

from atlas_lm.data.source import Source
from atlas_lm.train.machine import Machine
from atlas_lm.train.parts import Share, cut_up

AHEAD = 4  # steps that each worker has ready


class _Steps(Dataset[Share]):
    """This process' share of every step, by its number."""

    def __init__(self, source: Source, machine: Machine, micro: int | None, segment: int | None):
        self.source, self.micro, self.segment = source, micro, segment
        self.rank, self.share = machine.rank, machine.share

    def __getitem__(self, step: int) -> Share:
        rows, _ = self.source.shape(step)
        first, count = self.share(rows)
        return cut_up(self.source.batch(step, first, count), self.micro or count, self.segment)


class Feed:
    """Shares of the steps from `first` on, and how long they were waited for."""

    def __init__(
        self,
        source: Source,
        machine: Machine,
        steps: range,
        *,
        micro: int | None,
        segment: int | None,
        workers: int,
    ) -> None:
        self._loader = DataLoader(
            _Steps(source, machine, micro, segment),
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            pin_memory=machine.device.type == "cuda",
        )
        self.waited = 0.0  # seconds, since the first share came

    def __iter__(self) -> Iterator[Share]:
        shares = iter(self._loader)
        share = next(shares, None)  # workers have to start: that is no waiting
        while share is not None:
            yield share
            began = time.perf_counter()
            share = next(shares, None)
            self.waited += time.perf_counter() - began
