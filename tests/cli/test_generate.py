"""`atlas generate`"""

import json
import resource
from pathlib import Path

import pytest

from atlas_lm.cli.common import load_model
from atlas_lm.stream import Conversation
from atlas_lm.stream.files import open_memory
from tests.cli.builders import atlas, digest, make_model
from tests.stream.test_engine import assert_same


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("generate") / "model")


def test_a_prompt_is_continued(model: Path) -> None:
    wanted = Conversation(load_model(model)).generate("Once", 9)
    result = atlas("generate", model, "--prompt", "Once", "--max-new-tokens", 9)
    assert result.exit_code == 0 and result.stdout == wanted + "\n"


def test_a_memory_is_continued_and_remembers_on_request(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    options = ("--memory", memory, "--max-new-tokens", 9, "--json")
    conversation = Conversation(load_model(model))
    answer = conversation.generate("Once", 9)
    record = json.loads(atlas("generate", model, "--prompt", "Once", "--save", *options).stdout)
    assert record == dict(
        prompt="Once", answer=answer, tokens=conversation.stream.tokens, saved=True
    )
    assert_same(open_memory(memory, load_model(model)), conversation.stream)
    before = digest(memory)
    more = json.loads(atlas("generate", model, *options).stdout)
    assert more["answer"] == conversation.generate(max_new_tokens=9) and not more["saved"]
    assert digest(memory) == before
    atlas("generate", model, *options, "--save")
    assert_same(open_memory(memory, load_model(model)), conversation.stream)


def test_a_full_disk_leaves_the_old_file(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    options = ("--prompt", "Once", "--memory", memory, "--save")
    assert atlas("generate", model, *options).exit_code == 0
    before, limits = digest(memory), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = atlas("generate", model, *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1 and "old file is untouched" in result.stderr
    assert digest(memory) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "empty prompt: nothing was read"),
        (["--prompt", "x", "--save"], "--save needs a file"),
        (["--prompt", "x", "--memory", "nowhere"], "there is no memory nowhere"),
    ],
)
def test_what_cannot_be_continued_is_said_in_one_line(
    model: Path, options: list[str], message: str
) -> None:
    result = atlas("generate", model, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("atlas generate: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
