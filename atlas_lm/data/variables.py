"""RULER's variable tracking: a chain of assignments in noise; which variables have its value?"""

import functools
import string
from itertools import pairwise

import numpy as np
from numpy.random import RandomState

from atlas_lm.data.asked import Asked
from atlas_lm.data.draws import draw
from atlas_lm.data.gpt2 import count_tokens
from atlas_lm.data.hiding import hide
from atlas_lm.data.needles import ruler_words
from atlas_lm.data.prompt import Prompt, Repeat

ANSWER_TOKENS = 30  # of an answer, counted into the length
HOPS = 4  # assignments of a variable to the next
EXAMPLE_LINES = 10  # of noise in the example before the task
LETTERS = 5  # of a variable's name
EXAMPLE_LETTERS = 3  # in the example


def hide_chain(length: int, *name: int | str) -> Asked:
    """One sample, with a solved example before it.

    Args:
        length: GPT-2 tokens of prompt and answer together, at most; an answer has 30.
        name: of the draw; the same name gives the same sample.
    """
    random = draw("variables", *name)
    example = _example(random)
    names, chain = _chain(LETTERS, random)
    before, question, lead = _frame(chain)
    taken = sum(count_tokens([example + before, question, lead, *(f"\n{line}" for line in chain)]))
    lines = (length - ANSWER_TOKENS - taken) // _noise_tokens()
    if lines < len(chain):
        raise ValueError(
            f"a length of {length} tokens leaves {max(lines, 0)} lines of noise for {len(chain)} "
            "assignments; take a longer one"
        )
    context, places = _among(chain, lines, random)
    prompt = context.within(example + before, question)
    return Asked(
        prompt=prompt,
        lead=lead,
        targets=tuple(names),
        most=ANSWER_TOKENS,
        notes={"places": places},
    )


def _example(random: RandomState) -> str:
    names, chain = _chain(EXAMPLE_LETTERS, random)
    before, question, lead = _frame(chain)
    context, _ = _among(chain, EXAMPLE_LINES, random)
    return f"{before}{context.text()}{question}{lead} {' '.join(names)}\n\n"


def _among(chain: list[str], lines: int, random: RandomState) -> tuple[Prompt, list[int]]:
    places = sorted(random.permutation(lines)[: len(chain)].tolist())
    return hide(chain, [Repeat(_noise(), lines)], places, lead="\n"), places


def _chain(letters: int, random: RandomState) -> tuple[list[str], list[str]]:
    """Names of different variables, and the assignments: the first to a number, each to the one before."""
    names: list[str] = []
    while len(names) <= HOPS:
        places = random.randint(26, size=letters, dtype=np.int64)
        name = "".join(string.ascii_uppercase[i] for i in places)
        names += [] if name in names else [name]
    number = random.randint(10_000, 99_999, dtype=np.int64)
    links = [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
    return names, [f"VAR {names[0]} = {number}", *links]


def _frame(chain: list[str]) -> tuple[str, str, str]:
    words = ruler_words()["variables"]
    fill = {"query": chain[0].rpartition(" ")[2], "number": len(chain)}
    before, question, lead = (
        words[part].format(**fill) for part in ("before", "question", "answer")
    )
    return before, question, lead


def _noise() -> str:
    return f"\n{ruler_words()['noise']}"


@functools.cache
def _noise_tokens() -> int:
    return count_tokens([_noise()])[0]
