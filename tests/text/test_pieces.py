"""Pieces of a text depend on the text alone; files are read lazily and strictly."""

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas_lm.text import cut, load_tokenizer, read_text

SMALL = dict(soft=12, hard=30)
LETTERS = "ab .,\n\n  \t\r\u00a0é日😀-1"


def blocks_of(text: str, generator: random.Random) -> Iterator[str]:
    """The text in blocks of random size, empty ones among them."""
    start = 0
    while start < len(text):
        size = generator.choice([0, 1, 2, 3, 7, 50])
        yield text[start : start + size]
        start += size


def draw_text(generator: random.Random, length: int = 400) -> str:
    return "".join(generator.choices(LETTERS, k=length))


@pytest.mark.parametrize("seed", range(30))
def test_pieces_do_not_depend_on_blocks(seed: int) -> None:
    generator = random.Random(seed)
    text = draw_text(generator)
    whole = list(cut([text], **SMALL))
    assert "".join(whole) == text
    assert len(whole) > 5
    assert max(map(len, whole)) <= SMALL["hard"]
    for _ in range(10):
        assert list(cut(blocks_of(text, generator), **SMALL)) == whole


@pytest.mark.parametrize("seed", range(10))
def test_a_piece_depends_on_nothing_before_it(seed: int) -> None:
    """So reading can go on after any piece, as if it had never stopped."""
    text = draw_text(random.Random(seed))
    whole = list(cut([text], **SMALL))
    for done in range(len(whole)):
        assert list(cut(["".join(whole[done:])], **SMALL)) == whole[done:]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("one\ntwo\n", ["one\n", "two\n"]),
        ("one\n\ntwo", ["one\n\ntwo"]),  # tokenizers look through runs of white space
        ("one\n two\r\nthree", ["one\n two\r\nthree"]),
        ("aaaa bbbb cccc dddd", ["aaaa bbbb cccc", " dddd"]),
        ("aaaa bbbb  cccc 1 dddd", ["aaaa bbbb  cccc 1", " dddd"]),
        ("a" * 65, ["a" * 30, "a" * 30, "a" * 5]),
    ],
)
def test_where_pieces_end(text: str, wanted: list[str]) -> None:
    assert list(cut([text], **SMALL)) == wanted


def test_pieces_come_before_the_text_ends() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "one line\n"

    assert next(cut(endless())) == "one line\n"


def test_lengths_must_make_sense() -> None:
    with pytest.raises(ValueError, match="soft is 9 and hard 4"):
        next(cut(["text"], soft=9, hard=4))


def gpt2_folder() -> Path:
    folder = Path(os.environ.get("ATLAS_DATA", "no such folder")) / "tokenizer" / "gpt2"
    if not folder.is_dir():
        pytest.skip("needs the GPT-2 tokenizer in $ATLAS_DATA/tokenizer/gpt2")
    return folder


@pytest.mark.parametrize("seed", range(10))
def test_pieces_give_the_tokens_of_the_whole_text(seed: int) -> None:
    tokenizer = load_tokenizer(gpt2_folder(), 50257)
    generator = random.Random(seed)
    words = [
        "The",
        " quick",
        "fox's",
        "\n",
        "\n\n",
        "  ",
        " ",
        ". ",
        ",",
        "12",
        " é",
        "日本",
        "\r\n",
        "\t",
    ]
    text = "".join(generator.choices(words, k=600))
    pieces = list(cut(blocks_of(text, generator), soft=12, hard=10_000))
    assert len(pieces) > 10
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


TEXT = "naïve 日本 😀\r\nend\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "shift-jis", "latin-1"])
def test_a_file_comes_back_as_it_is(tmp_path: Path, encoding: str, monkeypatch) -> None:
    monkeypatch.setattr("atlas_lm.text.pieces.BLOCK", 3)  # borders inside of characters
    text = TEXT.encode(encoding, "ignore").decode(encoding)
    path = tmp_path / "text"
    path.write_bytes(text.encode(encoding))
    assert "".join(read_text(path, encoding)) == text


@pytest.mark.parametrize("block", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("data", "offset", "bad"),
    [
        (b"good \xff bad", 5, "ff"),
        ("日本".encode() + b"\xe6\x97!", 6, "e6 97"),
        (b"cut off \xf0\x9f\x98", 8, "f0 9f 98"),
    ],
)
def test_broken_text_is_refused_where_it_breaks(
    tmp_path: Path, monkeypatch, block: int, data: bytes, offset: int, bad: str
) -> None:
    monkeypatch.setattr("atlas_lm.text.pieces.BLOCK", block)
    path = tmp_path / "book.txt"
    path.write_bytes(data)
    message = f"book.txt: bytes {bad} at offset {offset} are no utf-8"
    with pytest.raises(ValueError, match=message) as e:
        list(read_text(path))
    assert "--encoding latin-1" in str(e.value)


def test_text_before_the_break_is_handed_out(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é fine".encode() + b"\xff")
    blocks = read_text(path)
    assert next(blocks) == "é fine"
    with pytest.raises(ValueError, match="offset 7"):
        next(blocks)


def test_bytes_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("日本\xff".encode())
    assert "".join(read_text(path, skip_bytes=3)) == "本\xff"
    assert "".join(read_text(path, skip_bytes=8)) == ""
    with pytest.raises(ValueError, match="has 8 bytes, cannot skip 9"):
        list(read_text(path, skip_bytes=9))
    with pytest.raises(ValueError, match="bytes 97 at offset 1 are no utf-8"):
        list(read_text(path, skip_bytes=1))
    with pytest.raises(ValueError, match="wanted 0 or more"):
        list(read_text(path, skip_bytes=-1))
    with pytest.raises(ValueError, match="utf-16-le"):
        list(read_text(path, "utf-16", skip_bytes=2))


def test_standard_input_is_read_and_cannot_be_skipped(monkeypatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert "".join(read_text("-")) == TEXT
    assert not stdin.closed
    with pytest.raises(ValueError, match="standard input cannot be skipped"):
        list(read_text("-", skip_bytes=4))


def test_unknown_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="encoding is 'klingon'"):
        list(read_text(tmp_path / "text", "klingon"))
