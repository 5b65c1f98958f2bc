"""Texts as token ids on disk: written once, shard by shard, and read from mapped files.

A folder of shards has shard-00000.npy and so on, ids of whole documents one behind the other;
starts-00000.npy, where each document of the shard begins, and its end; tokenizer/; and shards.json.
"""

import errno
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas_lm.data.corpora import check_corpora, corpus, corpus_fingerprint
from atlas_lm.data.kept import keep_folder, make_folder
from atlas_lm.data.library import Library, cache_folder
from atlas_lm.data.vocabularies import find_tokenizer
from atlas_lm.text import ByteTokenizer, Tokenizer, cut, cuts_freely, load_tokenizer

VERSION = 1  # of the folder
INDEX, TOKENIZER = "shards.json", "tokenizer"
SHARD_TOKENS = 2**26
TEXT = 2**14  # characters that are encoded as one; many short texts take three times as long
BATCH = 2**20  # characters that are encoded at once
AGAIN = "copy it there again, or remove the folder and make it anew (`atlas data tokenize`)"
Tell = Callable[[str, float], None]  # takes the name of a document and characters just done


@dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    """Documents as ids of a tokenizer, the end of a text behind each where the tokenizer has one.

    ids[s][starts[s][d] : starts[s][d + 1]] is document d of shard s. Documents are counted over all shards.
    """

    folder: Path
    vocab_size: int
    eos: int | None
    tokenizer_key: str
    fingerprint: str  # of the ids and the tokenizer
    ids: tuple[NDArray[np.unsignedinteger], ...]
    starts: tuple[NDArray[np.int64], ...]

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.ids)

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.concatenate([np.diff(starts) for starts in self.starts])

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """The first document of each shard."""
        return np.cumsum([0, *(len(starts) - 1 for starts in self.starts[:-1])])

    def read(self, document: int, begin: int, end: int) -> NDArray[np.int64]:
        """Tokens begin .. end - 1 of a document."""
        if not 0 <= document < self.documents:
            raise ValueError(f"document is {document}, wanted 0 to {self.documents - 1}")
        if not 0 <= begin <= end <= self.lengths[document]:
            raise ValueError(
                f"tokens {begin} to {end} of document {document} are wanted, which has "
                f"{self.lengths[document]}"
            )
        shard = int(np.searchsorted(self._firsts, document, side="right")) - 1
        start = int(self.starts[shard][document - self._firsts[shard]])
        return self.ids[shard][start + begin : start + end].astype(np.int64)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids these are."""
        if self.tokenizer_key == ByteTokenizer.key:
            return ByteTokenizer()
        return load_tokenizer(self.folder / TOKENIZER, self.vocab_size)


def write_shards(
    texts: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    about: dict[str, Any],
    tokenizer_name: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    tell: Tell = lambda what, more: None,
) -> Shards:
    """Write documents as shards, all of them or nothing, and open them.

    Args:
        texts: name and text of each document.
        folder: new or empty.
        about: what the documents are, kept in shards.json, as is the name of the tokenizer.
        shard_tokens: a shard ends before it has more, unless one document has.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens}, wanted 1 or more")
    check_free(folder)
    head = {"tokenizer": tokenizer_name, "about": about}
    make_folder(folder, lambda made: _write(texts, tokenizer, made, head, shard_tokens, tell))
    return open_shards(folder)


def check_free(folder: Path) -> None:
    """Refuse to write where something is."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty; choose another name")


def find_shards(
    names: tuple[str, ...], tokenizer_name: str, library: Library | None = None
) -> Shards:
    """The shards of corpora, one behind the other, made when they are first wanted and kept.

    Args:
        names: as `corpus` takes them.
        tokenizer_name: as `find_tokenizer` takes it.
    """
    check_corpora(names)
    tokenizer = find_tokenizer(tokenizer_name, library)
    prints = {name: corpus_fingerprint(name, library) for name in names}
    key = _hash(*(prints[name] for name in names), tokenizer.key)
    path = cache_folder() / "shards" / f"{key}-{VERSION}"
    head = {"tokenizer": tokenizer_name, "about": {"corpora": prints}}

    def make(folder: Path) -> None:
        texts = chain.from_iterable(corpus(name, library) for name in names)
        _write(texts, tokenizer, folder, head, SHARD_TOKENS, lambda what, more: None)

    if not path.is_dir():
        keep_folder(path, make)
    return open_shards(path)


def open_shards(folder: Path) -> Shards:
    """The shards in a folder, mapped. ValueError: something is missing or not as it was written."""
    index = _read_index(folder)
    shards = index["shards"]
    if not shards:
        raise ValueError(f"{folder} has no shards; {AGAIN}")
    return Shards(
        folder=folder,
        vocab_size=index["vocab_size"],
        eos=index["eos"],
        tokenizer_key=index["tokenizer_key"],
        fingerprint=_hash(*(shard["sha256"] for shard in shards), index["tokenizer_key"]),
        ids=tuple(_open_ids(folder, shard) for shard in shards),
        starts=tuple(_open_starts(folder, shard) for shard in shards),
    )


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder} holds no shards: {INDEX} is not there; make them with `atlas data tokenize`"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {AGAIN}") from error
    if index.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {index.get('version')!r}, wanted {VERSION}; make the shards anew with "
            "`atlas data tokenize`, or read them with the version of atlas-lm that wrote them"
        )
    return index


def _open_ids(folder: Path, shard: dict[str, Any]) -> NDArray[np.unsignedinteger]:
    path = folder / shard["file"]
    size = path.stat().st_size if path.is_file() else None
    if size is None:
        raise ValueError(f"{path} is missing; {AGAIN}")
    if size != shard["bytes"]:
        raise ValueError(f"{path} has {size} bytes, wanted {shard['bytes']}; {AGAIN}")
    return np.load(path, mmap_mode="r")


def _open_starts(folder: Path, shard: dict[str, Any]) -> NDArray[np.int64]:
    path = folder / shard["starts"]
    try:
        starts = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}); {AGAIN}") from error
    if len(starts) != shard["documents"] + 1 or starts[-1] != shard["tokens"]:
        raise ValueError(f"{path} does not fit {shard['file']}; {AGAIN}")
    return np.asarray(starts, dtype=np.int64)


def _write(
    texts: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    folder: Path,
    head: dict[str, Any],
    shard_tokens: int,
    tell: Tell,
) -> None:
    """Write shards into a folder. head: what stands first in shards.json."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    documents = (ids.astype(dtype) for ids in _encoded(texts, tokenizer, tell))
    shards = [
        _write_shard(folder, number, part)
        for number, part in enumerate(_parts(documents, shard_tokens))
    ]
    if not shards:
        raise ValueError("there are no documents to write; name a corpus or a file that has some")
    index = head | {
        "version": VERSION,
        "dtype": dtype.name,
        "tokenizer_key": tokenizer.key,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.special.get("eos_token_id"),
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": sum(shard["documents"] for shard in shards),
        "shards": shards,
    }
    with _told(folder):
        (folder / TOKENIZER).mkdir()
        tokenizer.save(folder / TOKENIZER)
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_shard(
    folder: Path, number: int, documents: list[NDArray[np.unsignedinteger]]
) -> dict[str, Any]:
    """Write a shard, and say of it what shards.json does."""
    path, starts = folder / f"shard-{number:05}.npy", folder / f"starts-{number:05}.npy"
    borders = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    with _told(path):
        np.save(path, np.concatenate(documents))
        np.save(starts, borders)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "file": path.name,
        "starts": starts.name,
        "tokens": int(borders[-1]),
        "documents": len(documents),
        "bytes": path.stat().st_size,
        "sha256": sha256,
    }


def _parts(
    documents: Iterable[NDArray[np.unsignedinteger]], most: int
) -> Iterator[list[NDArray[np.unsignedinteger]]]:
    """Documents in groups of at most so many tokens; a longer one is a group of its own."""
    part: list[NDArray[np.unsignedinteger]] = []
    tokens = 0
    for document in documents:
        if part and tokens + len(document) > most:
            yield part
            part, tokens = [], 0
        part.append(document)
        tokens += len(document)
    if part:
        yield part


def _encoded(
    texts: Iterable[tuple[str, str]], tokenizer: Tokenizer, tell: Tell
) -> Iterator[NDArray[np.uint32]]:
    """The ids of each document, its end among them."""
    end = tokenizer.special.get("eos_token_id")
    ids = array("I")
    for batch in _batches(_pieces(texts, cuts_freely(tokenizer))):
        found = tokenizer.encode_all([piece for _, piece, _ in batch])
        for (_, _, last), more in zip(batch, found, strict=True):
            ids.extend(more)
            if last:
                ids.extend([] if end is None else [end])
                yield np.array(ids, dtype=np.uint32)
                ids = array("I")
        tell(batch[-1][0], sum(len(piece) for _, piece, _ in batch))


def _pieces(texts: Iterable[tuple[str, str]], freely: bool) -> Iterator[tuple[str, str, bool]]:
    """Name and text of each piece of each document, and whether it is the document's last.

    freely: documents may be cut; the pieces then give the ids of the whole.
    """
    for name, text in texts:
        pieces = list(_joined(cut([text]))) if freely else [text]
        for number, piece in enumerate(pieces or [""], start=1):
            yield name, piece, number >= len(pieces)


def _joined(pieces: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= TEXT:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


def _batches(pieces: Iterable[tuple[str, str, bool]]) -> Iterator[list[tuple[str, str, bool]]]:
    batch: list[tuple[str, str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1]) + 1
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say of what cannot be written what to do."""
    try:
        yield
    except OSError as error:
        reason = (
            f"could not be written ({error.strerror or error}); free some space or choose another folder, "
            "nothing was kept of the shards"
        )
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


def _hash(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
