"""Text to ids and back, also while ids come one by one."""

import random
from pathlib import Path

import pytest

from atlas_lm.text import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from tests.text.builders import byte_level

TEXT = "naïve 日本語 😀\nend."


@pytest.fixture(scope="module", params=["bytes", "files"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return load_tokenizer(byte_level(tmp_path_factory.mktemp("tokenizer"), ("en", "end")), 259)


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_text_comes_out_while_ids_come_and_characters_are_whole(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.decoder()
    told = [decoder.feed([number]) for number in tokenizer.encode(5 * TEXT)]
    assert "".join(told) == 5 * TEXT
    assert "\ufffd" not in "".join(told)
    assert told[0] == "n"  # at once
    assert decoder.flush() == ""


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_text_shows_replacements_as_in_one_go(tokenizer: Tokenizer, seed: int) -> None:
    generator = random.Random(seed)
    ids = [generator.randrange(256) for _ in range(100)]
    decoder = tokenizer.decoder()
    told = "".join(decoder.feed([number]) for number in ids) + decoder.flush()
    assert "\ufffd" in told
    assert told == tokenizer.decode(ids)


def test_a_character_that_never_ends_shows_at_the_end(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.decoder()
    assert decoder.feed(tokenizer.encode("aé")[:-1]) == "a"
    assert decoder.flush() == "\ufffd"


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [195, 169]
    assert tokenizer.vocab_size == 259
    assert tokenizer.special == dict(bos_token_id=256, eos_token_id=257, pad_token_id=258)
    assert tokenizer.decode([256, 104, 105, 257, 258]) == "hi"
    with pytest.raises(ValueError, match="token id 259 is out of range, wanted 0 to 258"):
        tokenizer.decode([104, 259])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("\udcff")


def test_special_tokens_of_files_have_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path), 257)
    assert tokenizer.special == dict(bos_token_id=256, eos_token_id=256)
    assert tokenizer.decode([*tokenizer.encode("hi"), 256]) == "hi"


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path / "a", ("en", "end")), 259)
    tokenizer.save(tmp_path / "b")
    assert not (tmp_path / "b" / "merges.txt").exists()  # so AutoTokenizer opens it
    again = load_tokenizer(tmp_path / "b", 259)
    assert isinstance(again, HuggingFaceTokenizer)
    assert len(tokenizer.encode("the end")) == 5
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


def test_which_tokenizer_a_folder_gives(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(tmp_path, 259), ByteTokenizer)
    with pytest.raises(ValueError, match="no tokenizer files and its model 300 ids"):
        load_tokenizer(tmp_path, 300)
    with pytest.raises(ValueError, match="nowhere is no folder"):
        load_tokenizer(tmp_path / "nowhere", 259)
    with pytest.raises(ValueError, match="ids up to 256, the model only up to 99"):
        load_tokenizer(byte_level(tmp_path), 100)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"tokenizer files in .* \(tokenizer.json\) cannot be loaded"
    ):
        load_tokenizer(tmp_path, 259)
