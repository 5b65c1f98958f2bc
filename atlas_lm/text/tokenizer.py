"""Tokenizers: bytes, which need no files, and any tokenizer of the Hugging Face world."""

import codecs
import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

BYTES = 256
BROKEN = "\ufffd"  # what decoding shows in place of bytes that are no text
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
KEPT = 8  # tokens that the decoder of a stream looks back
# texts cut where sentences meet, for tokenizers to show that cutting changes nothing
CUTS = (
    ("It was late.", " The door\nopened; nobody came."),
    ('"Why?" she asked.', ' "Ask Mr. Hay, 1887," he said!'),
    ("_No_ (see below)", " Mary went to the garden."),
    ("It was late.", "\nOne of the doors\n</context>\n\nQuestion: Which?"),
)


class TextDecoder(Protocol):
    """Ids in, text out, while they come: a character is handed out when it is whole."""

    def feed(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str:
        """What is left at the end; bytes that never became a character show as U+FFFD."""
        ...


class Tokenizer(Hashable, Protocol):
    """What the rest of the package asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1."""
        ...

    @property
    def special(self) -> dict[str, int]:
        """Those it has of bos_token_id, eos_token_id and pad_token_id."""
        ...

    @property
    def key(self) -> str:
        """Tells tokenizers apart: two that share it give the same ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of the text itself, without a beginning or an end around them."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ones have none."""
        ...

    def decoder(self) -> TextDecoder: ...

    def save(self, folder: str | Path) -> None:
        """Write what `load_tokenizer` needs."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then bos 256, eos 257, pad 258.

    >>> ByteTokenizer().encode("é!")
    [195, 169, 33]
    """

    bos, eos, pad = BYTES, BYTES + 1, BYTES + 2
    vocab_size = BYTES + 3

    @property
    def special(self) -> dict[str, int]:
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}

    key = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        decoder = self.decoder()
        return decoder.feed(ids) + decoder.flush()

    def decoder(self) -> TextDecoder:
        return _ByteDecoder()

    def save(self, folder: str | Path) -> None:
        """Nothing to write: a model of 259 ids without tokenizer files reads bytes."""


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        numbers = [int(number) for number in ids]
        bad = [number for number in numbers if not 0 <= number < ByteTokenizer.vocab_size]
        if bad:
            raise ValueError(
                f"token id {bad[0]} is out of range, wanted 0 to {ByteTokenizer.vocab_size - 1}"
            )
        return self._decoder.decode(bytes(number for number in numbers if number < BYTES))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class HuggingFaceTokenizer:
    """A thin face of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._size = 1 + max(tokenizer.get_vocab().values())

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def special(self) -> dict[str, int]:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        found = {name: getattr(self.tokenizer, name, None) for name in names}
        return {name: int(number) for name, number in found.items() if number is not None}

    @cached_property
    def key(self) -> str:
        """Of all that a fast tokenizer is made of; a slow one is told by its class and its words."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        words = sorted(self.tokenizer.get_vocab().items())
        made_of = f"{type(self.tokenizer)}{words}" if fast is None else fast.to_str()
        return hashlib.sha256(made_of.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        found = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [list(ids) for ids in found["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def decoder(self) -> TextDecoder:
        return _WindowDecoder(self.decode)

    def save(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)


class _WindowDecoder:
    """Decodes the last tokens again with each new one, because their text depends on their neighbours."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # characters of the text of `_ids` that were handed out

    def feed(self, ids: Iterable[int]) -> str:
        self._ids += [int(number) for number in ids]
        text = self._decode(self._ids)
        whole = not text.endswith(BROKEN)  # else a character may still be on its way
        new = self._show(text, len(text) if whole else len(text) - 1)
        if whole and len(self._ids) > 2 * KEPT:
            self._ids = self._ids[-KEPT:]
            self._shown = len(self._decode(self._ids))
        return new

    def flush(self) -> str:
        text = self._decode(self._ids)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        new, self._shown = text[self._shown : end], max(self._shown, end)
        return new


def load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of the model in a folder: from its files, or bytes if there are none.

    Args:
        vocab_size: ids that the model has; a tokenizer with more of them is refused.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; pass one that holds a model or a tokenizer")
    files = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if files:
        return check_vocabulary(_from_files(folder, files), vocab_size)
    if vocab_size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"{folder} has no tokenizer files and its model {vocab_size} ids, which are no bytes "
            f"({ByteTokenizer.vocab_size}); save the tokenizer of the model there"
        )
    return ByteTokenizer()


@lru_cache(maxsize=8)
def cuts_freely(tokenizer: Tokenizer) -> bool:
    """Whether a text that is cut before white space gives the ids of the whole, as byte-level ones do.

    Others (SentencePiece with its mark before the first word) have to see a text as a whole.
    """
    return all(
        tokenizer.encode(left + right) == tokenizer.encode(left) + tokenizer.encode(right)
        for left, right in CUTS
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """The tokenizer, if every id that it gives is one of the model's."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model only up to {vocab_size - 1}; "
            "use the tokenizer that the model was made with"
        )
    return tokenizer


def _from_files(folder: Path, files: list[str]) -> HuggingFaceTokenizer:
    from transformers import AutoTokenizer, GPT2Tokenizer

    # vocabulary and merges alone, as GPT-2 was published, do not name their class
    kind = GPT2Tokenizer if set(files) == {"vocab.json", "merges.txt"} else AutoTokenizer
    try:
        return HuggingFaceTokenizer(kind.from_pretrained(str(folder), local_files_only=True))
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer files in {folder} ({', '.join(files)}) cannot be loaded: {reason}"
        ) from error
