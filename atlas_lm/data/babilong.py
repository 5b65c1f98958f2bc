"""BABILong (Kuratov et al. 2024, arXiv 2406.10149): bAbI facts hidden, in order, in running text of books."""

import functools
import json
from dataclasses import dataclass

import numpy as np

from atlas_lm.data.babi import Question
from atlas_lm.data.draws import draw
from atlas_lm.data.hiding import background, hide, told_tokens
from atlas_lm.data.library import BUNDLED
from atlas_lm.data.prompt import Prompt
from atlas_lm.data.sentences import Sentences

RESERVED = 300  # tokens that the published sets leave for instruction and question
LENGTHS = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M", "10M")
LABELS = {  # the answers of each task; a model's answer counts by those that it names
    **dict.fromkeys(
        ("qa1", "qa2", "qa3", "qa4"),
        ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
    ),
    "qa5": ("bill", "fred", "jeff", "mary", "apple", "football", "milk"),
    "qa6": ("no", "yes"),
    "qa7": ("none", "one", "two", "three"),
    "qa8": ("nothing", "apple", "football", "milk"),
    "qa9": ("no", "yes"),
    "qa10": ("maybe", "no", "yes"),
}
STYLES = ("published", "plain")


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """A question whose facts stand in a context."""

    question: Question
    context: Prompt
    places: tuple[int, ...]  # of each fact the number of background sentences before it


def hide_facts(question: Question, source: Sentences, length: int, *name: int | str) -> Hidden:
    """A context of `length` tokens with the facts of a question.

    Args:
        length: in GPT-2 tokens, of which 300 are left for the prompt around the context, as in the
            published sets; 0: the facts alone. Facts that are longer than that stand alone too.
        name: of the draw; the same name gives the same context.
    """
    random = draw("babilong", *name)
    wanted = length - RESERVED - told_tokens(question.facts)
    among = background(source, wanted, random) if wanted > 0 else []
    sentences = sum(map(len, among))
    places = np.sort(random.randint(sentences + 1, size=len(question.facts), dtype=np.int64))
    context = hide(question.facts, among, places.tolist())
    return Hidden(question=question, context=context, places=tuple(places.tolist()))


def ask(task: str, hidden: Hidden, style: str = "published") -> Prompt:
    """The prompt: published, with the instruction and the examples of the benchmark; plain, without them."""
    if style not in STYLES:
        raise ValueError(f"style of the prompt is {style!r}, wanted one of {', '.join(STYLES)}")
    if style == "plain":
        return hidden.context.within("", f"\nQuestion: {hidden.question.question}\nAnswer:")
    words = _published()[task]
    before = "\n\n".join(words[part] for part in ("instruction", "examples", "post_prompt"))
    after = f"\n</context>\n\nQuestion: {hidden.question.question}"
    return hidden.context.within(f"{before}\n\n<context>\n", after)


def is_right(task: str, question: Question, answer: str) -> bool:
    """Scoring as published: the first sentence names the target, and no other label but those asked with.

    Mended: in the published scoring of qa7 "none" names "one" too, so that it is never right.

    >>> asked = Question(facts=(), question="Where is Mary?", answer="garden", support=())
    >>> is_right("qa1", asked, "Mary is in the garden. Or in the office.")
    True
    >>> is_right("qa1", asked, "In the garden or in the office.")
    False
    """
    said = answer.lower()
    for end in (".", "<context>", "<example>"):
        said = said.partition(end)[0]
    asked_with = _named(task, question.question.lower())
    return _named(task, said) - asked_with == set(question.answer.lower().split(","))


def _named(task: str, text: str) -> set[str]:
    """The labels in a text; one that stands inside another, longer label is not named by it."""
    found = set()
    for label in sorted(LABELS[task], key=len, reverse=True):
        if label in text:
            found.add(label)
            text = text.replace(label, "\n")
    return found


def parse_length(text: str, kilo: int = 1000) -> int:
    """Tokens of a length as it is written: 0k, 4k, 1M, or a plain number.

    >>> parse_length("4k"), parse_length("10M"), parse_length("512")
    (4000, 10000000, 512)
    """
    factors = {"k": kilo, "m": kilo * kilo}
    number, factor = (
        (text[:-1], factors[text[-1].lower()]) if text[-1:].lower() in factors else (text, 1)
    )
    if not number.isdecimal():
        raise ValueError(f"length is {text!r}, wanted a number of tokens like 4k, 128k or 1M")
    return int(number) * factor


@functools.cache
def _published() -> dict[str, dict[str, str]]:
    """Instruction, examples and closing words of each task, as the benchmark has them."""
    words: dict[str, dict[str, str]] = json.loads(
        (BUNDLED / "babilong_prompts.json").read_text(encoding="utf-8")
    )
    return words
