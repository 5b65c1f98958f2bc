"""Text to token ids and back, and long texts in pieces. Knows nothing of models."""

from atlas_lm.text.pieces import cut, read_text
from atlas_lm.text.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    TextDecoder,
    Tokenizer,
    check_vocabulary,
    cuts_freely,
    load_tokenizer,
)

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "TextDecoder",
    "Tokenizer",
    "check_vocabulary",
    "cut",
    "cuts_freely",
    "load_tokenizer",
    "read_text",
]
