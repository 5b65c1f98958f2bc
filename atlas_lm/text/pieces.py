"""Long texts read lazily and cut at places that depend on the text alone, never on how it was read."""

import codecs
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

SOFT = 4096  # characters after which a piece may also end between two words
HARD = 4 * SOFT  # characters after which it ends wherever it is
BLOCK = 1 << 16  # bytes per read

# Byte-level tokenizers (GPT-2 and those after it) split words here in any case, so pieces give the same
# tokens as the whole text. Runs of white space are left whole: there they look at what follows.
LINE = re.compile(r"(?<=\S\n)(?=\S)")
WORD = re.compile(r"(?<=\S)(?= [^\W\d_])")


def cut(blocks: Iterable[str], soft: int = SOFT, hard: int = HARD) -> Iterator[str]:
    """The text of all blocks in pieces that do not depend on where the blocks end.

    A piece ends after a line end between two characters that are no white space; once it has `soft`
    characters, also before a single space with a letter behind it; at `hard` characters in any case.

    >>> list(cut(["One.\\nTw", "o.\\n", "\\nThree."]))
    ['One.\\n', 'Two.\\n\\nThree.']
    """
    if not 2 <= soft <= hard:
        raise ValueError(f"soft is {soft} and hard {hard}, wanted 2 <= soft <= hard")
    text, seen = "", 0  # what is not cut yet; how much of it was searched in vain
    for block in blocks:
        text, start = text + block, 0
        while (end := _border(text, start, seen, soft, hard)) is not None:
            yield text[start:end]
            start, seen = end, 0
        text = text[start:]
        seen = len(text)
    if text:
        yield text


def _border(text: str, start: int, seen: int, soft: int, hard: int) -> int | None:
    """Where the piece that begins at `start` ends; None: more text is needed to know.

    Patterns look back no further than the piece's own first character, so a piece depends on nothing
    before it. They look ahead two characters, so the last place that was searched is searched again.
    """
    again, limit = seen - 1, start + hard
    line = LINE.search(text, start + max(2, again), limit)
    word = WORD.search(text, start + max(soft, again), limit)
    places = [found.start() for found in (line, word) if found]
    if len(text) - start > hard:
        places.append(start + hard)
    return min(places, default=None)


def read_text(path: str | Path, encoding: str = "utf-8", skip_bytes: int = 0) -> Iterator[str]:
    """The text of a file, or of standard input (`-`), in blocks as they come; line ends stay as they are.

    Decoding is strict: bytes that are no text raise a ValueError that says where they are, after all
    text before them was handed out.

    Args:
        skip_bytes: begin after so many bytes of a file.
    """
    decoder = _decoder(encoding)
    if skip_bytes:
        _check_skip(str(path), encoding, skip_bytes)
    return _blocks(str(path), decoder, encoding, skip_bytes)


def _blocks(
    path: str, decoder: codecs.IncrementalDecoder, encoding: str, skip_bytes: int
) -> Iterator[str]:
    name = "standard input" if path == "-" else path
    with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
        if skip_bytes and file.seek(0, 2) < skip_bytes:
            raise ValueError(f"{name} has {file.tell()} bytes, cannot skip {skip_bytes}")
        if skip_bytes:
            file.seek(skip_bytes)
        yield from _decoded(file, decoder, name, encoding, skip_bytes)


def _decoded(
    file: BinaryIO, decoder: codecs.IncrementalDecoder, name: str, encoding: str, offset: int
) -> Iterator[str]:
    while True:
        data = _read(file)
        held = len(decoder.getstate()[0])  # bytes of a character whose end has not come yet
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            if error.start > held:
                yield decoder.decode(data[: error.start - held])
            raise ValueError(_complaint(error, name, encoding, offset - held)) from error
        if text:
            yield text
        if not data:
            return
        offset += len(data)


def _read(file: BinaryIO) -> bytes:
    """The next bytes, without waiting for a whole block where they come slowly."""
    data: bytes = file.read1(BLOCK) if hasattr(file, "read1") else file.read(BLOCK)
    return data


def _complaint(error: UnicodeDecodeError, name: str, encoding: str, offset: int) -> str:
    bad = error.object[error.start : error.end]
    near = error.object[max(0, error.start - 4) : error.end + 4]
    return (
        f"{name}: bytes {bad.hex(' ')} at offset {offset + error.start} are no {encoding} ({error.reason}; "
        f"around it: {near.hex(' ')}); mend the file, or say how it is encoded, e.g. encoding latin-1 "
        "(--encoding latin-1)"
    )


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        return codecs.getincrementaldecoder(encoding)()
    except LookupError as error:
        raise ValueError(
            f"encoding is {encoding!r}, wanted one that Python knows, e.g. utf-8 or latin-1"
        ) from error


def _check_skip(path: str, encoding: str, skip_bytes: int) -> None:
    if skip_bytes < 0:
        raise ValueError(f"skip_bytes is {skip_bytes}, wanted 0 or more")
    if path == "-":
        raise ValueError("standard input cannot be skipped; pipe in only what is still to be read")
    if len("aa".encode(encoding)) != 2 * len("a".encode(encoding)):
        raise ValueError(
            f"encoding {encoding} says at the start of a file how to read on, so bytes cannot be skipped; "
            "name it with its byte order, e.g. utf-16-le"
        )
