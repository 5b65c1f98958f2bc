"""Tokenizers by name: bytes, GPT-2's, our own of a given size, and those in folders."""

import re
from collections.abc import Iterator
from pathlib import Path

from atlas_lm.data.files import babi_stories, book_texts
from atlas_lm.data.gpt2 import END_OF_TEXT, gpt2_tokenizer
from atlas_lm.data.kept import keep_folder
from atlas_lm.data.library import Library, cache_folder
from atlas_lm.data.stories import TASKS
from atlas_lm.text import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from atlas_lm.text.tokenizer import BYTES, TOKENIZER_FILES

VERSION = 1  # of how our own tokenizers are made
OWN = re.compile(r"(bpe|stories)-([1-9]\d*)")
SEEN = 2  # times that a pair of tokens must be seen to become one
ANY_SIZE = 2**31
POSSIBLE = "bytes, gpt2, bpe-N (e.g. bpe-8192), stories-N, or the folder of a tokenizer"


def find_tokenizer(name: str, library: Library | None = None) -> Tokenizer:
    """The tokenizer of a name: bytes, gpt2, bpe-N, stories-N, or the path of a folder (./gpt2 for one of that
    name).

    bpe-N is made from the training books when it is first wanted, and kept. It has N ids, fewer where the
    books are too few for as many. stories-N is made from bAbI's training stories too, as lessons tell them:
    their words are single ids.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return gpt2()
    if own := OWN.fullmatch(name):
        return _own(own[1], int(own[2]), library or Library())
    folder = Path(name)
    if any((folder / file).is_file() for file in TOKENIZER_FILES):
        return load_tokenizer(folder, ANY_SIZE)
    what = "a folder without files of a tokenizer" if folder.is_dir() else "none of these"
    raise ValueError(f"tokenizer is {name!r}, {what}; wanted {POSSIBLE}")


def gpt2() -> Tokenizer:
    """The tokenizer of GPT-2, from the data of the package."""
    from transformers import PreTrainedTokenizerFast

    marks = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer(), **marks))


def _own(kind: str, size: int, library: Library) -> Tokenizer:
    """Byte-pair encoding of what is trained on; opened from the disk, or made there."""
    if size <= BYTES:
        raise ValueError(
            f"tokenizer is '{kind}-{size}', wanted more than {BYTES} ids: one for each byte and one for the "
            f"end of a text; take e.g. {kind}-8192, or bytes"
        )
    sources = ("books/train", "babi") if kind == "stories" else ("books/train",)
    data = "-".join(library.find(source).fingerprint for source in sources)
    path = cache_folder() / "tokenizers" / f"{kind}-{size}-{data}-{VERSION}"
    if not path.is_dir():
        keep_folder(path, lambda folder: _learn(size, _texts(kind, library), folder))
    return load_tokenizer(path, ANY_SIZE)


def _texts(kind: str, library: Library) -> Iterator[str]:
    yield from (text for _, text in book_texts("train", library))
    if kind == "stories":
        for task in TASKS:
            for story in babi_stories(task, "train", library):
                yield "".join(f" {fact}" for fact in story[-1].facts)
                for asked in story:
                    yield f"\nQuestion: {asked.question}\nAnswer: {asked.answer}."


def _learn(size: int, texts: Iterator[str], folder: Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=SEEN,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    fast.train_from_iterator(texts, trainer)
    marks = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    PreTrainedTokenizerFast(tokenizer_object=fast, **marks).save_pretrained(folder)
