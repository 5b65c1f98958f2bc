"""From a model and its tokenizer to a reader, after looking at what the model can do."""

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atlas_lm.evaluate.reader import Abilities, Reader
from atlas_lm.evaluate.sessions import (
    AtlasSession,
    Session,
    TransformersSession,
    longest_context,
)
from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.fingerprint import fingerprint
from atlas_lm.text import Tokenizer

PROBE = 24  # ids that a model is tried with
# share of the largest logit by which two ways to one place may differ: single precision, half precision;
# a trained model that ignores a mask or drops its cache is off by half of it
AGREE, AGREE_HALF = 1e-3, 0.1
WHOLE = 1 << 40  # columns per call of a model that cannot go on from a warm cache
BYTES_PER_TOKEN = 5  # so many bytes hold an answer of so many tokens

logger = logging.getLogger(__name__)


def open_reader(
    model: Any,
    tokenizer: Tokenizer,
    *,
    name: str,
    stride: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    truncate: bool = False,
) -> Reader:
    """A reader for a model of ours or any causal language model of transformers.

    Args:
        stride: columns per call of the model; by default 512 for ours and 2048 for others.
        limit: tokens that the model takes; by default what its configuration says.
        chat, truncate: as in Reader.
    """
    ours = isinstance(model, AtlasForCausalLM)
    start: Any = (lambda: AtlasSession(model)) if ours else (lambda: TransformersSession(model))
    can = Abilities() if ours else examine_abilities(start, model.config, name)
    begin, limit = _begin(tokenizer), limit or (None if ours else longest_context(model.config))
    template = getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)
    return Reader(
        name=name,
        fingerprint=fingerprint(model),
        tokenizer=tokenizer,
        start=start,
        limit=limit,
        begin=begin,
        prefix=begin or _prefix(tokenizer),
        ends=_ends(model),
        vocab_size=model.config.get_text_config().vocab_size,
        stride=(stride or (512 if ours else 2048)) if can.pieces else WHOLE,
        can=can,
        per_token=1 if hasattr(tokenizer, "tokenizer") else BYTES_PER_TOKEN,
        about={
            "tokenizer": tokenizer.key,
            "template": hashlib.sha256(str(template).encode()).hexdigest()[:16] if chat else None,
            "limit": limit,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        chat=chat,
        truncate=truncate,
    )


def examine_abilities(start: Callable[[], Session], config: Any, name: str) -> Abilities:
    """Try a model on random ids in the ways in which a reader would use it, and say what it cannot do."""
    ids = _probe_ids(config)
    try:
        whole = start().read(ids, None, 1)
    except Exception as error:  # each of the many classes of models fails in its own way
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot read even {PROBE} tokens ({reason})") from error
    assert whole is not None
    if whole.isnan().any():
        raise ValueError(
            f"{name} gives NaN for {PROBE} random tokens; look whether its weights are whole, or try --dtype "
            "float32"
        )
    pieces = _agrees(whole, lambda: _in_two(start(), ids, PROBE // 2))
    steps = pieces or _agrees(whole, lambda: _in_two(start(), ids, PROBE - 1))
    late = PROBE // 3
    alone = start().read(ids[:, late:], None, 1)
    cut = PROBE // 2 if pieces else PROBE - 1
    can = Abilities(
        pieces=pieces,
        steps=steps,
        forks=pieces and _agrees(whole, lambda: _forked(start(), ids)),
        padded=steps and _agrees(alone, lambda: _beside_a_longer(start(), ids, late, cut)),
    )
    for able, told in (
        (can.steps, "forgets what it read when the next token comes, so it gives no answers"),
        (
            can.pieces or not can.steps,
            "forgets what it read when several tokens come to a warm cache, so every text is read in one "
            "call and memory grows with its length",
        ),
        (can.forks, "cannot go on with a text in several ways, so it is read anew for each"),
        (can.padded, "gives other results when a batch is padded, so rows run one by one"),
    ):
        if not able:
            logger.warning("%s %s", name, told)
    return can


def _in_two(session: Session, ids: Tensor, cut: int) -> Tensor | None:
    """A text in two calls."""
    session.read(ids[:, :cut], None, 0)
    return session.read(ids[:, cut:], None, 1)


def _forked(session: Session, ids: Tensor) -> Tensor | None:
    """A text whose second half comes after its first was gone on with in two ways."""
    half = PROBE // 2
    session.read(ids[:, :half], None, 0)
    session.select([0, 0])
    both = session.read(torch.cat([ids[:, :half], ids[:, half:]]), None, 1)
    return None if both is None else both[1:]


def _beside_a_longer(session: Session, ids: Tensor, late: int, cut: int) -> Tensor | None:
    """A row that begins later than its neighbour, in two calls."""
    valid = torch.ones(2, PROBE, dtype=torch.bool)
    valid[1, :late] = False
    both = ids.repeat(2, 1)
    session.read(both[:, :cut], valid[:, :cut], 0)
    logits = session.read(both[:, cut:], valid[:, cut:], 1)
    return None if logits is None else logits[1:]


def _agrees(wanted: Tensor | None, attempt: Callable[[], Tensor | None]) -> bool:
    """Whether another way to the same place leads there, and does not fail."""
    try:
        found = attempt()
    except Exception:  # as above
        return False
    assert wanted is not None and found is not None
    difference = (wanted.float() - found.float()).abs().max()
    share = AGREE if wanted.dtype in (torch.float32, torch.float64) else AGREE_HALF
    return bool(difference <= share * wanted.float().abs().max())


def _probe_ids(config: Any) -> Tensor:
    size = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size, (1, PROBE), generator=generator)


def _begin(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text when it is asked to mark its beginning; bytes have no mark."""
    theirs: Any = getattr(tokenizer, "tokenizer", None)
    if theirs is None:
        return []
    plain = theirs("a", add_special_tokens=False)["input_ids"]
    marked = theirs("a")["input_ids"]
    place = marked.index(plain[0]) if plain and plain[0] in marked else 0
    return list(marked[:place])


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """One token to predict the first one of a text from: the mark of a beginning, or of an end.

    Models of bytes need not know such marks, so there the first byte is not foretold.
    """
    if not hasattr(tokenizer, "tokenizer"):
        return []
    names = ("bos_token_id", "eos_token_id")
    return [tokenizer.special[name] for name in names if name in tokenizer.special][:1]


def _ends(model: Any) -> frozenset[int]:
    settings = getattr(model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, list | tuple) else frozenset([int(found)])
