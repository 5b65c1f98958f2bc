"""A language model as evaluation sees it: it answers, weighs continuations, and tells losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from atlas_lm.data.prompt import Prompt
from atlas_lm.evaluate.line import Line, columns
from atlas_lm.evaluate.sessions import Session
from atlas_lm.text import Tokenizer

Tell = Callable[[int], object]  # receives the number of tokens that were just read
MARK = "\u241f"  # stands for what is said to the model while its chat template is rendered
LOGITS = 1 << 28  # bytes that logits may take at once


class Refused(ValueError):
    """This cannot be asked of the model, or not with the data that is here; other things can."""


class TooLong(Refused):
    """A text has more tokens than the model can take."""


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation."""

    nats: float  # its log-likelihood
    greedy: bool  # each of its tokens was the likeliest


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a model can do beside reading a text in one call."""

    pieces: bool = True  # several tokens may come to what was read before
    steps: bool = True  # one token may
    forks: bool = True  # a text that was read may be gone on with in several ways
    padded: bool = True  # rows of different length may stand side by side


@dataclass(kw_only=True)
class Reader:
    """Everything that tasks ask of a model, on top of its sessions.

    Args:
        start: a new session.
        limit: tokens that the model can take; None: any number.
        begin: ids that stand before every text, e.g. bos.
        prefix: ids that stand before a text of which every token is to be predicted.
        ends: ids that end an answer.
        stride: columns per call of the model.
        can: what the model can do beside reading a text in one call.
        per_token: ids of this model that make one token of an answer; bytes need several.
        about: for the record, what else of the model determines results.
        chat: wrap prompts in the chat template of the tokenizer.
        truncate: leave out the middle of what is too long, and say so, instead of refusing it.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    start: Callable[[], Session]
    limit: int | None
    begin: list[int]
    prefix: list[int]
    ends: frozenset[int]
    vocab_size: int
    stride: int = 512
    can: Abilities = Abilities()
    per_token: int = 1
    about: dict[str, Any] = field(default_factory=dict)
    chat: bool = False
    truncate: bool = False

    def line(self, said: Prompt, room: int = 0) -> Line:
        """The ids of a text, with `room` left for more.

        TooLong: there are more of them than the model can take.
        """
        return self.fitting(self.begun(Line.of(*said.ids(self.tokenizer))), room)

    def begun(self, line: Line) -> Line:
        """The line with what stands before every text, unless its own text begins so, as in some chats."""
        if line.read(0, len(self.begin)).tolist() == self.begin:
            return line
        return Line.of(self.begin, *line.pieces)

    def fitting(self, line: Line, room: int = 0) -> Line:
        """The line, if the model takes it and `room` more; else without its middle, or refused."""
        if self.limit is None or len(line) + room <= self.limit:
            return line
        if self.truncate and room < self.limit:
            return line.shortened(self.limit - room)
        raise TooLong(
            f"the text has {len(line):,} tokens and {room} are to follow, but {self.name} takes "
            f"{self.limit:,}; take a shorter length, or truncate: leave out the middle"
        )

    def said(self, prompt: Prompt, lead: str = "") -> Prompt:
        """All that the model is told: the prompt, in a chat if so wanted, and how its answer begins."""
        if not self.chat:
            return prompt.within("", lead)
        rendered = self.chat_text([{"role": "user", "content": MARK}])
        before, _, after = rendered.partition(MARK)
        # after the template's own line end an answer begins without a space
        return prompt.within(before, after + (lead.lstrip() if after[-1:].isspace() else lead))

    def chat_text(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages in the form that the chat template gives them; ready for an answer, or to go on with the
        last message."""
        template: Any = getattr(self.tokenizer, "tokenizer", None)
        if getattr(template, "chat_template", None) is None:
            raise ValueError(f"the tokenizer of {self.name} has no chat template; leave out --chat")
        text: str = template.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def answers(
        self,
        lines: Sequence[Line],
        most: int,
        stop: Callable[[str], bool] = lambda text: False,
        tell: Tell = lambda tokens: None,
    ) -> list[str]:
        """The likeliest continuation of each line, token by token, up to `most` tokens.

        stop: whether an answer is complete; it is asked after every token.
        """
        if not self.can.steps:
            raise Refused(f"{self.name} cannot go on token by token, so it gives no answers")
        session = self.start()
        last = self._read(session, lines, tell)
        made: list[list[int]] = [[] for _ in lines]
        texts = ["" for _ in lines]
        going = [True] * len(lines)
        for count in range(most):
            tokens = last.argmax(-1)
            for row, token in enumerate(tokens.tolist()):
                if going[row] and token in self.ends:
                    going[row] = False
                elif going[row]:
                    made[row].append(token)
                    texts[row] = self.tokenizer.decode(made[row])
                    going[row] = not stop(texts[row])
            if not any(going) or count == most - 1:
                break
            valid = None if all(going) else torch.tensor(going).unsqueeze(1)
            logits = session.read(tokens.cpu().unsqueeze(1), valid, 1)
            assert logits is not None
            last = self.sound(logits, valid)[:, -1]
        return texts

    def likelihoods(
        self,
        contexts: Sequence[Line],
        continuations: Sequence[Sequence[list[int]]],
        tell: Tell = lambda tokens: None,
    ) -> list[list[Likelihood]]:
        """Of each context the likelihoods of its continuations.

        A context is read once for all of them; by models that cannot do so, anew for each.
        """
        pairs = zip(contexts, continuations, strict=True)
        if not self.can.forks:
            return [[self._weigh_alone(line, ids, tell) for ids in group] for line, group in pairs]
        if not self.can.padded and len(contexts) > 1:
            return [self.likelihoods([line], [group], tell)[0] for line, group in pairs]
        session = self.start()
        last = self._read(session, contexts, tell)
        rows = [row for row, group in enumerate(continuations) for _ in group]
        session.select(rows)
        flat = [Line.of(ids) for group in continuations for ids in group]
        weights = Weights(flat)
        weights.add(last[rows].unsqueeze(1), 0)  # what comes after the contexts
        longest, width = max(map(len, flat)), self._width(len(flat))
        for first in range(0, longest - 1, width):
            ids, valid = columns(flat, first, min(first + width, longest - 1), at_end=False)
            logits = session.read(ids, valid, ids.shape[1])
            assert logits is not None
            weights.add(self.sound(logits, valid), first + 1)
        tell(sum(map(len, flat)))
        parts = iter(weights.found())
        return [[next(parts) for _ in group] for group in continuations]

    def _weigh_alone(self, context: Line, ids: list[int], tell: Tell) -> Likelihood:
        """One continuation, with its context in one call."""
        whole, weights = Line.of(*context.pieces, ids), Weights([Line.of(ids)])
        given, _ = columns([whole], 0, len(whole) - 1, at_end=False)
        logits = self.start().read(given, None, len(ids))
        assert logits is not None
        weights.add(self.sound(logits), 0)
        tell(len(whole))
        return weights.found()[0]

    def losses(
        self,
        lines: Sequence[Line],
        tell: Tell = lambda tokens: None,
        *,
        step: int | None = None,
    ) -> list[NDArray[np.float32]]:
        """Nats of every token of each line given those before it; NaN where nothing stands before it.

        A model with a limit reads longer lines in windows of that size.

        Args:
            step: tokens that are new in each window; by default half of it, so that every token but the
                first ones has at least half a window before it.
        """
        given = [Line.of(self.prefix, *line.pieces) for line in lines]
        found = [np.full(len(line), np.nan, np.float32) for line in given]
        windows = [
            (row, window)
            for row, line in enumerate(given)
            for window in _windows(len(line), self.limit, step)
        ]
        beside = len(lines) if self.can.padded else 1
        for place in range(0, len(windows), beside):
            group = windows[place : place + beside]
            parts = [given[row].cut(start, stop) for row, (start, _, stop) in group]
            for (row, (start, fresh, stop)), nats in zip(
                group, self._losses(parts, tell), strict=True
            ):
                found[row][fresh:stop] = nats[fresh - start :]
        return [part[len(self.prefix) :] for part in found]

    def window(self, line: Line) -> int | None:
        """Tokens of the windows in which `losses` reads a line; None: it is read as a whole."""
        whole = self.limit is None or len(self.prefix) + len(line) <= self.limit + 1
        return None if whole else self.limit

    def _losses(self, lines: list[Line], tell: Tell) -> list[NDArray[np.float32]]:
        """As `losses`, of lines that the model takes at once."""
        session = self.start()
        longest = max(map(len, lines))
        found = [np.full(len(line), np.nan, np.float32) for line in lines]
        width = self._width(len(lines)) if self.can.pieces else longest
        for first in range(0, longest - 1, width):
            last = min(first + width, longest - 1)
            ids, valid = columns(lines, first, last, at_end=False)
            logits = session.read(ids, valid, last - first)
            assert logits is not None
            self.sound(logits, valid)
            targets, _ = columns(lines, first + 1, last + 1, at_end=False)
            nats = cross_entropy(
                logits.float().flatten(0, 1), targets.flatten().to(logits.device), reduction="none"
            )
            for row, line in enumerate(lines):
                end = min(last + 1, len(line))
                part = nats.view(targets.shape)[row, : max(0, end - first - 1)]
                found[row][first + 1 : end] = part.cpu().numpy()
            tell(targets.numel())
        return found

    def _read(self, session: Session, lines: Sequence[Line], tell: Tell) -> Tensor:
        """Read all lines, which end together; the logits of what comes next, [B, V] fp32."""
        longest = max(map(len, lines))
        if not min(map(len, lines)):
            raise ValueError(
                "a prompt has no tokens; give the model at least one, e.g. a bos token"
            )
        logits: Tensor | None = None
        for first in range(0, longest, self.stride):
            last = min(first + self.stride, longest)
            ids, valid = columns(lines, first, last, at_end=True)
            logits = session.read(ids, valid, 1 if last == longest else 0)
            tell(ids.numel() if valid is None else int(valid.sum()))
        assert logits is not None
        return self.sound(logits[:, -1].float())

    def _width(self, rows: int) -> int:
        """Columns whose logits are made at once."""
        return max(1, min(self.stride, LOGITS // (4 * self.vocab_size * rows)))

    def sound(self, logits: Tensor, valid: Tensor | None = None) -> Tensor:
        """The logits, if those that count are numbers: a broken model must not look like a bad one."""
        broken = logits.isnan().any(-1)
        if valid is not None:
            broken &= valid.to(broken.device)
        if broken.any():
            raise ValueError(
                f"{self.name} gave NaN where it should tell the next token; try --dtype float32, and look "
                "whether its weights are whole"
            )
        return logits


class Weights:
    """Sums up the likelihoods of several continuations, some columns of logits at a time."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._nats = torch.zeros(len(lines), dtype=torch.float64)
        self._greedy = torch.ones(len(lines), dtype=torch.bool)

    def add(self, logits: Tensor, first: int) -> None:
        """Logits [B, n, V] from which the tokens first to first + n - 1 follow."""
        wanted, valid = columns(self._lines, first, first + logits.shape[1], at_end=False)
        counts = torch.ones_like(wanted, dtype=torch.bool) if valid is None else valid
        targets = wanted.to(logits.device)
        nats = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        nats = nats.cpu().view(wanted.shape)
        self._nats -= torch.where(counts, nats, 0.0).sum(1, dtype=torch.float64)
        self._greedy &= ((logits.argmax(-1) == targets).cpu() | ~counts).all(1)

    def found(self) -> list[Likelihood]:
        pairs = zip(self._nats.tolist(), self._greedy.tolist(), strict=True)
        return [Likelihood(nats, greedy) for nats, greedy in pairs]


def _windows(length: int, limit: int | None, step: int | None) -> list[tuple[int, int, int]]:
    """Windows (start, first token that is new, stop) that cover a text, each as large as the model takes.

    The last token of a window is foretold and not read.
    """
    if limit is None or length <= limit + 1:
        return [(0, 0, length)]
    found = [(0, 0, limit + 1)]
    while (fresh := found[-1][2]) < length:
        stop = min(fresh + (step or max(1, limit // 2)), length)
        found.append((stop - limit - 1, fresh, stop))
    return found
