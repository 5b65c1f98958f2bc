"""How fast samples are built: tokens of context per second of one core, text and ids.

    ATLAS_DATA=… python benchmarks/samples.py

The first pass splits and counts what a collection holds and keeps it on disk; its time is told apart. Text is
decoded whole; ids, of GPT-2's tokenizer and from the disk as well, are copied out as a model would get them.
"""

import argparse
import os
import time
from collections.abc import Callable

os.environ["TOKENIZERS_PARALLELISM"] = "0"  # one core
os.environ["RAYON_NUM_THREADS"] = "1"

from transformers import PreTrainedTokenizerFast

from atlas_lm.data import babilong, needles, variables
from atlas_lm.data.files import babi_questions
from atlas_lm.data.gpt2 import gpt2_tokenizer
from atlas_lm.data.library import Library
from atlas_lm.data.prompt import Prompt
from atlas_lm.data.sentences import book_sentences
from atlas_lm.evaluate.line import Line
from atlas_lm.text import HuggingFaceTokenizer

STRIDE = 2_048  # ids that are copied at once
LENGTHS = (1_000, 16_000, 128_000, 1_000_000, 10_000_000)


def makers(library: Library) -> dict[str, Callable[[int, int], Prompt]]:
    """Of each kind a function from length and number to a prompt."""
    questions = babi_questions("qa2", "test", library)

    def hidden(length: int, index: int) -> Prompt:
        found = babilong.hide_facts(
            questions[index], book_sentences("test", library), length, "speed", index
        )
        return babilong.ask("qa2", found)

    kinds = {
        kind: lambda length, index, kind=kind: (
            needles.hide_needles(kind, length, library, "speed", index).prompt
        )
        for kind in ("single_1", "single_2", "multikey_2")
    }
    chain = {"variables": lambda length, index: variables.hide_chain(length, "speed", index).prompt}
    return {"babilong qa2": hidden, **kinds, **chain}


def rates(make: Callable[[int, int], Prompt], length: int, count: int) -> tuple[float, float]:
    """Tokens per second of text, and of ids, in process time."""
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer()))
    _copy_ids(make(length, 0), tokenizer)  # collections and ids are on disk now
    tokens = sum(make(length, index).tokens for index in range(count))
    began = time.process_time()
    for index in range(count):
        sum(map(len, make(length, index).pieces()))
    text = time.process_time() - began
    began = time.process_time()
    for index in range(count):
        _copy_ids(make(length, index), tokenizer)
    return tokens / text, tokens / (time.process_time() - began)


def _copy_ids(prompt: Prompt, tokenizer: HuggingFaceTokenizer) -> None:
    line = Line.of(*prompt.ids(tokenizer))
    for first in range(0, len(line), STRIDE):
        line.read(first, first + STRIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=LENGTHS[-1], help="tokens of the longest")
    options = parser.parse_args()
    library = Library()
    began = time.process_time()
    books = book_sentences("test", library)
    print(
        f"books: {len(books):,} sentences, {books.tokens():,} tokens, opened or made in "
        f"{time.process_time() - began:.1f} s"
    )
    print("| task | tokens | text, Mtok/s | ids, Mtok/s |\n|---|---|---|---|")
    for name, make in makers(library).items():
        for length in LENGTHS:
            if length <= options.most:
                text, ids = rates(make, length, max(3, min(200, 2_000_000 // length)))
                print(f"| {name} | {length:,} | {text / 1e6:.1f} | {ids / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
