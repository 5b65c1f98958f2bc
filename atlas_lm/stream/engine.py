"""Read without end at constant cost: ids in, ids out, what was read kept in a state of fixed size."""

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atlas_lm.models import AtlasForCausalLM, StreamState
from atlas_lm.stream.belongs import check_kinds, check_place, kind, start_of, wanted_kinds
from atlas_lm.stream.ids import Ids, Piece, as_array, as_ids, check_range, pieces
from atlas_lm.stream.reading import Reading
from atlas_lm.stream.running import continue_from, ends, next_logits, read, settled

STRIDE = 512
NOTHING = torch.zeros(0, dtype=torch.int64)
Progress = Callable[[int], object]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stride:
    """A stride that was read: the state before it, and its ids."""

    state: StreamState
    ids: Tensor  # [stride] int64


@dataclass(frozen=True)
class _Place:
    """Where a stream stands, and how it came there. Replaced as a whole, so no interruption tears it."""

    reading: Reading
    past: tuple[_Stride, ...]  # the last strides, oldest first


class Stream:
    """One stream of tokens that a model reads, asks about, continues, forks and rolls back.

    What is remembered is always computed in whole strides at the same places of the stream, so the state
    is the same to the last bit, however the tokens were handed over. The model's weights must stay as they
    are while it reads.

    Args:
        stride: tokens per call of the model; by default 512, or that of `reading`. More is faster and
            needs more working memory; a multiple of the memory's chunk is fastest.
        reading: go on from here: what `snapshot` gave, or a file.
        history: strides that `rollback` can go back, at least 1; each costs one more state.
    """

    def __init__(
        self,
        model: AtlasForCausalLM,
        *,
        stride: int | None = None,
        reading: Reading | None = None,
        history: int = 2,
    ) -> None:
        if stride is None:
            stride = STRIDE if reading is None else reading.stride
        if stride < 1 or history < 1:
            raise ValueError(f"stride is {stride} and history {history}, wanted 1 or more of each")
        if model.config.grows:
            logger.warning(
                "this model has %s, so its state grows with the stream and memory is not constant",
                model.config.grows,
            )
        self.model = model
        self.stride = stride
        self.history = history
        self._place = self._placed(self._beginning() if reading is None else reading)
        self._live: tuple[_Place, StreamState] | None = None

    @property
    def reading(self) -> Reading:
        """Where the stream stands: a value, which nothing that is read later changes."""
        return self._place.reading

    @property
    def tokens(self) -> int:
        """Tokens read so far."""
        return self.reading.tokens

    @property
    def bytes(self) -> int:
        """Size of the state."""
        return self.reading.state.bytes

    def absorb(self, ids: Ids, progress: Progress | None = None) -> int:
        """Read ids and remember them. Returns how many.

        A piece with an id that the model does not have is refused as a whole. When it is interrupted, the
        stream stands after some token of the piece, as if it had been handed over up to there.

        Args:
            ids: a list, a 1-D tensor or array, or an iterator of such pieces, which is read lazily.
            progress: called with the number of tokens that this call has read, after each stride and piece.
        """
        done = 0
        for piece in pieces(ids):
            check_range(piece, self.model.config.vocab_size, self.tokens)
            start = 0
            while start < len(piece):
                room = self.stride - len(self.reading.pending) % self.stride
                part = as_ids(piece[start : start + room])
                self._place = self._after(part)
                start += len(part)
                if progress is not None:
                    progress(done + start)
            done += len(piece)
        return done

    def generate(
        self,
        ids: Piece | None = None,
        max_new_tokens: int = 64,
        *,
        remember: bool = True,
        **options: Any,
    ) -> list[int]:
        """Continue the stream, after reading `ids` if there are any; returns the new ids alone.

        Goes through `generate` of transformers and takes its options: sampling, beams (the best is
        returned), `streamer` and so on. A token that ends the text (eos) is not among the returned ids, but
        it is remembered with them.

        Args:
            remember: False leaves the stream where it is.
        """
        given = self._given(ids)
        options["max_new_tokens"] = max_new_tokens
        new = continue_from(self.model, *self._prompt(given), options)
        if remember:
            self.absorb(torch.cat([given, new]))
        answer: list[int] = new.tolist()
        return answer[:-1] if answer and answer[-1] in ends(self.model, options) else answer

    def ask(self, ids: Piece | None = None, max_new_tokens: int = 64, **options: Any) -> list[int]:
        """What `generate` would answer, without remembering question or answer."""
        return self.generate(ids, max_new_tokens, remember=False, **options)

    def logits(self, ids: Piece | None = None) -> Tensor:
        """Logits of the next token, after `ids` if there are any, which are not remembered. [V] fp32"""
        return next_logits(self.model, *self._prompt(self._given(ids)))

    def fork(self) -> "Stream":
        """A second stream from here on; neither changes the other."""
        return copy(self)

    def snapshot(self) -> Reading:
        """Where the stream stands, for `restore` or for a file."""
        return self.reading

    def restore(self, reading: Reading) -> None:
        """Stand where `reading` was taken. What came before it can no longer be rolled back."""
        self._place = self._placed(reading)

    def rollback(self, tokens: int) -> None:
        """Forget the last tokens, exactly: the stream is then one that never read them.

        Reaches back `history` strides, and never before the place where this stream was opened.
        """
        reading, past = self._place.reading, self._place.past
        oldest = past[0].state if past else reading.state
        begun = int(oldest.position[0]) > 0  # the token at its border is no longer at hand
        reach = len(reading.pending) + self.stride * len(past) - begun
        if not 0 <= tokens <= reach:
            raise ValueError(
                f"cannot roll back {tokens} of {self.tokens} tokens, wanted 0 to {reach}: of older states "
                f"{self.history} are kept, in strides of {self.stride}; take a snapshot, or a longer history"
            )
        keep, ids = len(reading.pending) - tokens, reading.pending
        if keep < 1 and past:
            strides = min(-keep // self.stride + 1, len(past))
            keep += strides * self.stride
            reading, ids = replace(reading, state=past[-strides].state), past[-strides].ids
            past = past[:-strides]
        self._place = _Place(replace(reading, pending=ids[:keep].clone()), past)

    def _beginning(self) -> Reading:
        return Reading(state=start_of(self.model), pending=NOTHING, stride=self.stride)

    def _placed(self, reading: Reading) -> _Place:
        """A place to go on from, on the model's device, without a past."""
        _check_reading(self.model, reading, self.stride)
        state = settled(reading.state.to(self.model.device))
        pending = reading.pending.to("cpu", torch.int64).clone()
        return _Place(replace(reading, state=state, pending=pending), ())

    def _after(self, part: Tensor) -> _Place:
        """The place after a few more ids, at most up to the next border. A full stride is read now."""
        reading, past = self._place.reading, self._place.past
        if len(reading.pending) == self.stride:
            past = (*past, _Stride(reading.state, reading.pending))[-self.history :]
            state = read(self.model, reading.state, reading.pending)
            reading = replace(reading, state=state, pending=NOTHING)
        return _Place(replace(reading, pending=torch.cat([reading.pending, part])), past)

    def _given(self, ids: Piece | None) -> Tensor:
        """Ids of a caller, checked; they are not part of the stream."""
        if ids is None:
            return NOTHING
        array = as_array(ids)
        check_range(array, self.model.config.vocab_size, self.tokens)
        return as_ids(array)

    def _prompt(self, ids: Tensor) -> tuple[StreamState, Tensor]:
        """A state and the ids that are still to be read on top of it: at least one, at most a stride."""
        state, last = self._before_last()
        rest = torch.cat([last, ids])
        if not len(rest):
            raise ValueError(
                "empty prompt: nothing was read and no ids are given; pass at least one, e.g. the bos token"
            )
        while len(rest) > self.stride:
            state, rest = read(self.model, state, rest[: self.stride]), rest[self.stride :]
        return state, rest

    def _before_last(self) -> tuple[StreamState, Tensor]:
        """The state before the last token, and that one; kept until the stream moves, so that asking
        again is cheap."""
        reading = self.reading
        if self._live is None or self._live[0] is not self._place:
            self._live = (self._place, read(self.model, reading.state, reading.pending[:-1]))
        return self._live[1], reading.pending[-1:]


def _check_reading(model: AtlasForCausalLM, reading: Reading, stride: int) -> None:
    if reading.stride != stride:
        raise ValueError(
            f"stride is {stride}, but the reading was made in strides of {reading.stride} and would not go "
            f"on exactly; use stride={reading.stride}"
        )
    if reading.state.batch != 1:
        raise ValueError(
            f"the reading has {reading.state.batch} rows, wanted one; each row is a stream of its own"
        )
    kinds = {name: kind(leaf) for name, leaf in reading.state.leaves().items()}
    try:
        position = check_place(reading.tokens, stride, len(reading.pending))
        check_kinds(kinds, wanted_kinds(model.config, start_of(model), position))
    except ValueError as error:
        raise ValueError(f"the reading does not fit the model: it {error}") from error
