"""A tokenizer small enough to be made in a test."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, Split
from transformers import PreTrainedTokenizerFast


def byte_level(folder: Path, words: tuple[str, ...] = ()) -> Path:
    """A byte-level tokenizer in the files of GPT-2: every byte, the given words, an end."""
    entries = [*sorted(ByteLevel.alphabet()), *words, "<|endoftext|>"]
    merges = [f"{word[:-1]} {word[-1]}" for word in words]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({entry: i for i, entry in enumerate(entries)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    return folder


def first_words_marked() -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of SentencePiece: a mark stands before every word, the first one too."""
    letters = [chr(i) for i in range(32, 127)] + ["\n", "▁", "<unk>", *"\u201c\u201d\u2018\u2019é"]
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Sequence([Metaspace(prepend_scheme="always"), Split("", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
