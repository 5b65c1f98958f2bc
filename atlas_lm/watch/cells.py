"""Tokens as a reader sees them: characters, each with the tokens that it is made of."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from atlas_lm.text.tokenizer import Tokenizer

# shown as a sign or a number instead of what they would do to a page: vanish, turn text around, break lines
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
MARKS = ("Mn", "Me")  # accents and the like, which sit on the character before them
JOINER = "\u200d"  # makes one emoji of two
LINE_END, ALONE, NOTHING = "↵", "◌", "⟨⟩"
MOST = 64  # tokens of one cell


@dataclass(frozen=True)
class Cell:
    """Some text that stands for one token, or for several where only together they are one."""

    text: str  # as it is shown: nothing invisible but spaces, tabs and line ends
    tokens: int


def to_cells(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Cell]:
    """Cells for all tokens, in order. The bytes of one character share a cell; special tokens show a name.

    >>> from atlas_lm.text import ByteTokenizer
    >>> to_cells(ByteTokenizer(), [*"né".encode(), 257])
    [Cell(text='n', tokens=1), Cell(text='é', tokens=2), Cell(text='⟨eos⟩', tokens=1)]
    """
    names = {number: name.removesuffix("_token_id") for name, number in tokenizer.special.items()}
    cells: list[Cell] = []
    decoder, waiting = tokenizer.decoder(), 0
    for number in ids:
        if number in names:
            _append(cells, decoder.flush(), waiting)
            cells.append(Cell(f"⟨{names[number]}⟩", 1))
            decoder, waiting = tokenizer.decoder(), 0
            continue
        waiting += 1
        if text := decoder.feed([number]):
            _append(cells, text, waiting)
            waiting = 0
    _append(cells, decoder.flush(), waiting)
    return cells


def _append(cells: list[Cell], text: str, tokens: int) -> None:
    """One more cell, or a longer last one: what belongs to the character before it is shown with it."""
    before = cells[-1] if cells else Cell("\n", MOST)
    if tokens == 0 and not text:
        return
    if tokens == 0 or (_joins(before.text, text) and before.tokens + tokens <= MOST):
        cells[-1:] = [Cell(before.text + show(text), before.tokens + tokens)]
    else:
        alone = ALONE if _joins("", text) else ""
        cells.append(Cell(alone + show(text) or NOTHING, tokens))


def _joins(before: str, text: str) -> bool:
    if not text or before.endswith("\n"):
        return False
    mark = unicodedata.category(text[0]) in MARKS or text[0] == JOINER
    return mark or before.endswith(JOINER)


def show(text: str) -> str:
    """The text with every character visible; a line end keeps its effect and gets a sign.

    >>> show("a\\x00\\u202e\\n")
    'a␀⟨U+202E⟩↵\\n'
    """
    return "".join(_show(letter) for letter in text)


def _show(letter: str) -> str:
    if letter == "\n":
        return LINE_END + letter
    if letter in ("\t", JOINER) or unicodedata.category(letter) not in HIDDEN:
        return letter
    code = ord(letter)
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"
