"""`atlas ask`"""

import json
from pathlib import Path

import pytest

from atlas_lm.cli.common import load_model
from atlas_lm.stream import Conversation
from tests.cli.builders import LINES, atlas, digest, make_model


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> tuple[Path, Path]:
    """A model and a memory."""
    folder = tmp_path_factory.mktemp("ask")
    make_model(folder / "model")
    atlas("absorb", folder / "model", "-", "--memory", folder / "memory", stdin=LINES.encode())
    return folder / "model", folder / "memory"


def test_the_answer_is_printed_and_the_memory_stays(opened: tuple[Path, Path]) -> None:
    model, memory = opened
    before = digest(memory)
    conversation = Conversation(load_model(model))
    conversation.absorb(LINES)
    wanted = conversation.ask("Who?", 12)
    result = atlas("ask", model, "Who?", "--memory", memory, "--max-new-tokens", 12)
    assert result.exit_code == 0 and result.stdout == wanted + "\n"
    result = atlas("ask", model, "Who?", "--memory", memory, "--max-new-tokens", 12, "--json")
    assert json.loads(result.stdout) == {
        "question": "Who?",
        "answer": wanted,
        "tokens": len(LINES.encode()),
    }
    assert digest(memory) == before


def test_answers_can_be_sampled(opened: tuple[Path, Path]) -> None:
    model, memory = opened
    ask = ("ask", model, "Who?", "--memory", memory, "--max-new-tokens", 12, "--json")
    free = ("--temperature", 2, "--top-p", 0.9, "--seed")
    one, same, other = (json.loads(atlas(*ask, *free, seed).stdout) for seed in (1, 1, 2))
    assert one == same != other
    assert json.loads(atlas(*ask).stdout) not in (one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "nowhere"], "there is no memory nowhere; make one with `atlas absorb`"),
        (["--memory", "notes.txt"], "notes.txt"),
        (["--memory", "memory", "--temperature", "1", "--top-p", "7"], "--top-p is 7.0"),
        (["--memory", "memory", "--top-p", "0.5"], "give a --temperature above 0"),
        (["--memory", "memory", "--seed", "0"], "give a --temperature above 0"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(
    opened: tuple[Path, Path], tmp_path: Path, monkeypatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no memory")
    (tmp_path / "memory").symlink_to(opened[1])
    result = atlas("ask", opened[0], "Who?", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("atlas ask: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_the_memory_of_another_model_is_refused(opened: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "--seed", 5)
    result = atlas("ask", other, "Who?", "--memory", opened[1])
    assert result.exit_code == 2 and "other weights" in result.stderr
