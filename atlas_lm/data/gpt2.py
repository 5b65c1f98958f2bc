"""GPT-2's tokenizer, the yardstick in which lengths of contexts are told."""

import functools
import lzma

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from atlas_lm.data.library import BUNDLED

END_OF_TEXT = "<|endoftext|>"
BATCH = 4096  # texts that are looked at at once


@functools.cache
def gpt2_tokenizer() -> Tokenizer:
    """The tokenizer as OpenAI published it, from its list of merges alone.

    Its vocabulary follows from that list: the 256 bytes, printable ones first, then every merge in order,
    then the end of text.

    >>> gpt2_tokenizer().encode("Hello world").ids
    [15496, 995]
    """
    with lzma.open(BUNDLED / "gpt2_merges.txt.xz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()[1:]  # the first names a version
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines) if right]
    words = [*_byte_letters(), *(left + right for left, right in merges), END_OF_TEXT]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def count_tokens(texts: list[str]) -> list[int]:
    """Tokens of each text."""
    counts: list[int] = []
    for first in range(0, len(texts), BATCH):  # what is found takes a hundred times a text's size
        found = gpt2_tokenizer().encode_batch_fast(texts[first : first + BATCH])
        counts += map(len, found)
    return counts


def _byte_letters() -> list[str]:
    """The letter that stands for each byte, in the order of the vocabulary.

    Bytes that can be printed in Latin-1 stand for themselves and come first; the others take the letters
    after U+00FF.
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [*map(chr, shown), *(chr(0x100 + i) for i in range(len(hidden)))]
