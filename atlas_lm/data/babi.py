"""bAbI (Weston et al. 2015, arXiv 1502.05698): stories of a few people, and questions about them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TASKS = {  # of BABILong's first ten; the names that the files have
    "qa1": "single-supporting-fact",
    "qa2": "two-supporting-facts",
    "qa3": "three-supporting-facts",
    "qa4": "two-arg-relations",
    "qa5": "three-arg-relations",
    "qa6": "yes-no-questions",
    "qa7": "counting",
    "qa8": "lists-sets",
    "qa9": "simple-negation",
    "qa10": "indefinite-knowledge",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with all that was told before it."""

    facts: tuple[str, ...]  # in order; earlier questions of the story are left out
    question: str
    answer: str
    support: tuple[int, ...]  # places in `facts` from which the answer follows


Story = tuple[Question, ...]


def read_questions(lines: Iterable[str]) -> Iterator[Question]:
    """One record for each question of a bAbI file, in the order of the file, as BABILong counts them.

    >>> lines = ["1 Mary went to the hall.", "2 Where is Mary? \\thall\\t1", "1 John left."]
    >>> [(q.facts, q.question, q.answer, q.support) for q in read_questions(lines)]
    [(('Mary went to the hall.',), 'Where is Mary?', 'hall', (0,))]
    """
    for story in read_stories(lines):
        yield from story


def read_stories(lines: Iterable[str]) -> Iterator[Story]:
    """The questions of each story; the numbers of lines begin anew with a story."""
    story: list[tuple[int, str]] = []
    for line in lines:
        number, _, text = line.strip("\n").partition(" ")
        if number == "1" and story:
            yield tuple(_questions(story))
            story = []
        story.append((int(number), text))
    if story:
        yield tuple(_questions(story))


def _questions(story: list[tuple[int, str]]) -> Iterator[Question]:
    facts: list[str] = []
    places: dict[int, int] = {}  # number of a line -> place in facts
    for number, text in story:
        if "\t" not in text:
            places[number] = len(facts)
            facts.append(text)
            continue
        question, answer, support = text.split("\t")
        yield Question(
            facts=tuple(facts),
            question=question.strip(),
            answer=answer.strip(),
            support=tuple(places[int(n)] for n in support.split()),
        )
