"""A tokenizer small enough to be made in a test."""

import json
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel


def byte_level(folder: Path, words: tuple[str, ...] = ()) -> Path:
    """A byte-level tokenizer in the files of GPT-2: every byte, the given words, an end."""
    entries = [*sorted(ByteLevel.alphabet()), *words, "<|endoftext|>"]
    merges = [f"{word[:-1]} {word[-1]}" for word in words]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({entry: i for i, entry in enumerate(entries)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    return folder
