"""Shards: what is written is read again, as a whole or not at all; and the corpora they are made of."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from atlas_lm.data.corpora import CORPORA, corpus, corpus_fingerprint
from atlas_lm.data.files import book_texts, enwik8, essay_texts, wikitext
from atlas_lm.data.kept import keep_folder
from atlas_lm.data.library import Library, cache_folder
from atlas_lm.data.shards import Shards, find_shards, open_shards, write_shards
from atlas_lm.data.vocabularies import find_tokenizer
from atlas_lm.text import ByteTokenizer, HuggingFaceTokenizer, cuts_freely
from tests.text.builders import byte_level, first_words_marked

TEXTS = [
    ("short", "Ä short one.\n"),
    ("empty", ""),
    ("long", "".join(f"Line {i} of\n\n a löng text, 漢字.\n" for i in range(2000))),
    ("no lines", "word " * 5000),
]


def write(folder: Path, tokenizer: object = None, **options) -> Shards:
    return write_shards(TEXTS, tokenizer or ByteTokenizer(), folder, about={}, **options)


@pytest.mark.parametrize("name", ["bytes", "bpe-300", "gpt2"])
def test_texts_come_back_with_an_end_behind_each(tmp_path: Path, name: str) -> None:
    tokenizer = find_tokenizer(name)
    shards = write(tmp_path / "s", tokenizer, shard_tokens=1000, tokenizer_name=name)
    again = shards.tokenizer()
    assert again.key == tokenizer.key == shards.tokenizer_key
    assert shards.vocab_size == tokenizer.vocab_size and shards.documents == len(TEXTS)
    for number, (_, text) in enumerate(TEXTS):
        ids = shards.read(number, 0, int(shards.lengths[number])).tolist()
        assert ids == [*tokenizer.encode(text), tokenizer.special["eos_token_id"]]
        assert again.decode(ids) == text
    assert shards.tokens == shards.lengths.sum()
    assert len(shards.ids) == 3 and shards.ids[0].dtype == np.uint16  # long ones by themselves


def test_a_text_that_must_not_be_cut_is_not(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(first_words_marked())
    text = "One line.\nAnd two.\n" * 3000
    shards = write_shards([("a", text)], tokenizer, tmp_path / "s", about={})
    assert shards.eos is None
    assert shards.read(0, 0, shards.tokens).tolist() == tokenizer.encode(text)


def test_shards_hold_whole_documents_and_read_across_them(tmp_path: Path) -> None:
    texts = [(str(n), chr(65 + n) * (n + 1)) for n in range(9)]
    shards = write_shards(texts, ByteTokenizer(), tmp_path / "s", about={"a": 1}, shard_tokens=12)
    assert shards.lengths.tolist() == [n + 2 for n in range(9)]
    assert [len(ids) for ids in shards.ids] == [
        9,
        11,
        7,
        8,
        9,
        10,
    ]  # 2 + 3 + 4, 5 + 6, then one each
    assert [shards.read(n, n, n + 2).tolist() for n in range(9)] == [
        [65 + n, 257] for n in range(9)
    ]
    index = json.loads((tmp_path / "s" / "shards.json").read_text())
    assert index["about"] == {"a": 1} and (index["tokens"], index["documents"]) == (54, 9)
    for wrong in ((9, 0, 1), (-1, 0, 1), (0, 0, 3), (0, 2, 1)):
        with pytest.raises(ValueError, match="wanted"):
            shards.read(*wrong)


def test_many_ids_take_wide_numbers(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 2**16 + 1

        def encode(self, text: str) -> list[int]:
            return [2**16 - ord(letter) + 97 for letter in text]

    shards = write_shards([("a", "ab")], Wide(), tmp_path / "s", about={})
    assert shards.ids[0].dtype == np.uint32
    assert shards.read(0, 0, 3).tolist() == [2**16, 2**16 - 1, 257]


def test_prints_tell_contents_apart(tmp_path: Path) -> None:
    one, same = (write(tmp_path / name).fingerprint for name in "ab")
    other = write_shards(TEXTS[1:], ByteTokenizer(), tmp_path / "c", about={}).fingerprint
    assert one == same != other


def test_progress_tells_all_characters(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    write(tmp_path / "s", tell=lambda what, more: told.append((what, more)))
    assert sum(more for _, more in told) == sum(len(text) for _, text in TEXTS)
    assert told[-1][0] == "no lines"


def remove(folder: Path) -> None:
    (folder / "shard-00001.npy").unlink()


def shorten(folder: Path) -> None:
    path = folder / "shard-00001.npy"
    path.write_bytes(path.read_bytes()[:-1])


def lose_starts(folder: Path) -> None:
    (folder / "starts-00002.npy").unlink()


def swap_starts(folder: Path) -> None:
    shutil.copy(folder / "starts-00001.npy", folder / "starts-00002.npy")


def change_version(folder: Path) -> None:
    path = folder / "shards.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 7'))


def break_index(folder: Path) -> None:
    (folder / "shards.json").write_text('{"version": 1')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "shard-00001.npy is missing; copy it there again, or remove"),
        (shorten, r"shard-00001.npy has \d+ bytes, wanted \d+; copy"),
        (lose_starts, "starts-00002.npy is missing or damaged"),
        (swap_starts, "starts-00002.npy does not fit shard-00002.npy"),
        (change_version, "has version 7, wanted 1; make the shards anew"),
        (break_index, "shards.json is damaged"),
        (shutil.rmtree, "holds no shards: shards.json is not there; make them"),
    ],
)
def test_damage_is_told(tmp_path: Path, damage, message: str) -> None:
    write(tmp_path / "s", shard_tokens=1000)
    damage(tmp_path / "s")
    with pytest.raises(ValueError, match=message):
        open_shards(tmp_path / "s")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="not empty; choose another name"):
            write(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty").documents == len(TEXTS)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with (
        full_disk(2**14),
        pytest.raises(OSError, match=r"could not be written .* free some space") as raised,
    ):
        write(tmp_path / "s")
    assert raised.value.filename.endswith("shard-00000.npy")
    assert [path.name for path in tmp_path.rglob("*")] == ["s"]


def test_what_fails_while_reading_leaves_nothing(tmp_path: Path) -> None:
    def texts() -> Iterator[tuple[str, str]]:
        yield from TEXTS
        raise ValueError("the text ends here")

    with pytest.raises(ValueError, match="the text ends here"):
        write_shards(texts(), ByteTokenizer(), tmp_path / "s", about={}, shard_tokens=10)
    with pytest.raises(ValueError, match="there are no documents"):
        write_shards([], ByteTokenizer(), tmp_path / "s", about={})
    assert not list(tmp_path.iterdir())


def test_the_first_of_several_makers_counts(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "by").write_text("second")
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "by").write_text("first")

    keep_folder(tmp_path / "kept", make)
    assert (tmp_path / "kept" / "by").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_processes_make_the_same_at_once(tmp_path: Path) -> None:
    code = (
        "from atlas_lm.data.shards import find_shards; import sys, transformers; print('ready', flush=True); "
        "sys.stdin.readline(); print(find_shards(('books/validation', 'essays'), 'bpe-300').fingerprint)"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    prints = [process.communicate()[0].strip() for process in both]
    here = find_shards(("books/validation", "essays"), "bpe-300").fingerprint
    assert prints == [here, here]
    for room in ("shards", "tokenizers"):
        [only] = (tmp_path / "atlas-lm" / room).iterdir()
        assert not only.name.startswith(".")


def test_shards_of_corpora_are_made_once_and_anew_when_a_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = find_shards((str(path), "books/validation"), "bytes")
    assert first.folder.is_relative_to(cache_folder() / "shards")
    made = (first.folder / "shards.json").stat().st_mtime_ns
    again = find_shards((str(path), "books/validation"), "bytes")
    assert again.folder == first.folder
    assert (again.folder / "shards.json").stat().st_mtime_ns == made
    [(_, book)] = book_texts("validation")
    assert first.lengths.tolist() == [4, len(book.encode()) + 1]
    path.write_text("two!")
    assert find_shards((str(path), "books/validation"), "bytes").lengths[0] == 5
    twice = find_shards((str(path), str(path)), "bytes")
    assert twice.lengths.tolist() == [5, 5] != find_shards((str(path),), "bytes").lengths.tolist()


def test_own_tokenizers_are_made_of_the_training_books_alone() -> None:
    tokenizer = find_tokenizer("bpe-400")
    key = Library().find("books/train").fingerprint
    assert (cache_folder() / "tokenizers" / f"bpe-400-{key}-1").is_dir()
    assert tokenizer.vocab_size == 400 and cuts_freely(tokenizer)
    assert tokenizer.special == {"bos_token_id": 0, "eos_token_id": 0}
    [(_, book)] = book_texts("train")
    assert len(tokenizer.encode(book)) < 0.7 * len(book.encode())
    strange = "naïve 漢字 \x00\n\n\t ok"
    assert tokenizer.decode(tokenizer.encode(strange)) == strange


def test_tokenizers_of_folders_and_none(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "words", ("th", "the"))
    assert find_tokenizer(str(folder)).vocab_size == 259
    possible = r"wanted bytes, gpt2, bpe-N \(e.g. bpe-8192\), stories-N, or the folder"
    for name in ("gpt3", "bpe-", "bpe-x", str(tmp_path)):
        with pytest.raises(ValueError, match=possible):
            find_tokenizer(name)
    with pytest.raises(ValueError, match="'bpe-256', wanted more than 256 ids"):
        find_tokenizer("bpe-256")


def test_the_splits_of_enwik8_are_disjoint_and_complete() -> None:
    whole, place, pages = enwik8(), 0, 0
    for split, share in (("train", 0.90), ("validation", 0.95), ("test", 1.0)):
        documents = list(corpus(f"enwik8/{split}"))
        for name, text in documents:
            begin = int(name.partition(":")[2])
            assert begin == place
            place += len(text.replace("\ufffd", "").encode())
            place += text.count("\ufffd")  # bytes of a character that the border cuts
            assert whole[begin:place].decode("utf-8", errors="replace") == text
            assert "<page>" not in text[1:]
            pages += text.startswith("<page>")
        assert place == int(share * len(whole))
    assert pages == whole.count(b"<page>") == 1


def test_corpora_of_the_catalogue_are_what_the_files_hold() -> None:
    assert list(corpus("books/test")) == list(book_texts("test"))
    assert list(corpus("essays")) == list(essay_texts())
    articles = [text for _, text in corpus("wikitext/test")]
    assert "".join(articles).strip() == wikitext("test").strip()
    titles = [text.splitlines()[0] for text in articles]
    assert titles == [
        " = Robert Boulter = ",
        " = Du Fu = ",
        " = Kiss You ( One Direction song ) = ",
    ]
    assert len({corpus_fingerprint(name) for name in CORPORA}) == len(CORPORA) == 9


def test_corpora_of_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes("é\r\n".encode())
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "second", "id": 2}\n')
    (tmp_path / "other.md").write_text("not this")
    assert [text for _, text in corpus(str(tmp_path))] == ["first", "second", "é\r\n"]
    assert [text for _, text in corpus(str(tmp_path / "b" / "one.txt"))] == ["é\r\n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"words": "b"}', "line 2 has no text under the key 'text'"),
        (b'{"text": "a"}\n["b"]', "line 2 has no text"),
        (b'{"text": "a"', "line 1 is no JSON"),
        (b'{"text": "\xff"}', "line 1 is no JSON"),
    ],
)
def test_lines_without_a_text_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"a.jsonl, {message}"):
        list(corpus(str(path)))


def test_unknown_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'novels', none that is known; wanted one of books/train"):
        corpus("novels")
    with pytest.raises(ValueError, match="a path without texts"):
        corpus_fingerprint(str(tmp_path))
    with pytest.raises(ValueError, match="no corpus is named"):
        find_shards((), "bytes")
