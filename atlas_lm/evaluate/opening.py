"""From a model and its tokenizer to a reader, after looking at what the model can do."""

import logging
from typing import Any

import torch
from torch import Tensor

from atlas_lm.evaluate.reader import Reader
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

logger = logging.getLogger(__name__)


def open_reader(
    model: Any,
    tokenizer: Tokenizer,
    *,
    name: str,
    stride: int | None = None,
    chat: bool = False,
    truncate: bool = False,
) -> Reader:
    """A reader for a model of ours or any causal language model of transformers.

    Args:
        stride: columns per call of the model; by default 512 for ours and 2048 for others.
        chat, truncate: as in Reader.
    """
    ours = isinstance(model, AtlasForCausalLM)
    start: Any = (lambda: AtlasSession(model)) if ours else (lambda: TransformersSession(model))
    pieces = ours or _reads_in_pieces(start(), start(), model.config)
    if not pieces:
        logger.warning(
            "%s forgets what it read when several tokens come to a warm cache, so every text is read in one "
            "call and memory grows with its length",
            name,
        )
    padded = ours or _takes_padding(start(), start(), model.config)
    if not padded:
        logger.warning(
            "%s gives other results when a batch is padded, so rows run one by one", name
        )
    begin = _begin(tokenizer)
    return Reader(
        name=name,
        fingerprint=fingerprint(model),
        tokenizer=tokenizer,
        start=start,
        limit=None if ours else longest_context(model.config),
        begin=begin,
        prefix=begin or _prefix(tokenizer),
        ends=_ends(model),
        vocab_size=model.config.get_text_config().vocab_size,
        stride=(stride or (512 if ours else 2048)) if pieces else WHOLE,
        padded=padded,
        chat=chat,
        truncate=truncate,
    )


def _reads_in_pieces(once: Session, twice: Session, config: Any) -> bool:
    """Whether a text read in two calls is the text read in one."""
    ids = _probe_ids(config)
    whole = once.read(ids, None, 1)
    twice.read(ids[:, : PROBE // 2], None, 0)
    return _agree(whole, twice.read(ids[:, PROBE // 2 :], None, 1))


def _takes_padding(alone: Session, beside: Session, config: Any) -> bool:
    """Whether a row that begins later than its neighbour is what it is alone."""
    ids, late = _probe_ids(config), PROBE // 3
    valid = torch.ones(2, PROBE, dtype=torch.bool)
    valid[1, :late] = False
    try:
        both = beside.read(ids.repeat(2, 1), valid, 1)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    assert both is not None
    return _agree(alone.read(ids[:, late:], None, 1), both[1:])


def _probe_ids(config: Any) -> Tensor:
    size = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size, (1, PROBE), generator=generator)


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None and other is not None
    difference = (one.float() - other.float()).abs().max()
    share = AGREE if one.dtype in (torch.float32, torch.float64) else AGREE_HALF
    return bool(difference <= share * one.float().abs().max())


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
