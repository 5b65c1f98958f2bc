"""Rows of tasks as a source: the batches of a loop, from any place."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from atlas_lm.data.cued import Cued
from atlas_lm.data.draws import draw
from atlas_lm.data.mad import InContextRecall, SelectiveCopying
from atlas_lm.data.mqar import MQAR
from atlas_lm.data.row_source import RowSource
from atlas_lm.data.rows import Rows, RowTask

STEPS, TOKENS = 40, 200
GROUPS: dict[str, dict[str, RowTask]] = {
    "mqar": {str(n): MQAR(vocab_size=128, length=8 * n, pairs=n) for n in (2, 4, 8)},
    "recall": {"recall": InContextRecall(seq_len=16, train_examples=30)},
    "copying": {"copying": SelectiveCopying(seq_len=40, tokens_to_copy=4, train_examples=20)},
    "cued": {"cued": Cued(keys=2, values=4, block=3)},
}


def source(group: str, **changes: Any) -> RowSource:
    settings = dict(tasks=GROUPS[group], steps=STEPS, tokens=TOKENS, seed=3) | changes
    return RowSource(**settings)


def one_behind_the_other(tasks: list[RowTask], seed: int) -> Iterator[Rows]:
    """The batches of a run from its first step to its last, as a loop would make them."""
    known: dict[str, Rows] = {}
    for step in range(STEPS):
        random = draw("learning", seed, step)
        reach = 1 + int(2 * len(tasks) * step / STEPS)
        task = tasks[int(random.randint(min(reach, len(tasks)), dtype=np.int64))]
        count = max(1, TOKENS // task.length)
        there = getattr(task, "train_examples", None)
        if there is None:
            yield task.rows("train", step * count, count, seed)
            continue
        if task.name not in known:
            known[task.name] = task.rows("train", 0, there, seed)
        chosen = random.randint(there, size=count, dtype=np.int64)
        rows = known[task.name]
        yield Rows(inputs=rows.inputs[chosen], labels=rows.labels[chosen])


@pytest.mark.parametrize("group", GROUPS)
def test_batches_are_those_of_a_loop(group: str) -> None:
    found = source(group)
    for step, rows in enumerate(one_behind_the_other(list(GROUPS[group].values()), 3)):
        assert found.shape(step) == rows.inputs.shape
        batch = found.batch(step, 0, len(rows.inputs))
        np.testing.assert_array_equal(batch.inputs, rows.inputs)
        np.testing.assert_array_equal(batch.labels, rows.labels)
        assert batch.fresh is None and batch.count is None and batch.borders is None


@pytest.mark.parametrize("group", GROUPS)
def test_rows_are_the_same_together_or_apart_in_any_order(group: str) -> None:
    for step in (31, 4, 17):
        rows, _ = source(group).shape(step)
        whole = source(group).batch(step, 0, rows)
        for row in reversed(range(rows)):
            one = source(group).batch(step, row, 1)
            np.testing.assert_array_equal(one.inputs[0], whole.inputs[row])
            np.testing.assert_array_equal(one.labels[0], whole.labels[row])


def test_more_and_more_tasks_come_after_the_first() -> None:
    found = source("mqar", steps=600)
    lengths = [found.shape(step)[1] for step in range(600)]
    assert set(lengths[:100]) == {16}
    assert set(lengths[100:200]) == {16, 32}
    assert set(lengths[200:300]) == {16, 32, 64}
    assert all(160 < lengths[300:].count(length) * 2 < 240 for length in (16, 32, 64))


def test_all_tasks_together_come_from_the_first_step_on() -> None:
    found = source("mqar", steps=600, together=True)
    lengths = [found.shape(step)[1] for step in range(100)]
    assert all(20 < lengths.count(length) < 47 for length in (16, 32, 64))


def test_a_step_has_as_many_rows_as_its_tokens_allow_and_at_least_one() -> None:
    assert source("cued", tokens=29).shape(0) == (2, 10)
    assert source("cued", tokens=3).shape(0) == (1, 10)


def test_exams_are_rows_of_the_split_test() -> None:
    found = source("mqar", exam_rows=12)
    assert list(found.exams()) == ["2", "4", "8"]
    for name, exam in found.exams().items():
        task = GROUPS["mqar"][name]
        wanted = task.rows("test", 0, 12, 3)
        assert (exam.rows, exam.length) == (12, task.length)
        np.testing.assert_array_equal(exam.batch(0, 12).inputs, wanted.inputs)
        np.testing.assert_array_equal(exam.batch(5, 2).labels, wanted.labels[5:7])


def test_settings_tell_the_tasks_and_all_numbers() -> None:
    assert source("cued", tokens=29, together=True).settings() == {
        "tasks": {"cued": {"task": "Cued", "keys": 2, "values": 4, "block": 3}},
        "steps": STEPS,
        "tokens": 29,
        "seed": 3,
        "exam_rows": 256,
        "together": True,
    }


def test_a_source_says_what_it_is() -> None:
    assert source("mqar").vocab_size == 128 and not source("mqar").carries


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {}}, r"0 tasks have vocabularies of \[\] tokens"),
        ({"tasks": GROUPS["mqar"] | GROUPS["cued"]}, r"4 tasks have vocabularies of \[13, 128\]"),
        ({"steps": 0}, "steps is 0, wanted 1 or more"),
        ({"tokens": 0}, "tokens is 0, wanted 1 or more"),
        ({"exam_rows": 0}, "exam_rows is 0, wanted 1 or more"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source("mqar", **changes)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (19, 2)])
def test_rows_that_are_not_there_are_refused(first: int, count: int) -> None:
    with pytest.raises(
        ValueError, match=f"{count} rows from number {first} on .* step 0, which has 20"
    ):
        source("cued").batch(0, first, count)
    with pytest.raises(ValueError, match="of the exam, which has 20"):
        source("cued", exam_rows=20).exams()["cued"].batch(first, count)


@pytest.mark.parametrize("step", [-1, STEPS])
def test_steps_that_are_not_there_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step is {step}, wanted 0 to {STEPS - 1}"):
        source("cued").shape(step)
