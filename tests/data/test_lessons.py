"""Rows of lessons, read back as text: facts in order, answers that follow, labels at the answers alone."""

import re

import numpy as np
import pytest

from atlas_lm.data.files import babi_stories
from atlas_lm.data.gpt2 import END_OF_TEXT
from atlas_lm.data.lessons import BABILongLesson, LessonSource, NeedleLesson
from atlas_lm.data.rows import NOTHING
from atlas_lm.data.source import Stage
from atlas_lm.data.stories import OBJECTS, PEOPLE, PLACES, RECEIVERS
from atlas_lm.data.telling import permuted
from atlas_lm.data.vocabularies import find_tokenizer
from atlas_lm.text import Tokenizer
from tests.data.simulator import FACTS, solve

TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
NAMES = {*PEOPLE, *RECEIVERS, *PLACES, *OBJECTS, "north", "south", "east", "west"}
ASKED = r"\nQuestion: (?P<question>[^\n]+)\nAnswer: (?P<answer>[^\n.]+)\."
SIGNS = {"qa1": "Where is [A-Z]", "qa2": "Where is the", "qa3": "Where was", "qa4": "What is"}
SIGNS |= {"qa5": "(gave|give|received) "}
LENGTHS = {"qa1": 3000, "qa2": 6000, "qa3": 16000, "qa4": 2000, "qa5": 6000}  # in bytes


@pytest.fixture(scope="module", params=["bytes", "bpe-512"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return find_tokenizer(request.param)


def text_of(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids.tolist())


def facts_in(text: str) -> list[tuple[int, str]]:
    """Where facts stand, and what they say; books do not speak of these people and places so."""
    pattern = "|".join(re.sub(r"\(\?P<\w+>|\((?!\?)", "(?:", fact) for fact in FACTS.values())
    found = [(m.start(), m[0]) for m in re.finditer(rf"\b(?:{pattern})", text)]
    return [(at, fact) for at, fact in found if len(NAMES & set(re.findall(r"\w+", fact))) >= 2]


def labelled(ids: np.ndarray, labels: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """What is to be said, run by run."""
    places = np.flatnonzero(labels != NOTHING)
    assert (labels[places] == ids[places + 1]).all(), "each id is said after the one before it"
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [text_of(labels[run], tokenizer) for run in runs]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("silent", [0.0, 1.0])
def test_answers_follow_from_the_facts_before_them(
    task: str, silent: float, tokenizer: Tokenizer
) -> None:
    lesson = BABILongLesson(tasks=(task,), tokenizer=tokenizer, written=0.0, silent=silent)
    length = LENGTHS[task]
    for n in range(4):
        ids, labels = lesson.row(task, "train", length, "answers", n)
        assert 0.9 * length < len(ids) <= length and len(labels) == len(ids)
        text = text_of(ids, tokenizer)
        facts, asked = facts_in(text), list(re.finditer(ASKED, text))
        assert asked and asked[-1].end() == len(text), "the last question stands at the very end"
        for one in asked:
            known = [fact for at, fact in facts if at < one.start()]
            assert solve(known, one["question"])[0] == one["answer"]
        assert labelled(ids, labels, tokenizer) == [f" {one['answer']}." for one in asked]
        last = facts[-1][0]
        told = [(at, len(fact) + 1) for at, fact in facts] + [(m.start(), len(m[0])) for m in asked]
        before = last - sum(size for at, size in told if at < last)  # of the book
        if silent:
            assert before < 0.2 * (len(text) - sum(size for _, size in told))


def test_stories_of_the_file_are_told_word_by_word(tokenizer: Tokenizer) -> None:
    lesson = BABILongLesson(tasks=("qa1",), tokenizer=tokenizer, written=1.0, permute=False)
    known = {(s[-1].facts, tuple(q.answer for q in s)) for s in babi_stories("qa1", "train")}
    for n in range(4):
        text = text_of(lesson.row("qa1", "train", 4000, n)[0], tokenizer)
        told = tuple(fact for _, fact in facts_in(text))
        assert (told, tuple(m["answer"] for m in re.finditer(ASKED, text))) in known


def test_renamed_stories_are_as_true_as_before() -> None:
    random = np.random.RandomState(0)
    for task in ("qa1", "qa2", "qa4"):
        for story in babi_stories(task, "train")[:5]:
            other = permuted(story, task, random)
            for asked, before in zip(other, story, strict=True):
                assert solve(asked.facts, asked.question) == (asked.answer, before.support)
        assert other != story


def test_stories_that_are_held_out_are_never_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other story that comes up is one of the test file: none of them gets into a row."""
    lesson = BABILongLesson(
        tasks=("qa1",), tokenizer=find_tokenizer("bytes"), written=1.0, permute=False
    )
    test = babi_stories("qa1", "test")
    stories = lesson._stories
    stories["qa1", "train"] = [*test, *stories["qa1", "train"][: len(test)]]
    forbidden = {story[-1].facts for story in test}
    told = set()
    for n in range(12):
        text = text_of(lesson.row("qa1", "train", 4000, n)[0], lesson.tokenizer)
        told.add(tuple(fact for _, fact in facts_in(text)))
    assert len(told) > 1 and not told & forbidden


def test_training_and_validation_have_books_of_their_own() -> None:
    lesson = BABILongLesson(tasks=("qa1",), tokenizer=find_tokenizer("bytes"))
    train, validation = (lesson._books[split].names for split in ("train", "validation"))
    assert not set(train) & set(validation)
    wanted = {tuple(s[-1].facts) for s in babi_stories("qa1", "validation")}
    for n in range(3):
        text = text_of(lesson.row("qa1", "validation", 4000, n)[0], lesson.tokenizer)
        assert tuple(fact for _, fact in facts_in(text)) in wanted


@pytest.mark.parametrize("kind", ["single_1", "single_2"])
def test_needles_are_in_the_haystack_and_asked_for(kind: str, tokenizer: Tokenizer) -> None:
    lesson = NeedleLesson(kinds=(kind,), tokenizer=tokenizer)
    for n in range(3):
        ids, labels = lesson.row(kind, "train", 3000, n)
        assert 0.9 * 3000 < len(ids) <= 3000
        [said] = labelled(ids, labels, tokenizer)
        answer = said.strip(" .")
        text = text_of(ids, tokenizer)
        assert text.endswith(said) and text.count(answer) == 2, "once told, once asked for"


def test_a_row_depends_on_its_name_alone(tokenizer: Tokenizer) -> None:
    for make in (BABILongLesson, NeedleLesson):
        one, two = make(tokenizer=tokenizer), make(tokenizer=tokenizer)
        cell = one.cells()[0]
        first = one.row(cell, "train", 3000, 7, 3)
        two.row(cell, "train", 3000, 7, 2)
        again = two.row(cell, "train", 3000, 7, 3)
        other = two.row(cell, "train", 3000, 7, 4)
        for mine, theirs in zip(first, again, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert len(first[0]) != len(other[0]) or (first[0] != other[0]).any()


def test_rows_become_longer_and_exams_are_as_long_as_the_last() -> None:
    lesson = BABILongLesson(tasks=("qa1", "qa4"), tokenizer=find_tokenizer("bytes"))
    stages = (Stage(begin=0.0, length=2000), Stage(begin=0.5, length=4000))
    source = LessonSource(lesson=lesson, stages=stages, steps=4, tokens=8000, exam_rows=2)
    assert [source.shape(step) for step in range(4)] == [(4, 2000)] * 2 + [(2, 4000)] * 2
    whole, part = source.batch(1, 0, 4), source.batch(1, 2, 2)
    np.testing.assert_array_equal(whole.inputs[2:], part.inputs)
    np.testing.assert_array_equal(whole.labels[2:], part.labels)
    assert (whole.count <= 2000).all() and (whole.labels[:, -1] == NOTHING).all()
    exams = source.exams()
    assert {name: (exam.rows, exam.length) for name, exam in exams.items()} == {
        "qa1": (2, 4000),
        "qa4": (2, 4000),
    }
    batch = exams["qa4"].batch(1, 1)
    ids, labels = lesson.row("qa4", "validation", 4000, 0, 1)
    np.testing.assert_array_equal(batch.inputs[0, : len(ids)], ids)
    np.testing.assert_array_equal(batch.labels[0, : len(ids)], labels)
    assert (batch.labels[0, len(ids) :] == NOTHING).all()


def test_short_rows_are_of_tasks_with_short_stories() -> None:
    words = find_tokenizer("stories-1024")
    lesson = BABILongLesson(tokenizer=words, mixed=1.0)
    usual = {task: lesson.usual(task) for task in TASKS}
    assert usual["qa4"] < usual["qa1"] < usual["qa2"] < usual["qa3"]
    short, long = usual["qa1"] + 8, usual["qa3"] + 8
    stages = (Stage(begin=0.0, length=short), Stage(begin=0.5, length=long))
    source = LessonSource(lesson=lesson, stages=stages, steps=2, tokens=40 * long)
    kinds: list[set[str]] = []
    for step in range(2):
        batch = source.batch(step, 0, 40)
        told = [text_of(ids[:n], words) for ids, n in zip(batch.inputs, batch.count, strict=True)]
        asked = [one["question"] for text in told for one in re.finditer(ASKED, text)]
        kinds.append({task for task in TASKS for one in asked if re.search(SIGNS[task], one)})
    assert kinds == [{"qa1", "qa4"}, set(TASKS)]


def test_lures_are_sentences_of_training_books_that_name_people_and_things() -> None:
    words = find_tokenizer("bytes")
    lesson = BABILongLesson(tasks=("qa4",), tokenizer=words, lured=1.0)
    names = re.compile(rf"\b({'|'.join({*PEOPLE, *RECEIVERS, *PLACES, *OBJECTS})})\b")
    ids, _ = lesson.row("qa4", "train", 4000, "lures")
    text = re.sub(ASKED, "", text_of(ids, words))
    for _, fact in facts_in(text):
        text = text.replace(fact, "")
    assert len(text) > 3000
    books = lesson._books["train"]
    lures = [books.read(int(i), int(i) + 1).strip() for i in lesson._lures]
    told = [lure for lure in lures if lure in text]
    assert sum(map(len, told)) > 0.9 * len(text.strip()) / text.count(told[0])
    assert all(names.search(lure) for lure in lures)
    calm, _ = lesson.row("qa4", "validation", 4000, "lures")
    assert not any(lure in text_of(calm, words) for lure in lures)


def test_mixed_stories_are_asked_more() -> None:
    words, asked = find_tokenizer("bytes"), []
    for share in (0.0, 1.0):
        lesson = BABILongLesson(tasks=("qa3",), tokenizer=words, written=0.0, mixed=share)
        asked.append(
            text_of(lesson.row("qa3", "train", 12000, "mixed")[0], words).count("Question:")
        )
    assert asked[0] == 5 < asked[1]


def test_what_cannot_be_is_refused() -> None:
    plain = find_tokenizer("bytes")
    with pytest.raises(ValueError, match=r"tasks is \('qa9',\), wanted one or more of qa1"):
        BABILongLesson(tasks=("qa9",), tokenizer=plain)
    with pytest.raises(ValueError, match="silent is 2, wanted a share"):
        BABILongLesson(tokenizer=plain, silent=2)
    with pytest.raises(ValueError, match="none of 100 stories of qa3 is as short"):
        BABILongLesson(tokenizer=plain).row("qa3", "train", 300, 0)
    with pytest.raises(ValueError, match="too few for needles of single_1"):
        NeedleLesson(tokenizer=plain).row("single_1", "train", 60, 0)
    with pytest.raises(ValueError, match="cell is 'qa2', wanted one of qa1"):
        BABILongLesson(tasks=("qa1",), tokenizer=plain).row("qa2", "train", 900, 0)
    with pytest.raises(ValueError, match="split is 'test', wanted one of train, validation"):
        BABILongLesson(tokenizer=plain).row("qa1", "test", 900, 0)


def test_words_of_stories_are_single_ids_where_stories_were_read() -> None:
    words = find_tokenizer("stories-1024")
    assert words.vocab_size <= 1024 and words.key != find_tokenizer("bpe-1024").key
    for fact in (" Sandra travelled to the bathroom.", " Daniel discarded the football there."):
        assert len(words.encode(fact)) == 6
        assert words.decode(words.encode(fact)) == fact
    with pytest.raises(ValueError, match="tokenizer is 'stories-9', wanted more than 256"):
        find_tokenizer("stories-9")


def test_tokenizers_by_name(tmp_path) -> None:
    own = find_tokenizer("bpe-512")
    assert own.vocab_size == 512 and own.key == find_tokenizer("bpe-512").key
    text = "Call me Ishmael. Some years ago—never mind how long precisely—"
    assert own.decode(own.encode(text)) == text
    assert len(own.encode(text)) < len(text.encode())
    own.save(tmp_path)
    assert find_tokenizer(str(tmp_path)).encode(text) == own.encode(text)
    gpt2 = find_tokenizer("gpt2")
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.special["eos_token_id"] == gpt2.encode(END_OF_TEXT)[0] == 50256
    for wrong in ("bpe-256", "gpt3", str(tmp_path / "nothing")):
        with pytest.raises(ValueError, match="tokenizer is"):
            find_tokenizer(wrong)
