"""Sources over shards, against slow transcriptions of what they promise."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atlas_lm.data.documents import Documents, Packed
from atlas_lm.data.draws import draw
from atlas_lm.data.shards import Shards, write_shards
from atlas_lm.data.source import Source
from atlas_lm.data.vocabularies import find_tokenizer
from atlas_lm.text import ByteTokenizer, Tokenizer

SIZES = (5, 40, 1, 17, 7, 8, 23, 0, 16, 64, 3)  # bytes of the documents, which the end follows


def make(folder: Path, sizes: tuple[int, ...], tokenizer: Tokenizer | None = None) -> Shards:
    """Documents of which every token is another where that is possible."""
    texts = [
        (str(n), "".join(chr(32 + (7 * n + i) % 90) for i in range(size)))
        for n, size in enumerate(sizes)
    ]
    return write_shards(texts, tokenizer or ByteTokenizer(), folder, about={}, shard_tokens=50)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return make(tmp_path_factory.mktemp("train") / "s", SIZES)


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return make(tmp_path_factory.mktemp("validation") / "s", (9, 30, 50, 29, 3))


def whole(shards: Shards, document: int) -> list[int]:
    return shards.read(document, 0, int(shards.lengths[document])).tolist()


Row = tuple[list[int], list[int], bool, int]


def slow_documents(train: Shards, length: int, rows: int, seed: int, epoch: int) -> list[list[Row]]:
    """Lanes of an epoch as lists of rows."""
    pieces: list[Row] = []
    for document in draw(seed, "documents", epoch).permutation(train.documents):
        ids = whole(train, document)
        for begin in range(0, len(ids), length):
            inputs, labels = [0] * length, [-100] * length
            for place in range(begin, min(begin + length, len(ids))):
                inputs[place - begin] = ids[place]
                if place + 1 < len(ids):
                    labels[place - begin] = ids[place + 1]
            pieces.append((inputs, labels, begin == 0, min(length, len(ids) - begin)))
    steps = len(pieces) // rows
    lanes = [pieces[lane * steps : (lane + 1) * steps] for lane in range(rows)]
    return [
        [(a, b, fresh or n == 0, c) for n, (a, b, fresh, c) in enumerate(lane)] for lane in lanes
    ]


@pytest.mark.parametrize(("length", "rows", "seed"), [(8, 3, 0), (5, 1, 4), (16, 7, 1), (64, 2, 2)])
def test_documents_are_read_in_lanes(
    train: Shards, validation: Shards, length: int, rows: int, seed: int
) -> None:
    source = Documents(train=train, validation=validation, length=length, rows=rows, seed=seed)
    step = 0
    for epoch in range(2):
        lanes = slow_documents(train, length, rows, seed, epoch)
        assert source.steps == len(lanes[0]) > 0
        for place in range(source.steps):
            batch = source.batch(step, 0, rows)
            inputs, labels, fresh, count = zip(*(lane[place] for lane in lanes), strict=True)
            assert batch.inputs.tolist() == list(inputs) and batch.inputs.dtype == np.int64
            assert batch.labels.tolist() == list(labels)
            assert batch.fresh is not None and batch.fresh.tolist() == list(fresh)
            assert batch.count is not None and batch.count.tolist() == list(count)
            assert batch.borders is None
            step += 1


def test_every_token_is_seen_once_an_epoch_but_for_the_pieces_left_over(
    train: Shards, validation: Shards
) -> None:
    pieces = sum(-(-(size + 1) // 8) for size in SIZES)
    everything = Counter(token for n in range(train.documents) for token in whole(train, n))
    for rows in (1, 3, 4):
        source = Documents(train=train, validation=validation, length=8, rows=rows)
        seen: Counter[int] = Counter()
        for step in range(source.steps):
            batch = source.batch(step, 0, rows)
            for inputs, count in zip(batch.inputs, batch.count, strict=True):
                seen.update(inputs[:count].tolist())
        assert seen <= everything
        left = (everything - seen).total()
        assert pieces % rows <= left <= 8 * (pieces % rows)


def test_epochs_and_seeds_differ(train: Shards, validation: Shards) -> None:
    def epoch(number: int, seed: int) -> list[list[int]]:
        source = Documents(train=train, validation=validation, length=8, rows=1, seed=seed)
        steps = range(number * source.steps, (number + 1) * source.steps)
        return [source.batch(step, 0, 1).inputs[0].tolist() for step in steps]

    first, second, other = epoch(0, 0), epoch(1, 0), epoch(0, 1)
    assert first != second and first != other
    assert sorted(first) == sorted(second) == sorted(other)


def test_independent_rows_are_the_same_but_not_carried(train: Shards, validation: Shards) -> None:
    both = [
        Documents(train=train, validation=validation, length=8, rows=2, carries=carries)
        for carries in (True, False)
    ]
    kept, apart = (source.batch(3, 0, 2) for source in both)
    assert apart.fresh is None and kept.fresh is not None
    assert (apart.inputs == kept.inputs).all() and (apart.labels == kept.labels).all()


def slow_packed(
    shards: Shards, order: list[int], length: int
) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows: inputs, labels, places inside at which a document begins."""
    tokens: list[tuple[int, int, bool]] = []
    for document in order:
        ids = whole(shards, document)
        wanted = [*ids[1:], -100]
        tokens += [(ids[i], wanted[i], i == 0) for i in range(len(ids))]
    rows = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
    return [
        ([t[0] for t in row], [t[1] for t in row], [i for i, t in enumerate(row) if i and t[2]])
        for row in rows
    ]


def slow_borders(rows: list[tuple[list[int], list[int], list[int]]], length: int) -> list[int]:
    borders = []
    for number, (_, _, begins) in enumerate(rows):
        borders += [number * length, *(number * length + begin for begin in begins)]
    return [*borders, len(rows) * length]


@pytest.mark.parametrize(("length", "rows"), [(8, 3), (24, 2), (50, 1)])
def test_documents_are_packed(train: Shards, validation: Shards, length: int, rows: int) -> None:
    source = Packed(train=train, validation=validation, length=length, rows=rows, seed=5)
    step = 0
    for epoch in range(2):
        order = draw(5, "packed", epoch).permutation(train.documents).tolist()
        wanted = slow_packed(train, order, length)
        assert source.steps == len(wanted) // rows > 0
        for place in range(source.steps):
            batch, chosen = source.batch(step, 0, rows), wanted[place * rows : (place + 1) * rows]
            assert batch.inputs.tolist() == [row[0] for row in chosen]
            assert batch.labels.tolist() == [row[1] for row in chosen]
            assert batch.borders is not None
            assert batch.borders.tolist() == slow_borders(chosen, length)
            assert batch.fresh is None and batch.count is None
            step += 1


def test_packed_exams_are_the_validation_documents_in_order(
    train: Shards, validation: Shards
) -> None:
    source = Packed(train=train, validation=validation, length=16, rows=2, exam_rows=5)
    exam = source.exams()["validation"]
    wanted = slow_packed(validation, list(range(validation.documents)), 16)[:5]
    batch = exam.batch(0, exam.rows)
    assert (exam.rows, exam.length) == (5, 16)
    assert batch.inputs.tolist() == [row[0] for row in wanted]
    assert batch.labels.tolist() == [row[1] for row in wanted]
    assert batch.borders is not None and batch.borders.tolist() == slow_borders(wanted, 16)
    few = Packed(train=train, validation=validation, length=16, rows=2)
    assert few.exams()["validation"].rows == int(validation.lengths.sum()) // 16 == 7


def test_documents_without_an_end_and_without_tokens_are_passed_over(tmp_path: Path) -> None:
    class Endless(ByteTokenizer):
        special = {}  # noqa: RUF012

    shards = make(tmp_path / "s", (4, 0, 6, 0), Endless())
    assert shards.eos is None and shards.lengths.tolist() == [4, 0, 6, 0]
    source = Documents(train=shards, validation=shards, length=4, rows=1)
    seen = [source.batch(step, 0, 1) for step in range(source.steps)]
    assert source.steps == 3 and sum(batch.tokens for batch in seen) == 10
    packed = Packed(train=shards, validation=shards, length=5, rows=2)
    borders = packed.exams()["validation"].batch(0, 2).borders
    assert borders is not None and borders.tolist() == [0, 4, 5, 10]


@pytest.mark.parametrize("kind", [Documents, Packed])
def test_rows_are_the_same_asked_for_together_or_apart(
    train: Shards, validation: Shards, kind: type
) -> None:
    source: Source = kind(train=train, validation=validation, length=8, rows=4)
    assert source.shape(9) == (4, 8)
    for step in (7, 0, 11):
        together = source.batch(step, 0, 4)
        for first, count in ((3, 1), (0, 2), (1, 3)):
            part = source.batch(step, first, count)
            chosen = slice(first, first + count)
            for name in ("inputs", "labels", "fresh", "count"):
                mine, all_ = getattr(part, name), getattr(together, name)
                assert (mine is None) == (all_ is None)
                assert mine is None or (mine == all_[chosen]).all()
            if together.borders is not None and part.borders is not None:
                inside = (together.borders >= 8 * first) & (together.borders <= 8 * (first + count))
                assert (part.borders == together.borders[inside] - 8 * first).all()


@pytest.mark.parametrize(
    ("exam_rows", "exam_length", "documents", "length"),
    [
        (2, 10, [2, 1], 10),  # 51, 31, 30, 10 and 4 tokens
        (8, 30, [2, 1, 3], 30),  # only these are as long
        (8, 51, [2], 51),
        (8, 8192, [2], 48),  # none is: the longest, in whole pieces
    ],
)
def test_exams_are_beginnings_of_long_documents(
    train: Shards, validation: Shards, exam_rows: int, exam_length: int, documents, length: int
) -> None:
    source = Documents(
        train=train,
        validation=validation,
        length=8,
        rows=2,
        exam_rows=exam_rows,
        exam_length=exam_length,
    )
    exam = source.exams()["validation"]
    assert (exam.rows, exam.length) == (len(documents), length)
    batch = exam.batch(0, exam.rows)
    for row, document in enumerate(documents):
        ids = [*whole(validation, document), -100]
        assert batch.inputs[row].tolist() == ids[:length]
        assert batch.labels[row].tolist() == ids[1 : length + 1]
    assert (exam.batch(exam.rows - 1, 1).inputs[0] == batch.inputs[-1]).all()
    with pytest.raises(ValueError, match="are wanted, there are 0 to"):
        exam.batch(0, exam.rows + 1)


def test_exams_shorter_than_a_piece(train: Shards, validation: Shards) -> None:
    source = Documents(train=train, validation=validation, length=60, rows=2)
    assert source.exams()["validation"].length == 51


def test_settings_tell_data_and_numbers(train: Shards, validation: Shards) -> None:
    settings = Documents(train=train, validation=validation, length=8, rows=2).settings()
    assert settings == {
        "source": "documents",
        "train": train.fingerprint,
        "validation": validation.fingerprint,
        "tokenizer": "bytes",
        "length": 8,
        "rows": 2,
        "seed": 0,
        "exam_rows": 8,
        "exam_length": 8192,
        "carries": True,
    }
    packed = Packed(train=train, validation=validation, length=8, rows=2)
    assert packed.settings()["source"] == "packed" and not packed.carries
    assert packed.vocab_size == 259 and packed.tokenizer_key == "bytes"


@pytest.mark.parametrize("kind", [Documents, Packed])
def test_what_cannot_be_is_refused(
    train: Shards, validation: Shards, kind: type, tmp_path: Path
) -> None:
    def refuse(message: str, **changed) -> None:
        fields = dict(train=train, validation=validation, length=8, rows=2)
        with pytest.raises(ValueError, match=message):
            kind(**fields | changed)

    refuse("length is 1, wanted 2 or more", length=1)
    refuse("rows is 0, wanted 1 or more", rows=0)
    refuse("exam_rows is 0, wanted 1 or more", exam_rows=0)
    refuse("take fewer rows, a smaller length or more text", rows=1000)
    other = make(tmp_path / "other", (9,), find_tokenizer("bpe-300"))
    refuse(f"wrong tokenizer: .* bytes, .* of {other.tokenizer_key}; write both", validation=other)
    empty = make(tmp_path / "empty", (0,))
    refuse("validation", validation=empty)
    source = kind(train=train, validation=validation, length=8, rows=2)
    for wanted in ((0, 1, 2), (0, -1, 1), (0, 0, 0), (-1, 0, 1)):
        with pytest.raises(ValueError, match=r"wanted"):
            source.batch(*wanted)
