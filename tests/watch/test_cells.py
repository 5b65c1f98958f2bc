"""Every token is in one cell, and every cell can be seen."""

import pytest

from atlas_lm.text import ByteTokenizer
from atlas_lm.watch import Cell, to_cells

BYTES = ByteTokenizer()


def cells(text: str) -> list[Cell]:
    return to_cells(BYTES, BYTES.encode(text))


def test_bytes_of_a_character_share_a_cell():
    assert cells("aé漢😀") == [Cell("a", 1), Cell("é", 2), Cell("漢", 3), Cell("😀", 4)]


def test_accents_and_joined_emoji_stay_together():
    assert cells("e\u0301x") == [Cell("e\u0301", 3), Cell("x", 1)]
    assert cells("👩\u200d👧!") == [Cell("👩\u200d👧", 11), Cell("!", 1)]
    assert cells("\u0301a") == [Cell("◌\u0301", 2), Cell("a", 1)]
    assert cells("\n\u0301") == [Cell("↵\n", 1), Cell("◌\u0301", 2)]
    assert max(cell.tokens for cell in cells("a" + "\u0301" * 100)) <= 64


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x00", "␀"),
        ("\r", "␍"),
        ("\x7f", "⟨U+007F⟩"),
        ("\u202e", "⟨U+202E⟩"),
        ("\n", "↵\n"),
        ("\t", "\t"),
    ],
)
def test_what_cannot_be_seen_is_named(text, shown):
    assert "".join(cell.text for cell in cells(text)) == shown


def test_no_token_is_lost():
    """Broken bytes, a character cut off at either end, special tokens inside one."""
    for ids in ([0xA9, 65, 0xFF, 0xC3], [0xC3, 257, 0xA9, 256], [258], [0xF0, 0x9F]):
        assert sum(cell.tokens for cell in to_cells(BYTES, ids)) == len(ids)
    assert to_cells(BYTES, [65, 257]) == [Cell("A", 1), Cell("⟨eos⟩", 1)]
    assert to_cells(BYTES, [0xC3])[0].text == "\ufffd"
    assert to_cells(BYTES, []) == []


class Halves:
    """A tokenizer whose tokens end inside a character: id 0 is `a` and the first byte of `é`."""

    special: dict[str, int] = {}  # noqa: RUF012

    def decoder(self):
        return self

    def __init__(self) -> None:
        self.waiting = False

    def feed(self, ids):
        (number,) = ids
        self.waiting = number == 0
        return "a" if number == 0 else "é"

    def flush(self):
        return "\ufffd" if self.waiting else ""


def test_a_broken_end_is_shown_with_its_token():
    assert to_cells(Halves(), [0, 1]) == [Cell("a", 1), Cell("é", 1)]
    assert to_cells(Halves(), [0]) == [Cell("a\ufffd", 1)]
