"""Sentences, prompts made of them, and facts hidden among them."""

import hashlib
import re
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from atlas_lm.data import babilong, sentences
from atlas_lm.data.babi import TASKS
from atlas_lm.data.draws import draw
from atlas_lm.data.files import babi_questions
from atlas_lm.data.gpt2 import gpt2_tokenizer
from atlas_lm.data.hiding import background, hide, single_sentences
from atlas_lm.data.library import Library
from atlas_lm.data.prompt import Prompt, Repeat, Stretch, join
from atlas_lm.data.sentences import LONGEST, SHORTEST, book_sentences, split_sentences
from atlas_lm.text import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, cuts_freely
from tests.text.builders import first_words_marked

TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "gpt2": HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer())),
    "marked": HuggingFaceTokenizer(first_words_marked()),
}


def gpt2_length(text: str) -> int:
    return len(gpt2_tokenizer().encode(text))


def test_sentences_end_where_they_should() -> None:
    text = (
        "Mr. Smith met Dr. A. B. Jones at 3.5 miles. “Well?” he said; then nothing!\n"
        "It rained.\n\n  CHAPTER II\n\nThe end (at last). Or not"
    )
    assert list(split_sentences(text)) == [
        "Mr. Smith met Dr. A. B. Jones at 3.5 miles.",
        "“Well?” he said; then nothing!",
        "It rained.",
        "CHAPTER II",
        "The end (at last).",
        "Or not",
    ]


def test_a_collection_holds_the_sentences_of_a_book() -> None:
    books = book_sentences("test")
    lengths = np.diff(books.counts)
    assert lengths.min() >= SHORTEST and lengths.max() <= LONGEST
    for i in range(0, len(books), 977):
        sentence = books.read(i, i + 1)
        assert sentence[0] == " " and not sentence[-1].isspace()
        assert gpt2_length(sentence) == lengths[i]
    assert books.tokens() == books.tokens(0, 100) + books.tokens(100)


def test_the_length_of_a_stretch_is_what_the_tokenizer_counts() -> None:
    books = book_sentences("test")
    assert books.tokens(50, 450) == gpt2_length(books.read(50, 450))
    assert books.reach(10, 500, books.tokens(10, 77)) == 77
    assert books.reach(10, 500, books.tokens(10, 77) - 1) == 76
    assert books.reach(10, 40, 10**6) == 40 and books.reach(10, 40, 0) == 10


def test_a_background_is_running_text_told_once() -> None:
    books = book_sentences("test")
    found = background(books, 5000, draw("background", 1))
    assert 5000 - LONGEST < sum(part.tokens for part in found) <= 5000
    told = [i for part in found for i in range(part.first, part.last)]
    assert len(set(told)) == len(told)
    whole = background(books, books.tokens(), draw("background", 2))
    assert sum(map(len, whole)) == len(books)


def test_a_background_beyond_the_texts_is_refused_or_repeats() -> None:
    books = book_sentences("validation")
    wanted = int(2.5 * books.tokens())
    with pytest.raises(ValueError, match="atlas data"):
        background(books, wanted, draw("background", 3))
    found = background(books, wanted, draw("background", 3), repeat=True)
    assert wanted - LONGEST < sum(part.tokens for part in found) <= wanted


def test_sentences_that_name_something_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    books = book_sentences("test")
    words = ("garden", "boat", "window")
    pattern = re.compile(rf"\b({'|'.join(words)})\b")
    wanted = [i for i in range(len(books)) if pattern.search(books.read(i, i + 1))]
    assert len(wanted) > 20
    assert books.naming(words).tolist() == wanted
    monkeypatch.setattr(sentences, "SEARCHED", 100)
    assert books.naming(words).tolist() == wanted
    assert not len(books.naming(["atlas_lm"]))


def test_chosen_sentences_fill_a_length_in_random_order() -> None:
    books, chosen = book_sentences("test"), np.array([5, 70, 700, 701])
    found = single_sentences(books, chosen, 1000, draw("lures"))
    numbers = [part.first for part in found]
    assert all(len(part) == 1 for part in found) and set(numbers) == set(chosen.tolist())
    left = 1000 - sum(part.tokens for part in found)
    assert 0 <= left < books.counts.max()
    assert left < max(books.tokens(int(i), int(i) + 1) for i in chosen)
    other = single_sentences(books, chosen, 1000, draw("lures", 1))
    assert [part.first for part in other] != numbers


def test_what_is_hidden_stands_in_order_before_its_places() -> None:
    books = book_sentences("test")
    among = [Stretch(books, 5, 8), Stretch(books, 20, 22)]
    text = hide(["A.", "B.", "C.", "D."], among, [0, 0, 3, 5]).text()
    wanted = ["A.", "B.", *(books.read(i, i + 1)[1:] for i in (5, 6, 7)), "C."]
    wanted += [books.read(i, i + 1)[1:] for i in (20, 21)]
    assert text == " ".join([*wanted, "D."])
    begins = hide(["A."], among, [2]).text()
    assert begins == " ".join(
        [books.read(5, 6)[1:], books.read(6, 7)[1:], "A.", *wanted[4:5], *wanted[6:]]
    )


def test_lines_that_repeat_are_written_as_such() -> None:
    prompt = hide(["needle"], [Repeat("\nhay", 3)], [1], lead="\n")
    assert prompt.text() == "hay\nneedle\nhay\nhay"
    assert prompt.tokens == gpt2_length(prompt.text())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_of_a_prompt_are_ids_of_its_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    question = babi_questions("qa2", "test")[7]
    hidden = babilong.hide_facts(question, book_sentences("test"), 3000, "ids")
    prompt = babilong.ask("qa2", hidden)
    ids = np.concatenate(prompt.ids(tokenizer)).tolist()
    assert ids == tokenizer.encode(prompt.text())
    assert ids == np.concatenate(prompt.ids(tokenizer)).tolist()  # now from the disk


def test_tokenizers_that_mark_first_words_do_not_cut_freely() -> None:
    free = {name: cuts_freely(tokenizer) for name, tokenizer in TOKENIZERS.items()}
    assert free == {"bytes": True, "gpt2": True, "marked": False}
    assert len({tokenizer.key for tokenizer in TOKENIZERS.values()}) == 3


@pytest.mark.parametrize("name", TOKENIZERS)
def test_many_texts_are_encoded_as_each(name: str) -> None:
    texts = ["One.", " Two more,", "", "3"]
    assert TOKENIZERS[name].encode_all(texts) == [TOKENIZERS[name].encode(t) for t in texts]
    assert TOKENIZERS[name].encode_all([]) == []


def test_neighbouring_literals_become_one_part() -> None:
    prompt = join(["a", "", "b", Repeat(" c", 2), "d"])
    assert prompt.parts == ("ab", Repeat(" c", 2), "d") and prompt.text() == "ab c cd"
    assert prompt.sha256 == hashlib.sha256(b"ab c cd").hexdigest()


@pytest.mark.parametrize("length", ["0k", "1k", "4k", "16k", "100k"])
@pytest.mark.parametrize("task", ["qa1", "qa3", "qa5"])
def test_babilong_contexts_have_their_length_and_their_facts(task: str, length: str) -> None:
    books, wanted = book_sentences("test"), babilong.parse_length(length)
    for index in (3, 501):
        question = babi_questions(task, "test")[index]
        context = babilong.hide_facts(question, books, wanted, task, length, index).context
        text = context.text()
        place = 0
        for fact in question.facts:  # all of them, in order
            place = text.index(fact, place) + len(fact)
        assert context.tokens == gpt2_length(text)
        least = sum(gpt2_length(f" {fact}") for fact in question.facts) - 1
        if wanted - babilong.RESERVED > least:
            assert wanted - babilong.RESERVED - LONGEST < context.tokens
        assert context.tokens <= max(wanted - babilong.RESERVED, least + 1)


def test_facts_stand_anywhere_in_a_context() -> None:
    """Their places are uniform: the mean of 10 sorted places of 40 samples is near the middle."""
    books, question = book_sentences("test"), babi_questions("qa1", "test")[4]
    assert len(question.facts) == 10
    shares = []
    for index in range(40):
        hidden = babilong.hide_facts(question, books, 8000, "places", index)
        total = sum(len(p) if not isinstance(p, str) else 1 for p in hidden.context.parts)
        shares += [place / total for place in hidden.places]
    assert abs(np.mean(shares) - 0.5) < 0.05 and min(shares) < 0.05 and max(shares) > 0.9


def test_the_same_name_gives_the_same_bytes() -> None:
    """Pinned: contexts of the books in the package are the same on every machine."""
    digest = hashlib.sha256()
    for task in ("qa1", "qa2", "qa3", "qa4", "qa5"):
        for index in range(3):
            question = babi_questions(task, "test")[index]
            hidden = babilong.hide_facts(question, book_sentences("test"), 2000, 0, task, index)
            digest.update(babilong.ask(task, hidden).text().encode())
    assert digest.hexdigest()[:16] == "c976eb318e78145b"


def test_published_prompts_frame_the_context() -> None:
    question = babi_questions("qa1", "test")[0]
    hidden = babilong.hide_facts(question, book_sentences("test"), 0, "frame")
    text = babilong.ask("qa1", hidden).text()
    assert text.startswith("I will give you context with the facts about positions")
    facts = " ".join(question.facts)
    assert text.endswith(f"<context>\n{facts}\n</context>\n\nQuestion: {question.question}")
    assert babilong.ask("qa1", hidden, "plain").text() == (
        f"{facts}\nQuestion: {question.question}\nAnswer:"
    )
    with pytest.raises(ValueError, match="wanted one of published, plain"):
        babilong.ask("qa1", hidden, "fancy")


@pytest.mark.parametrize(
    ("task", "index", "answer", "right"),
    [
        ("qa1", 0, "The most recent location of John is hallway.", True),
        ("qa1", 0, "John is in the HALLWAY", True),
        ("qa1", 0, "hallway or bathroom", False),
        ("qa1", 0, "hallway. Not the bathroom", True),
        ("qa1", 0, "I do not know.", False),
        ("qa1", 0, "Not here. hallway", False),
        (
            "qa4",
            0,
            "The bathroom is east of the bedroom",
            True,
        ),  # asked: what is the bathroom east of?
        ("qa4", 0, "hallway", False),
        ("qa5", 0, "Fred gave Jeff the football", True),  # asked: what did Fred give to Jeff?
        ("qa5", 0, "the milk and the football", False),
    ],
)
def test_scoring_as_published(task: str, index: int, answer: str, right: bool) -> None:
    assert babilong.is_right(task, babi_questions(task, "test")[index], answer) == right


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_of_every_question_is_right(task: str) -> None:
    """With the scoring as published no answer `none` would be, because `one` is in it."""
    for question in babi_questions(task, "test"):
        assert babilong.is_right(task, question, question.answer)
        assert not babilong.is_right(task, question, "Silence")


def test_lists_of_things_count_as_sets() -> None:
    both = next(q for q in babi_questions("qa8", "test") if q.answer == "apple,milk")
    assert babilong.is_right("qa8", both, "milk and apple")
    assert not babilong.is_right("qa8", both, "milk")
    assert not babilong.is_right("qa8", both, "apple, milk, football")


@pytest.mark.parametrize("text", ["4x", "", "k", "-3", "1.5k"])
def test_lengths_are_numbers_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="wanted a number of tokens"):
        babilong.parse_length(text)


def test_ten_million_tokens_are_built_in_no_time(large_data: Path) -> None:
    """A million tokens a second and core are asked for; slices of mapped files give a hundred times that."""
    books = book_sentences("test", Library())
    question = babi_questions("qa1", "test", Library())[0]
    began = time.process_time()
    hidden = babilong.hide_facts(question, books, 10_000_000, "speed")
    letters = sum(map(len, babilong.ask("qa1", hidden).pieces()))
    seconds = time.process_time() - began
    assert hidden.context.tokens > 9_999_000 and letters > 30_000_000
    assert hidden.context.tokens / seconds > 1_000_000


def test_prompts_are_values() -> None:
    assert Prompt(("a",)) == Prompt(("a",)) != Prompt(("b",))
