"""Where sequences lie in flat tensors [rows, H, ...], and how each is cut into chunks.

Kernels know only this: rows of a batch, packed sequences and rows of different length look alike.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token t of sequence n stands in row start[n] + t of q, y and the gates, pair t in row
    pair_start[n] + t of k and v; pairs exist from t = -past[n] on, tokens below length[n]."""

    start: Tensor  # [N] int64
    pair_start: Tensor  # [N] int64
    length: Tensor  # [N] int32
    past: Tensor  # [N] int32
    first_chunk: Tensor  # [N+1] int32
    last_chunk: Tensor  # [N] int32, the last that holds tokens; before the first chunk: none does
    sequence: Tensor  # [NC] int32, the sequence of each chunk
    counts: tuple[int, ...]  # chunks of each
    chunk: int  # tokens per chunk (or tile)
    most: int  # chunks of the longest sequence
    even: bool  # all have `most` chunks
    full: bool  # every row of q is a token of some sequence

    @property
    def count(self) -> int:
        return self.start.shape[0]

    @property
    def chunks(self) -> int:
        return self.sequence.shape[0]

    def parts(self, number: int) -> Iterator[tuple["Sequences", slice, slice]]:
        """So many stretches of sequences, fewer where there are not as many; the sequences and chunks of
        these that each holds."""
        size = -(-self.count // number)
        for first in range(0, self.count, size):
            mine = slice(first, min(first + size, self.count))
            counts = self.counts[mine]
            begin = sum(self.counts[:first])
            chunks = slice(begin, begin + sum(counts))
            yield (
                replace(
                    self,
                    start=self.start[mine],
                    pair_start=self.pair_start[mine],
                    length=self.length[mine],
                    past=self.past[mine],
                    first_chunk=self.first_chunk[first : mine.stop + 1] - begin,
                    last_chunk=self.last_chunk[mine] - begin,
                    sequence=self.sequence[chunks] - first,
                    counts=counts,
                    most=max(counts),
                    even=len(set(counts)) == 1,
                ),
                mine,
                chunks,
            )


def even_rows(
    batch: int,
    tokens: int,
    chunk: int,
    device: torch.device,
    *,
    before: int = 0,
    past: Tensor | None = None,
    length: Tensor | None = None,
) -> Sequences:
    """One sequence per row of a batch.

    before: pairs that stand in front of each row of k and v   past: [B], how many of them exist;
    None: all   length: [B], tokens of each row, the first ones; None: all
    """
    found = _even_rows(batch, tokens, chunk, device, before)
    if past is not None:
        found = replace(found, past=past.to(torch.int32))
    if length is not None:
        length = length.to(torch.int32)
        last = found.first_chunk[:-1] + (length + chunk - 1) // chunk - 1
        found = replace(found, length=length, last_chunk=last, full=False)
    return found


@functools.lru_cache(maxsize=32)
def _even_rows(batch: int, tokens: int, chunk: int, device: torch.device, before: int) -> Sequences:
    with torch.inference_mode(False):  # kept for later calls, which may want gradients
        row = torch.arange(batch + 1, device=device)
        most = -(-tokens // chunk)
        return Sequences(
            start=row[:-1] * tokens,
            pair_start=row[:-1] * (before + tokens) + before,
            length=torch.full((batch,), tokens, dtype=torch.int32, device=device),
            past=torch.full((batch,), before, dtype=torch.int32, device=device),
            first_chunk=(row * most).to(torch.int32),
            last_chunk=(row[1:] * most - 1).to(torch.int32),
            sequence=row[:-1].repeat_interleave(most).to(torch.int32),
            counts=(most,) * batch,
            chunk=chunk,
            most=most,
            even=True,
            full=True,
        )


def read_borders(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The borders [N+1] = 0, end of the first sequence, ..., tokens, read from the device and checked."""
    ends = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or ends != sorted(set(ends)):
        raise ValueError(
            f"cu_seqlens is {ends or list(cu_seqlens.shape)}, wanted rising borders 0, ..., {tokens}: one "
            "more than there are sequences, none of them empty; cumulate the lengths from 0"
        )
    return ends


def packed(cu_seqlens: Tensor, chunk: int, rows: int) -> Sequences:
    """Sequences end to end in one row of so many tokens; cu_seqlens: [N+1], their borders, which are read."""
    ends = read_borders(cu_seqlens, rows)
    borders = cu_seqlens.to(torch.int64)
    length = borders.diff()
    chunks = (length + chunk - 1) // chunk
    counts = [-(-(b - a) // chunk) for a, b in itertools.pairwise(ends)]
    first = torch.nn.functional.pad(chunks.cumsum(0), (1, 0))
    number = torch.arange(len(counts), device=borders.device)
    return Sequences(
        start=borders[:-1],
        pair_start=borders[:-1],
        length=length.to(torch.int32),
        past=torch.zeros_like(length, dtype=torch.int32),
        first_chunk=first.to(torch.int32),
        last_chunk=(first[1:] - 1).to(torch.int32),
        sequence=number.repeat_interleave(chunks, output_size=sum(counts)).to(torch.int32),
        counts=tuple(counts),
        chunk=chunk,
        most=max(counts),
        even=len(set(counts)) == 1,
        full=True,
    )


def lay_sequences(
    q: Tensor,
    before: int,
    chunk: int,
    past: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Sequences:
    """Of queries [B, T, H, F] and `before` pairs more in each row: rows, or sequences packed into one."""
    batch, tokens = q.shape[:2]
    if length is not None and cu_seqlens is not None:
        raise ValueError("length and cu_seqlens both say where sequences end; pass one of them")
    if before < 0 or (cu_seqlens is not None and (batch != 1 or before)):
        raise ValueError(
            f"q has {batch} rows of {tokens} tokens, k {before + tokens} pairs each; wanted as many "
            "pairs or more, and with cu_seqlens one row and as many"
        )
    if cu_seqlens is not None:
        return packed(cu_seqlens, chunk, tokens)
    return even_rows(batch, tokens, chunk, q.device, before=before, past=past, length=length)
