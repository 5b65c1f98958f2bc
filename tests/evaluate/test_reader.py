"""Answers, likelihoods and losses are those of the model in one call, whatever stands beside a row."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
)

from atlas_lm.data.gpt2 import gpt2_tokenizer
from atlas_lm.data.prompt import Repeat, join
from atlas_lm.evaluate import opening
from atlas_lm.evaluate import reader as reading
from atlas_lm.evaluate.line import Line, columns
from atlas_lm.evaluate.reader import Abilities, Reader, Refused, TooLong
from atlas_lm.evaluate.sessions import TransformersSession, longest_context
from atlas_lm.models.fingerprint import fingerprint
from atlas_lm.text import ByteTokenizer, HuggingFaceTokenizer
from tests.evaluate.builders import KINDS, log_probabilities, model, random_line, reader

LINES = [random_line(n, n) for n in (40, 57, 13)]


def ids_of(line: Line) -> list[int]:
    return line.read(0, len(line)).tolist()


def test_lines_read_across_their_pieces() -> None:
    line = Line.of([1, 2], [], np.array([3, 4, 5], np.uint32), [6])
    assert len(line) == 6 and ids_of(line) == [1, 2, 3, 4, 5, 6]
    assert line.read(1, 4).tolist() == [2, 3, 4] and line.read(4, 9).tolist() == [5, 6]
    assert line.read(3, 3).tolist() == [] and line.read(0, 1).dtype == np.int64
    assert ids_of(line.shortened(3)) == [1, 5, 6] and line.shortened(6) is line


def test_lines_stand_side_by_side() -> None:
    lines = [Line.of([1, 2, 3, 4]), Line.of([5, 6])]
    ids, valid = columns(lines, 1, 4, at_end=True)
    assert ids.tolist() == [[2, 3, 4], [0, 5, 6]] and valid is not None
    assert valid.tolist() == [[True] * 3, [False, True, True]]
    ids, valid = columns(lines, 1, 4, at_end=False)
    assert ids.tolist() == [[2, 3, 4], [6, 0, 0]]
    assert columns(lines, 2, 4, at_end=True)[1] is None


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_likeliest_tokens(kind: str) -> None:
    told = reader(kind).answers(LINES, 9)
    for line, answer in zip(LINES, told, strict=True):
        ids = ids_of(line)
        for _ in range(9):
            token = int(log_probabilities(kind, ids)[-1].argmax())
            if token == ByteTokenizer.eos:
                break
            ids.append(token)
        assert answer == ByteTokenizer().decode(ids[len(line) :])
        assert answer == reader(kind, stride=7).answers([line], 9)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_end_where_they_are_complete(kind: str) -> None:
    whole = reader(kind).answers(LINES, 12)
    asked: list[str] = []

    def stop(text: str) -> bool:
        asked.append(text)
        return len(text) >= 4

    short = reader(kind).answers(LINES, 12, stop)
    assert all(w.startswith(s) for w, s in zip(whole, short, strict=True))
    assert all(len(s) >= min(4, len(w)) for w, s in zip(whole, short, strict=True))
    assert any(len(s) < len(w) for w, s in zip(whole, short, strict=True)) and asked


@pytest.mark.parametrize("kind", KINDS)
def test_likelihoods_of_continuations(kind: str) -> None:
    random = np.random.RandomState(1)
    groups = [
        [random.randint(0, 256, n).tolist() for n in sizes] for sizes in ((1, 4, 3), (2,), (6, 1))
    ]
    greedy = int(log_probabilities(kind, ids_of(LINES[0]))[-1].argmax())
    groups[0].append([greedy])
    counted: list[int] = []
    found = reader(kind).likelihoods(LINES, groups, counted.append)
    for line, group, likelihoods in zip(LINES, groups, found, strict=True):
        for ids, likelihood in zip(group, likelihoods, strict=True):
            table = log_probabilities(kind, ids_of(line) + ids)[len(line) - 1 : -1]
            wanted = sum(table[i, token].item() for i, token in enumerate(ids))
            assert likelihood.nats == pytest.approx(wanted, rel=1e-4, abs=1e-3)
            assert likelihood.greedy == (table.argmax(-1).tolist() == ids)
    assert found[0][-1].greedy
    assert sum(counted) == sum(map(len, LINES)) + sum(len(ids) for g in groups for ids in g)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_every_token(kind: str) -> None:
    for line, nats in zip(LINES, reader(kind).losses(LINES), strict=True):
        ids = ids_of(line)
        table = log_probabilities(kind, ids)[:-1]
        wanted = -table.gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0].numpy()
        assert np.isnan(nats[0])  # nothing stands before it
        np.testing.assert_allclose(nats[1:], wanted, rtol=1e-4, atol=1e-4)


def test_losses_with_a_token_before_the_text() -> None:
    with_prefix = reader("llama")
    with_prefix.prefix = [ByteTokenizer.bos]
    [nats] = with_prefix.losses([LINES[2]])
    ids = [ByteTokenizer.bos, *ids_of(LINES[2])]
    table = log_probabilities("llama", ids)[:-1]
    wanted = -table.gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0].numpy()
    np.testing.assert_allclose(nats, wanted, rtol=1e-4, atol=1e-4)


def test_a_limited_model_reads_long_texts_in_windows_that_overlap() -> None:
    line = random_line(250, 5)
    limited = reader("llama")
    assert limited.limit == 96
    [nats] = limited.losses([line])
    ids = ids_of(line)
    for place in (1, 50, 96, 97, 100, 144, 145, 200, 249):
        if place < 97:
            start = 0
        else:  # windows end at 97, 145, 193, 241 and 250; 96 tokens are read, the last one is not
            stop = min(97 + 48 * ((place - 97) // 48 + 1), 250)
            start = stop - 97
        wanted = -log_probabilities("llama", ids[start:place])[-1, ids[place]].item()
        assert nats[place] == pytest.approx(wanted, rel=1e-3, abs=1e-3), place


@pytest.mark.parametrize("step", [None, 96])
def test_windows_of_a_row_do_not_depend_on_its_neighbours(step: int | None) -> None:
    lines = [random_line(n, n) for n in (250, 130, 90, 187)]
    together = reader("llama").losses(lines, step=step)
    for line, nats in zip(lines, together, strict=True):
        [alone] = reader("llama").losses([line], step=step)
        np.testing.assert_allclose(nats, alone, rtol=1e-4, atol=1e-4)


def test_logits_of_continuations_are_made_a_few_at_a_time(monkeypatch) -> None:
    groups = [[[1, 2, 3, 4, 5], [6]], [[7, 8]], [[9, 1, 1]]]
    wanted = reader("memory").likelihoods(LINES, groups)
    monkeypatch.setattr(reading, "LOGITS", 1)
    for some, others in zip(reader("memory").likelihoods(LINES, groups), wanted, strict=True):
        assert [s.nats for s in some] == pytest.approx([o.nats for o in others], rel=1e-5)
        assert [s.greedy for s in some] == [o.greedy for o in others]


def test_what_stands_before_every_text_stands_there_once() -> None:
    begun = reader("llama")
    begun.begin = [ByteTokenizer.bos]
    assert ids_of(begun.line(join(["ab"]))) == [ByteTokenizer.bos, 97, 98]
    assert ids_of(begun.begun(Line.of([ByteTokenizer.bos, 97]))) == [ByteTokenizer.bos, 97]


def test_what_is_too_long_is_refused_or_cut_and_never_in_silence() -> None:
    prompt = join(["a" * 200])
    with pytest.raises(TooLong, match="200 tokens and 10 are to follow, but llama takes 96"):
        reader("llama").line(prompt, room=10)
    line = reader("llama", truncate=True).line(join(["a" * 100 + "b" * 100]), room=10)
    assert len(line) == 86 and bytes(ids_of(line)) == b"a" * 43 + b"b" * 43
    assert line.left_out == 114
    assert len(reader("memory").line(prompt, room=10)) == 200
    with pytest.raises(TooLong, match="96 are to follow"):  # nothing of the text would be left
        reader("llama", truncate=True).line(prompt, room=96)
    assert len(reader("llama", limit=300).line(prompt)) == 200
    ending = Line.of([1, 2], [3, 4]).ending(3)
    assert ids_of(ending) == [2, 3, 4] and ending.left_out == 1


def test_prompts_in_a_chat() -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer(), eos_token="<|endoftext|>")
    theirs.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    chatting = reader("memory", chat=True)
    chatting.tokenizer = HuggingFaceTokenizer(theirs)
    said = chatting.said(join(["Where?", Repeat(" Here.", 2)]), " It is")
    assert said.text() == "[user] Where? Here. Here.\n[assistant]\nIt is"
    assert reader("memory").said(join(["Where?"]), " It is").text() == "Where? It is"
    with pytest.raises(ValueError, match="leave out --chat"):
        reader("memory", chat=True).said(join(["Where?"]))


def test_no_tokens_are_no_prompt() -> None:
    with pytest.raises(ValueError, match="at least one"):
        reader("memory").answers([Line.of([])], 3)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LlamaConfig(max_position_embeddings=77), 77),
        (MistralConfig(sliding_window=64), None),
        (Phi3Config(sliding_window=999, max_position_embeddings=99, pad_token_id=0), 99),
        (MistralConfig(sliding_window=None, max_position_embeddings=88), 88),
        (GPT2Config(n_positions=99), 99),
        (MambaConfig(), None),
    ],
)
def test_how_much_a_model_takes(config, wanted: int | None) -> None:
    assert longest_context(config) == wanted


class Forgetful:
    """Reads nothing but what comes in this call, and sees no mask."""

    def __init__(self, kind: str) -> None:
        self._model = model(kind)

    def read(self, ids: torch.Tensor, valid: torch.Tensor | None, keep: int) -> torch.Tensor:
        with torch.no_grad():
            return self._model(ids).logits[:, -max(keep, 1) :]


def test_models_that_forget_are_found_out_and_read_whole(monkeypatch, caplog) -> None:
    """Such a model gives no answers; likelihoods and losses are right, one by one and in one call."""
    monkeypatch.setattr(opening, "TransformersSession", lambda _: Forgetful("llama"))
    found = reader("llama")
    assert found.can == Abilities(pieces=False, steps=False, forks=False, padded=False)
    assert found.stride == opening.WHOLE
    assert "forgets what it read" in caplog.text and "padded" in caplog.text
    groups = [[[7, 8, 9], [1]], [[2, 2]], [[3]]]
    monkeypatch.setattr(reading, "LOGITS", 1)  # which would cut a text into single tokens
    for weighed, wanted in zip(
        found.likelihoods(LINES, groups), reader_of("llama").likelihoods(LINES, groups), strict=True
    ):
        assert [w.nats for w in weighed] == pytest.approx([w.nats for w in wanted], rel=1e-4)
    for nats, wanted in zip(found.losses(LINES), reader_of("llama").losses(LINES), strict=True):
        np.testing.assert_allclose(nats, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(Refused, match="llama cannot go on token by token"):
        found.answers(LINES, 3)


def reader_of(kind: str) -> Reader:
    """A reader of the model itself, whatever else stands in for its sessions."""
    found = reader("memory")
    found.start, found.limit = lambda: TransformersSession(model(kind)), 96
    return found


def test_models_that_read_on_token_by_token_only(caplog) -> None:
    """Mamba of transformers takes one token after what it read, not several, and cannot be forked."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=259, hidden_size=16, state_size=4, num_hidden_layers=2)
    mamba = MambaForCausalLM(MambaConfig(**sizes, initializer_range=0.3)).eval()
    found = opening.open_reader(mamba, ByteTokenizer(), name="mamba")
    assert found.can.steps and not found.can.pieces and not found.can.forks
    assert found.limit is None
    line = LINES[0]
    [[weighed]] = found.likelihoods([line], [[[5, 6, 7]]])
    with torch.no_grad():
        table = mamba(torch.tensor([[*ids_of(line), 5, 6]])).logits[0].double().log_softmax(-1)
    wanted = sum(table[len(line) - 1 + i, 5 + i].item() for i in range(3))
    assert weighed.nats == pytest.approx(wanted, rel=1e-4)
    [told] = found.answers([line], 4)
    ids = ids_of(line)
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(mamba(torch.tensor([ids])).logits[0, -1].argmax()))
    assert told == ByteTokenizer().decode(ids[len(line) :])


def test_models_that_cannot_be_read_or_are_broken_are_refused() -> None:
    class Failing:
        def read(self, *given):
            raise IndexError("no such state")

    class Broken:
        def read(self, ids, valid, keep):
            return torch.full((len(ids), max(keep, 1), 259), torch.nan)

    config = model("llama").config
    with pytest.raises(ValueError, match=r"odd cannot read even 24 tokens \(IndexError: no such"):
        opening.examine_abilities(Failing, config, "odd")
    with pytest.raises(ValueError, match="odd gives NaN for 24 random tokens"):
        opening.examine_abilities(Broken, config, "odd")
    broken = reader("llama")
    broken.start = Broken
    for call in (
        lambda: broken.losses(LINES),
        lambda: broken.answers(LINES, 2),
        lambda: broken.likelihoods(LINES, [[[1]]] * 3),
    ):
        with pytest.raises(ValueError, match="llama gave NaN where it should tell the next token"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_good_models_are_believed(kind: str, caplog) -> None:
    found = reader(kind)
    assert found.can == Abilities()
    assert found.stride == 16 and not caplog.text
    assert found.fingerprint == reader(kind).fingerprint


def test_fingerprints_tell_models_apart() -> None:
    assert len({reader(kind).fingerprint for kind in KINDS}) == len(KINDS)


def test_fingerprints_tell_configurations_apart() -> None:
    """Of models with the same weights too: what else moves their numbers is in the record of a run."""
    other = copy.deepcopy(model("llama"))
    assert fingerprint(other) == fingerprint(model("llama"))
    other.config.rms_norm_eps = 0.1
    other._atlas_fingerprint = None
    assert fingerprint(other) != fingerprint(model("llama"))
    about = reader("llama", limit=50).about
    assert about["limit"] == 50 and about["dtype"] == "float32" and about["tokenizer"] == "bytes"
