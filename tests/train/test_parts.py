"""Cutting a step up loses and moves nothing."""

import numpy as np
import pytest
import torch

from atlas_lm.data.source import Batch
from atlas_lm.train.feed import Feed
from atlas_lm.train.machine import Machine
from atlas_lm.train.parts import Part, cut_up
from tests.train.builders import Walks


def rebuilt(part: Part) -> torch.Tensor:
    """Labels of a part as a batch has them."""
    labels = torch.full((part.inputs.numel(),), -100)
    labels[part.places] = part.wanted
    return labels.reshape(part.inputs.shape)


def counted(part: Part) -> torch.Tensor:
    rows, tokens = part.inputs.shape
    return torch.full((rows,), tokens) if part.count is None else part.count


@pytest.mark.parametrize("segment", [None, 5, 8, 24, 100])
@pytest.mark.parametrize("micro", [1, 3, 4])
def test_pieces_put_together_are_the_batch(micro: int, segment: int | None) -> None:
    batch = Walks(carries=True).batch(2, 0, 4)
    share = cut_up(batch, micro, segment)
    assert [len(parts[0].inputs) for parts in share.batches] == {1: [1] * 4, 3: [3, 1], 4: [4]}[
        micro
    ]
    rows = [torch.cat([part.inputs for part in parts], 1) for parts in share.batches]
    labels = [torch.cat([rebuilt(part) for part in parts], 1) for parts in share.batches]
    assert torch.equal(torch.cat(rows), torch.from_numpy(batch.inputs))
    assert torch.equal(torch.cat(labels), torch.from_numpy(batch.labels))
    counts = torch.cat([sum(map(counted, parts)) for parts in share.batches])
    assert counts.tolist() == batch.count.tolist()
    fresh = torch.cat([parts[0].fresh for parts in share.batches])
    assert fresh.tolist() == batch.fresh.tolist()
    assert all(part.fresh is None for parts in share.batches for part in parts[1:])
    assert (share.tokens, share.labelled) == (batch.count.sum(), (batch.labels != -100).sum())


def test_packed_sequences_stay_together_and_are_not_cut() -> None:
    ids = np.arange(12).reshape(3, 4)
    batch = Batch(inputs=ids, labels=ids + 1, borders=np.array([0, 1, 4, 8, 10, 12]))
    first, second = (parts[0] for parts in cut_up(batch, 2, None).batches)
    assert first.borders.tolist() == [0, 1, 4, 8] and second.borders.tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="packed sequences"):
        cut_up(batch, 2, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_make_the_same_steps_in_the_same_order(workers: int) -> None:
    machine = Machine(device=torch.device("cpu"))
    source = Walks()
    feed = Feed(source, machine, range(3, 9), micro=2, segment=None, workers=workers)
    found = list(feed)
    assert len(found) == 6 and feed.waited >= 0
    for step, share in zip(range(3, 9), found, strict=True):
        wanted = cut_up(source.batch(step, 0, 4), 2, None)
        for got, part in zip(share.batches, wanted.batches, strict=True):
            assert torch.equal(got[0].inputs, part[0].inputs)
            assert torch.equal(got[0].wanted, part[0].wanted)


def test_processes_share_rows_alike() -> None:
    for world in (1, 2, 4):
        machines = [Machine(device=torch.device("cpu"), rank=r, world=world) for r in range(world)]
        rows = [r for m in machines for r in range(m.share(8)[0], sum(m.share(8)))]
        assert rows == list(range(8))
    with pytest.raises(ValueError, match="6 rows cannot be shared alike by 4 processes"):
        Machine(device=torch.device("cpu"), world=4).share(6)
