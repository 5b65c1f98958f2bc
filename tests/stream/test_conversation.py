"""Text in, text out, over a stream of tokens."""

from pathlib import Path

import pytest
import torch

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.stream import Conversation, Stream
from atlas_lm.text import ByteTokenizer, load_tokenizer
from tests.stream.test_engine import assert_same
from tests.text.builders import byte_level

TEXT = (
    "It was the best of times, it was the wörst of times.\nIt was the age of wisdom 😀\n\nIt was not.\n"
    * 3
)


def model_with(vocab_size: int = 259) -> AtlasForCausalLM:
    torch.manual_seed(0)
    config = configure("gated_deltanet", block="mag", size="tiny", vocab_size=vocab_size)
    return AtlasForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> AtlasForCausalLM:
    return model_with()


def opened(model: AtlasForCausalLM) -> Conversation:
    conversation = Conversation(model, stream=Stream(model, stride=32))
    conversation.absorb(TEXT)
    return conversation


def test_blocks_of_any_size_are_one_text(model: AtlasForCausalLM) -> None:
    whole = opened(model)
    assert whole.stream.tokens == len(TEXT.encode())
    other = Conversation(model, stream=Stream(model, stride=32))
    told: list[int] = []
    count = other.absorb((TEXT[i : i + 7] for i in range(0, len(TEXT), 7)), told.append)
    assert count == told[-1] == whole.stream.tokens
    assert_same(other.stream, whole.stream)


def test_asking_is_not_remembered_and_saying_is(model: AtlasForCausalLM) -> None:
    conversation = opened(model)
    before = conversation.stream.reading
    answer = conversation.ask("Was it? ", 9)
    assert conversation.stream.reading is before
    ids = conversation.stream.ask(ByteTokenizer().encode("Was it? "), 9)
    assert answer == ByteTokenizer().decode(ids)
    assert conversation.generate("Was it? ", 9) == answer
    wanted = opened(model)
    wanted.stream.absorb([*b"Was it? ", *ids])
    assert_same(conversation.stream, wanted.stream)
    assert conversation.ask(max_new_tokens=3) == conversation.ask("", 3)


def test_an_answer_can_be_watched_as_it_comes(model: AtlasForCausalLM) -> None:
    told: list[str] = []
    answer = opened(model).ask("é", 40, told.append, do_sample=True)
    assert "".join(told) == answer
    assert len(told) > 1 and all(told)


def test_forks_do_not_meet(model: AtlasForCausalLM) -> None:
    conversation = opened(model)
    other = conversation.fork()
    other.absorb("More.")
    assert_same(conversation.stream, opened(model).stream)
    assert other.stream.tokens == conversation.stream.tokens + 5


def test_a_tokenizer_of_files(tmp_path: Path) -> None:
    model = model_with(260)
    tokenizer = load_tokenizer(byte_level(tmp_path, ("It", "th", "the")), 260)
    conversation = Conversation(model, tokenizer)
    assert conversation.absorb(TEXT) == len(tokenizer.encode(TEXT)) < len(TEXT.encode())
    told: list[str] = []
    ids = conversation.stream.ask(tokenizer.encode("It"), 9)
    assert conversation.ask("It", 9, told.append) == "".join(told) == tokenizer.decode(ids)


def test_tokenizer_and_model_must_belong_together(model: AtlasForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has 300 ids, which are no bytes"):
        Conversation(model_with(300))
    with pytest.raises(ValueError, match="ids up to 258, the model only up to 99"):
        Conversation(model_with(100), ByteTokenizer())
    with pytest.raises(ValueError, match="opened with another model"):
        Conversation(model, stream=Stream(model_with()))
