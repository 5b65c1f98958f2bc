"""Where tokens, pairs and chunks lie: every layout against the lists one would write by hand."""

import itertools

import pytest
import torch

from atlas_lm.ops.sequences import Sequences, even_rows, packed

CPU = torch.device("cpu")


def rows_by_chunk(s: Sequences) -> list[list[int]]:
    """The rows of q that each chunk holds."""
    found = []
    for i, n in enumerate(s.sequence.tolist()):
        t0 = (i - int(s.first_chunk[n])) * s.chunk
        stop = min(t0 + s.chunk, int(s.length[n]))
        found.append([int(s.start[n]) + t for t in range(t0, stop)])
    return found


def last_by_hand(s: Sequences) -> list[int]:
    """The last chunk of each sequence that holds tokens, or the one before its first."""
    chunks = rows_by_chunk(s)
    own = [[i for i, n in enumerate(s.sequence.tolist()) if n == m] for m in range(s.count)]
    return [
        max([i for i in mine if chunks[i]], default=int(s.first_chunk[m]) - 1)
        for m, mine in enumerate(own)
    ]


def test_rows_of_a_batch():
    s = even_rows(2, 5, 2, CPU)
    assert rows_by_chunk(s) == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]]
    assert s.last_chunk.tolist() == last_by_hand(s) == [2, 5]
    assert s.pair_start.tolist() == s.start.tolist() == [0, 5]
    assert s.past.tolist() == [0, 0]
    assert (s.count, s.chunks, s.most, s.even, s.full) == (2, 6, 3, True, True)


def test_pairs_in_front_move_only_the_pairs():
    s = even_rows(2, 5, 2, CPU, before=3, past=torch.tensor([1, 3]))
    assert s.start.tolist() == [0, 5]
    assert s.pair_start.tolist() == [3, 11]
    assert s.past.tolist() == [1, 3]
    assert even_rows(2, 5, 2, CPU, before=3).past.tolist() == [3, 3]


def test_rows_of_different_length_keep_their_chunks():
    s = even_rows(3, 5, 2, CPU, length=torch.tensor([5, 0, 3]))
    assert rows_by_chunk(s) == [[0, 1], [2, 3], [4], [], [], [], [10, 11], [12], []]
    assert s.last_chunk.tolist() == last_by_hand(s) == [2, 2, 7]
    assert s.even and not s.full


def test_what_one_call_changes_the_next_does_not_see():
    """Layouts are kept from call to call; lengths and pasts are not."""
    even_rows(2, 5, 2, CPU, before=3, past=torch.tensor([1, 2]), length=torch.tensor([1, 2]))
    s = even_rows(2, 5, 2, CPU, before=3)
    assert s.length.tolist() == [5, 5] and s.past.tolist() == [3, 3] and s.full


def test_made_without_gradients_it_serves_with_them():
    with torch.inference_mode():
        s = even_rows(2, 7, 3, CPU)
    x = torch.ones(14, requires_grad=True)
    x[s.start].sum().backward()
    assert x.grad is not None and x.grad.sum() == 2


@pytest.mark.parametrize("borders", [(0, 9), (0, 1, 4, 9), (0, 4, 8)])
def test_packed_sequences_are_each_a_row(borders):
    s = packed(torch.tensor(borders), 2, borders[-1])
    wanted, pieces = [], list(itertools.pairwise(borders))
    for start, stop in pieces:
        wanted += [list(range(t, min(t + 2, stop))) for t in range(start, stop, 2)]
    assert rows_by_chunk(s) == wanted
    assert s.last_chunk.tolist() == last_by_hand(s)
    counts = [-(-(stop - start) // 2) for start, stop in pieces]
    assert (s.most, s.even) == (max(counts), len(set(counts)) == 1)
    assert not s.past.any() and torch.equal(s.pair_start, s.start)


def test_types_are_those_that_kernels_read():
    for s in (
        even_rows(2, 5, 2, CPU, length=torch.tensor([5, 1])),
        packed(torch.tensor([0, 3]), 2, 3),
    ):
        assert s.start.dtype == s.pair_start.dtype == torch.int64
        for x in (s.length, s.past, s.first_chunk, s.last_chunk, s.sequence):
            assert x.dtype == torch.int32


def test_parts_are_the_sequences_apart():
    whole = packed(torch.tensor([0, 5, 22, 40, 41]), chunk=16, rows=41)
    found = list(whole.parts(2))
    assert [(s.count, mine, chunks) for s, mine, chunks in found] == [
        (2, slice(0, 2), slice(0, 3)),
        (2, slice(2, 4), slice(3, 6)),
    ]
    second = found[1][0]
    assert second.start.tolist() == [22, 40] and second.length.tolist() == [18, 1]
    assert second.first_chunk.tolist() == [0, 2, 3] and second.last_chunk.tolist() == [1, 2]
    assert second.sequence.tolist() == [0, 0, 1] and second.counts == (2, 1)
    assert second.most == 2 and not second.even and second.full


def test_there_are_no_more_parts_than_sequences():
    rows = even_rows(3, 20, 16, torch.device("cpu"))
    assert [mine for _, mine, _ in rows.parts(7)] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert [mine for _, mine, _ in rows.parts(2)] == [slice(0, 2), slice(2, 3)]
