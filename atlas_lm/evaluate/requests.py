"""What lm-evaluation-harness asks of a model, answered by a reader: likelihoods, answers, whole texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from atlas_lm.evaluate.line import Line
from atlas_lm.evaluate.reader import Reader, Tell

ANSWER_TOKENS = 256  # where a task sets no limit


@dataclass(frozen=True)
class Response:
    """What the harness is told about a request."""

    value: Any
    left_out: int = 0  # tokens of the context that the model had no room for
    window: int | None = (
        None  # tokens that the model read at once, of a text that it cannot take as a whole
    )


def weigh(reader: Reader, requests: Sequence[Any], tell: Tell) -> list[Response]:
    """Likelihoods of continuations; neighbouring requests with the same context share one reading."""
    groups: list[tuple[Line, list[list[int]]]] = []
    last: tuple[int, ...] | None = None
    for request in requests:
        context, continuation = encode_pair(reader, *request.args[:2])
        if last != tuple(context):
            groups.append((reader.begun(Line.of(context)), []))
            last = tuple(context)
        groups[-1][1].append(continuation)
    lines = [reader.fitting(line, max(map(len, group))) for line, group in groups]
    found = reader.likelihoods(lines, [group for _, group in groups], tell)
    return [
        Response((likelihood.nats, likelihood.greedy), line.left_out)
        for line, group in zip(lines, found, strict=True)
        for likelihood in group
    ]


def encode_pair(reader: Reader, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of what follows it, as the harness cuts them.

    White space at the end of a context belongs to the continuation, and the cut is made in the ids of both
    together. An empty context is the token that stands before texts.
    """
    encode = reader.tokenizer.encode
    if not context:
        return list(reader.prefix), encode(continuation)
    bare = context.rstrip()
    whole = encode(context + continuation)
    start = len(encode(bare))
    if start >= len(whole):
        raise ValueError(
            f"{continuation!r} has no token of its own after {context[-40:]!r}, so it cannot be weighed; let "
            "the continuation begin with a space"
        )
    return whole[:start], whole[start:]


def continue_until(reader: Reader, requests: Sequence[Any], tell: Tell) -> list[Response]:
    """Answers up to the strings that end them; all requests of a task have the same."""
    ends, most = _generation(requests[0].args[1])
    texts = [reader.tokenizer.encode(request.args[0]) for request in requests]
    lines = [reader.fitting(reader.begun(Line.of(ids)), most) for ids in texts]
    answers = reader.answers(lines, most, partial(_holds, ends), tell)
    return [
        Response(_before(ends, answer), line.left_out)
        for line, answer in zip(lines, answers, strict=True)
    ]


def _generation(settings: dict[str, Any]) -> tuple[list[str], int]:
    """What ends an answer, and its tokens at most; answers are always the likeliest ones."""
    if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
        raise ValueError(
            f"a task wants answers drawn by chance ({settings}); only the likeliest ones are given here, set "
            "do_sample to false"
        )
    until = settings.get("until") or []
    ends = [until] if isinstance(until, str) else [end for end in until if end]
    names = ("max_gen_toks", "max_new_tokens", "max_tokens")
    return ends, int(next((settings[n] for n in names if settings.get(n)), ANSWER_TOKENS))


def _before(ends: list[str], text: str) -> str:
    for end in ends:
        text = text.partition(end)[0]
    return text


def _holds(ends: list[str], text: str) -> bool:
    return any(end in text for end in ends)


def foretell(reader: Reader, requests: Sequence[Any], tell: Tell) -> list[Response]:
    """Log-likelihoods of whole texts; where they are longer than the model takes, window by window, as the
    harness cuts them. (Where a tokenizer adds a bos, its own model reads two of them; ours one.)
    """
    lines = [Line.of(reader.tokenizer.encode(request.args[0])) for request in requests]
    losses = reader.losses(lines, tell, step=reader.limit)
    return [
        Response(-float(np.nansum(nats, dtype=np.float64)), window=reader.window(line))
        for line, nats in zip(lines, losses, strict=True)
    ]


RESPOND: dict[str, Callable[[Reader, Sequence[Any], Tell], list[Response]]] = {
    "loglikelihood": weigh,
    "generate_until": continue_until,
    "loglikelihood_rolling": foretell,
}
