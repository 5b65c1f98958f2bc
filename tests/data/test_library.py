"""The catalogue, what of it is in the package, and where else data is found."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from atlas_lm.data.babi import TASKS
from atlas_lm.data.files import (
    babi_questions,
    babi_stories,
    babilong_indices,
    book_texts,
    enwik8,
    essay_texts,
    json_lines,
    wikitext,
)
from atlas_lm.data.gpt2 import count_tokens, gpt2_tokenizer
from atlas_lm.data.library import BUNDLED, COMPLETE, Library, catalogue


def test_every_item_has_a_sample_in_the_package() -> None:
    for name, item in catalogue().items():
        found = Library().find(name)
        assert found.paths and all(path.is_file() for path in found.paths), name
        assert found.sample == (item.bundled != COMPLETE)
        assert item.licence and item.source and all(f.bytes > 0 for f in item.files)


def test_samples_are_small_and_their_licences_told() -> None:
    files = [path for path in BUNDLED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2**20
    notice = (BUNDLED / "NOTICE.md").read_text()
    for item in catalogue().values():
        for file in item.files:
            folder = file.path.partition("/")[0]
            assert folder in notice or not (BUNDLED / file.path).exists()


def test_the_data_folder_comes_first_and_the_package_on_demand(tmp_path: Path) -> None:
    sample = Library().find("lambada").paths[0]
    whole = tmp_path / "lambada" / sample.name
    whole.parent.mkdir()
    shutil.copy(sample, whole)
    found = Library(folder=tmp_path).find("lambada")
    assert found.paths == (whole,) and not found.sample
    small = Library(folder=tmp_path, small=True).find("lambada")
    assert small.paths == (sample,) and small.sample
    assert "20 of 5,153" in small.description and "20 of" not in found.description


def test_part_of_the_files_is_told_as_a_part(tmp_path: Path) -> None:
    target = tmp_path / "books" / "train-0.tar.xz"
    target.parent.mkdir()
    shutil.copy(Library().find("books/train").paths[0], target)
    assert "1 of 4 files" in Library(folder=tmp_path).find("books/train").description


def test_wikitext_of_another_split_does_not_stand_in(tmp_path: Path) -> None:
    [valid] = [f.path for f in catalogue()["wikitext"].files if ".valid." in f.path]
    (tmp_path / valid).parent.mkdir()
    shutil.copy(BUNDLED / valid, tmp_path / valid)
    library = Library(folder=tmp_path)
    assert wikitext("validation", library) == wikitext("validation", Library(small=True))
    with pytest.raises(ValueError, match="WikiText's test file is not beside"):
        wikitext("test", library)


def test_fingerprints_tell_contents_apart(tmp_path: Path) -> None:
    one = Library().find("piqa").fingerprint
    target = tmp_path / "commonsense" / "piqa_validation.jsonl.xz"
    target.parent.mkdir()
    target.write_bytes(b"other")
    assert one != Library(folder=tmp_path).find("piqa").fingerprint
    assert one == Library(small=True).find("piqa").fingerprint


@pytest.mark.parametrize("task", TASKS)
def test_test_files_are_whole(task: str) -> None:
    assert len(babi_questions(task, "test")) == 1000


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3", "qa4", "qa5"])
def test_training_and_validation_stories_are_others(task: str) -> None:
    train, validation, test = (babi_stories(task, s) for s in ("train", "validation", "test"))
    assert len(train) > 3 * len(validation) > 0
    assert not set(train) & set(validation)
    assert not set(test) & {*train, *validation}


def test_published_indices_fit_the_test_files() -> None:
    indices = babilong_indices()
    assert set(indices) == {"qa1", "qa2", "qa3", "qa4", "qa5"}
    for task, places in indices.items():
        assert len(set(places)) == 100 and max(places) < len(babi_questions(task, "test"))


def test_texts_read_as_they_should() -> None:
    assert [name for name, _ in book_texts("test")] == ["10449"]
    assert len(list(essay_texts())) == 2
    assert wikitext("test").lstrip().startswith("= Robert Boulter =")
    assert len(enwik8()) == 2**16
    assert len(json_lines("hellaswag")) == 20 and "endings" in json_lines("hellaswag")[0]


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: babi_questions("qa11", "test"), "wanted one of qa1"),
        (lambda: babi_questions("qa1", "dev"), "wanted one of train, validation, test"),
        (lambda: babi_questions("qa6", "train"), "no en/qa6"),
        (lambda: wikitext("train"), "wanted test or validation"),
    ],
)
def test_what_is_not_there_is_refused(call, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        call()


def test_gpt2_tokens_of_known_texts() -> None:
    """Ids that OpenAI's tokenizer gives, as they stand in public documentation."""
    tokenizer = gpt2_tokenizer()
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.encode("Hello, my dog is cute").ids == [15496, 11, 616, 3290, 318, 13779]
    assert tokenizer.get_vocab_size() == 50257 and tokenizer.id_to_token(50256) == "<|endoftext|>"
    text = "naïve café — 漢字\n\n  ok"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_counting_in_batches_is_counting() -> None:
    texts = [f"Sentence number {i}, and no more." for i in range(5000)]
    assert count_tokens(texts) == [len(gpt2_tokenizer().encode(text)) for text in texts]


def test_large_files_are_those_of_the_catalogue(large_data: Path) -> None:
    for item in catalogue().values():
        for file in item.files:
            path = large_data / file.path
            if path.is_file():
                assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256, file.path


def test_gpt2_vocabulary_is_the_published_one(large_data: Path) -> None:
    path = large_data / "tokenizer" / "gpt2" / "vocab.json"
    assert gpt2_tokenizer().get_vocab() == json.loads(path.read_text())
