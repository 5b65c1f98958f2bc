"""`atlas data tokenize`"""

from pathlib import Path

import pytest

from atlas_lm.data.files import essay_texts
from atlas_lm.data.shards import open_shards
from tests.cli.builders import atlas


def test_corpora_and_files_become_shards(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello world")
    out = tmp_path / "out"
    result = atlas("data", "tokenize", tmp_path / "a.txt", "essays", "--out", out)
    assert result.exit_code == 0, result.stderr
    shards = open_shards(out)
    assert shards.read(0, 0, 3).tolist() == [15496, 995, 50256]
    tokenizer = shards.tokenizer()
    read = [shards.read(n, 0, int(shards.lengths[n])).tolist() for n in (1, 2)]
    assert [tokenizer.decode(ids) for ids in read] == [text for _, text in essay_texts()]
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    told = f"{out}: 3 documents, {shards.tokens:,} tokens of gpt2, {size / 2**20:.1f} MiB\n"
    assert result.stdout == told


def test_the_tokenizer_is_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é")
    out = tmp_path / "out"
    result = atlas("data", "tokenize", tmp_path / "a.txt", "--out", out, "--tokenizer", "bytes")
    assert result.exit_code == 0 and "1 documents, 3 tokens of bytes, 1 KiB" in result.stdout
    assert open_shards(out).read(0, 0, 3).tolist() == [195, 169, 257]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["novels", "--out", "new"], "corpus is 'novels', none that is known; wanted one of books"),
        (["essays", "--out", "new", "--tokenizer", "gpt3"], "tokenizer is 'gpt3', none of these"),
        (["essays", "--out", "full"], "full is there already and not empty"),
        (["full/bad.txt", "--out", "new"], "full/bad.txt: bytes ff at offset 0 are no utf-8"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch, arguments, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/bad.txt").write_bytes(b"\xff")
    result = atlas("data", "tokenize", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("atlas data tokenize: ") and message in result.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.txt", "full"]


def test_a_folder_is_needed() -> None:
    result = atlas("data", "tokenize", "essays")
    assert result.exit_code == 2 and "--out" in result.stderr
