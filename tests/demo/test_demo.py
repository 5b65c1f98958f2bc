"""The demo end to end, with an untrained model: what it hides, reads, saves and shows."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from atlas_lm.cli.conversing import open_conversation
from atlas_lm.cli.demo import SHIPPED
from atlas_lm.cli.main import app
from atlas_lm.data.vocabularies import find_tokenizer
from atlas_lm.demo import run_demo
from atlas_lm.demo.hidden import HiddenTale, Span, hide_tale
from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.stream import Conversation
from atlas_lm.text import Tokenizer
from atlas_lm.watch import observe
from tests.data.simulator import solve

TOKENS = 3000
Demo = tuple[Path, dict[str, Any], str]  # the folder, the numbers and the terminal of one run


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return find_tokenizer("gpt2")


@pytest.fixture(scope="module")
def model(words: Tokenizer) -> AtlasForCausalLM:
    torch.manual_seed(0)
    config = configure("gated_deltanet", block=["sliding", "lmm"], vocab_size=words.vocab_size)
    return AtlasForCausalLM(config).eval()


@pytest.fixture(scope="module")
def demo(
    model: AtlasForCausalLM, words: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Demo:
    out, terminal = tmp_path_factory.mktemp("demo") / "not there yet", io.StringIO()
    console = Console(file=terminal, width=120)
    run_demo(model, words, out, tokens=TOKENS, seed=1, console=console)
    return out, json.loads((out / "results.json").read_text()), terminal.getvalue()


def test_the_tale_stands_in_the_text_whole_and_in_order(words: Tokenizer) -> None:
    tale = hide_tale(words, TOKENS, 2)
    ids = np.concatenate(tale.pieces)
    assert 0.95 * TOKENS < len(ids) <= TOKENS and tale.tokens == len(ids)
    text = words.decode(ids.tolist())
    facts, at = tale.questions[0].facts, 0
    for fact in facts:
        at = text.index(fact, at) + len(fact)
    spans = [words.decode(ids[span.first : span.last].tolist()) for span in tale.facts]
    assert all(any(fact in span for span in spans) for fact in facts)
    assert sum(len(span) for span in spans) < sum(map(len, facts)) + 400  # little of the book
    for asked in tale.questions:
        assert solve(facts, asked.question)[0] == asked.answer


def test_other_seeds_tell_other_tales(words: Tokenizer) -> None:
    one, same, other = (hide_tale(words, TOKENS, seed) for seed in (3, 3, 4))
    assert one.questions == same.questions and one.facts == same.facts
    assert one.questions != other.questions and one.facts != other.facts


def test_passages_cover_the_facts_and_cuts_keep_the_text(words: Tokenizer) -> None:
    tale = hide_tale(words, TOKENS, 5)
    ids, passages = np.concatenate(tale.pieces), tale.passages()
    for fact in tale.facts:
        assert any(p.first <= fact.first and fact.last <= p.last for p in passages)
    assert all(a.last < b.first for a, b in pairwise(passages))
    for span in passages:
        assert np.array_equal(tale.read(span), ids[span.first : span.last])
    cuts = sorted(span.first for span in passages)
    pieces = list(tale.cut(cuts))
    assert np.array_equal(np.concatenate(pieces), ids)
    borders = set(np.cumsum([0, *map(len, pieces)]).tolist())
    assert set(cuts) <= borders and all(map(len, pieces))


def test_cuts_at_the_beginning_and_between_pieces() -> None:
    pieces = [np.arange(5), np.arange(5, 9)]
    tale = HiddenTale(pieces=pieces, facts=[Span(0, 2)], questions=[], books=[], book_tokens=9)
    assert [part.tolist() for part in tale.cut([0, 3, 5, 8])] == [[0, 1, 2], [3, 4], [5, 6, 7], [8]]


def test_everything_is_asked_before_and_after_the_memory_is_reopened(demo: Demo) -> None:
    out, record, terminal = demo
    assert record["reopened_equal"] and record["asked"] == len(record["answers"]) >= 6
    assert record["right"] == sum(answer["right"] for answer in record["answers"])
    assert f"{record['right']} of {record['asked']} answers are right" in terminal
    for answer in record["answers"]:
        assert answer["question"] in terminal
    assert {path.name for path in out.iterdir()} == {"tale.mem", "passages.html", "results.json"}


def test_the_state_has_one_size(demo: Demo) -> None:
    first, last = demo[1]["looks"]
    assert first["state_bytes"] == last["state_bytes"] > 0
    assert first["tokens"] < 0.5 * TOKENS and last["tokens"] == demo[1]["tokens"]


def test_the_page_shows_every_fact(demo: Demo) -> None:
    out, record, _ = demo
    page = (out / "passages.html").read_text()
    for fact in record["facts"]:
        assert fact in page
    assert page.count("[token ") >= 2


def test_a_memory_that_is_not_the_same_is_not_called_so(
    model: AtlasForCausalLM, words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conversation, "open", lambda path, model, words: Conversation(model, words))
    console = Console(file=io.StringIO(), width=120)
    record = run_demo(model, words, tmp_path, tokens=TOKENS, console=console)
    assert not record["reopened_equal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere"], "nowhere is missing"),
        (["--tokens", "10"], "tokens is 10, wanted 1000 or more"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), *options])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def shipped() -> Conversation:
    return open_conversation(SHIPPED)


def test_the_model_that_comes_along_answers_from_a_book(
    shipped: Conversation, tmp_path: Path
) -> None:
    """20 facts in 8,000 tokens, all questions; an untrained model has none of them right."""
    terminal = io.StringIO()
    record = run_demo(
        shipped.stream.model,
        shipped.tokenizer,
        tmp_path,
        tokens=8_000,
        console=Console(file=terminal, width=120),
    )
    assert record["asked"] >= 8 and record["right"] >= record["asked"] - 1, terminal.getvalue()


def test_its_gates_are_closed_on_books_and_open_on_facts(shipped: Conversation) -> None:
    """Of the memories behind the first: they are written to at facts, and hardly ever elsewhere."""
    model, words = shipped.stream.model, shipped.tokenizer
    tale = hide_tale(words, 4000, 1)
    record = observe(model, torch.from_numpy(np.concatenate(tale.pieces).astype(np.int64)))
    told = torch.zeros(tale.tokens, dtype=torch.bool)
    for span in tale.facts:
        told[span.first : span.last + 1] = True
    for layer in record.layers[2:]:
        written = (layer.seen["write"] > 0).float()
        assert written[told].mean() > 0.5 > 0.1 > written[~told].mean()
