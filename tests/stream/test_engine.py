"""Streams: any way of handing tokens over gives the same bits, and time and memory stay as they are."""

import logging
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.stream import Reading, Stream
from atlas_lm.stream.resident import resident_bytes
from atlas_lm.stream.running import read
from tests.builders import assert_close

KINDS = [
    ("titans", "mag"),
    ("atlas", "lmm"),
    ("gated_deltanet", "mal"),
    ("omeganet", "mac"),
    ("softmax_attention", "lmm"),
    ("transformer", "sliding"),
    ("transformer", "attention"),
]
STRIDE, TOKENS = 48, 170  # three borders, no multiple of the chunk's 16 at the end


def model_of(preset: str, block: str, **changes: object) -> AtlasForCausalLM:
    torch.manual_seed(0)
    return AtlasForCausalLM(configure(preset, block=block, size="tiny", **changes)).eval()


def draw_ids(tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> AtlasForCausalLM:
    return model_of("titans", "mag")


def opened(model: AtlasForCausalLM, ids: Tensor | None = None, stride: int = STRIDE) -> Stream:
    stream = Stream(model, stride=stride)
    stream.absorb(draw_ids() if ids is None else ids)
    return stream


def assert_same(got: Stream | Reading, wanted: Stream | Reading) -> None:
    """Equal to the last bit."""
    got, wanted = (one.reading if isinstance(one, Stream) else one for one in (got, wanted))
    assert got.stride == wanted.stride
    assert torch.equal(got.pending, wanted.pending)
    mine, theirs = got.state.leaves(), wanted.state.leaves()
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different


@contextmanager
def tokens_per_call(model: AtlasForCausalLM) -> Iterator[list[int]]:
    """How many tokens the model reads in each call."""
    sizes: list[int] = []
    hook = model.model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: sizes.append(inputs[0].shape[1])
    )
    yield sizes
    hook.remove()


def random_pieces(ids: Tensor, seed: int) -> Iterator[Tensor]:
    generator, start = random.Random(seed), 0
    while start < len(ids):
        size = generator.choice([0, 1, 2, 5, 30, 48, 100])
        yield ids[start : start + size]
        start += size


@pytest.mark.parametrize(("preset", "block"), KINDS)
def test_pieces_of_any_size_give_the_same_bits(preset: str, block: str) -> None:
    model, ids = model_of(preset, block), draw_ids()
    whole = opened(model, ids)
    assert whole.tokens == TOKENS and len(whole.reading.pending) == TOKENS % STRIDE
    for seed in range(3):
        stream = Stream(model, stride=STRIDE)
        for piece in random_pieces(ids, seed):
            assert stream.absorb(piece) == len(piece)
        assert_same(stream, whole)
        assert torch.equal(stream.logits(), whole.logits())


@pytest.mark.parametrize(("preset", "block"), KINDS)
def test_a_stream_is_the_model_reading_the_whole(preset: str, block: str) -> None:
    """And strides of any size agree with it up to rounding, in logits and state."""
    model, ids = model_of(preset, block), draw_ids(250)
    with torch.no_grad():
        out = model(ids.unsqueeze(0), use_cache=True)
    for stride in (64, 128, 200, 7):
        stream = opened(model, ids, stride)
        assert_close("logits", stream.logits(), out.logits[0, -1], 1e-4)
        state = read(model, stream.reading.state, stream.reading.pending)
        for name, leaf in out.past_key_values.state.leaves().items():
            assert_close(name, state.leaves()[name], leaf, 1e-4)


def test_ids_come_in_many_kinds(model: AtlasForCausalLM, tmp_path: Path) -> None:
    ids, whole = draw_ids(), opened(model)
    array = ids.numpy()
    np.save(tmp_path / "ids.npy", array.astype(np.uint16))
    mapped = np.load(tmp_path / "ids.npy", mmap_mode="r")
    given = [
        ids.tolist(),
        tuple(ids.tolist()),
        array,
        mapped,
        ids.int(),
        iter([ids[:60], [], mapped[60:]]),
    ]
    given += [(piece for piece in ids.split(11)), [array[:90], array[90:]]]
    for one in given:
        stream = Stream(model, stride=STRIDE)
        assert stream.absorb(one) == TOKENS
        assert_same(stream, whole)
    before = whole.reading
    assert [whole.absorb(empty) for empty in ([], torch.zeros(0), iter([]), np.zeros(0, int))] == [
        0
    ] * 4
    assert whole.reading is before


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [5, 6, 259, -1],
            "token id 259 at place 2 of this piece, 172 of the stream, .* wanted 0 to 258",
        ),
        ([-1], "token id -1 at place 0"),
        (np.array([0, 2**40]), "token id 1099511627776 at place 1"),
        ([2**63], "token id 9223372036854775808"),
        ([1.0], "token ids are float64, wanted integers"),
        (torch.ones(3, dtype=torch.bfloat16), "token ids are torch.bfloat16, wanted integers"),
        ([True], "token ids are bool, wanted integers"),
        ("text", "wanted integers"),
        (torch.zeros(1, 4, dtype=torch.int64), r"shape \[1, 4\], wanted one row"),
        (iter([3, 4]), r"shape \[\], wanted one row"),
    ],
)
def test_what_is_no_id_is_refused_as_a_whole(model: AtlasForCausalLM, ids, message: str) -> None:
    stream = opened(model)
    before = stream.reading
    with pytest.raises(ValueError, match=message):
        stream.absorb(ids)
    assert stream.reading is before


def test_pieces_before_a_bad_one_stay(model: AtlasForCausalLM) -> None:
    stream = Stream(model, stride=STRIDE)
    with pytest.raises(ValueError, match="place 1 of this piece, 61 of the stream"):
        stream.absorb(iter([draw_ids()[:60], [1, 999], [2]]))
    assert_same(stream, opened(model, draw_ids()[:60]))


def test_progress_is_told(model: AtlasForCausalLM) -> None:
    told: list[int] = []
    ids = draw_ids()
    Stream(model, stride=STRIDE).absorb(iter([ids[:50], ids[50:]]), told.append)
    assert told == [48, 50, 96, 144, 170]


def test_an_interrupted_stream_is_whole(model: AtlasForCausalLM) -> None:
    calls = 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:  # in the middle of the third stride
            raise KeyboardInterrupt

    stream, ids = Stream(model, stride=STRIDE), draw_ids()
    hooks = [layer.register_forward_pre_hook(interrupt) for layer in model.model.layers]
    with pytest.raises(KeyboardInterrupt):
        stream.absorb(ids)
    for hook in hooks:
        hook.remove()
    assert stream.tokens == 3 * STRIDE  # the third is at hand, but not yet read
    assert_same(stream, opened(model, ids[: 3 * STRIDE]))
    stream.absorb(ids[stream.tokens :])
    assert_same(stream, opened(model, ids))


def test_the_state_is_packed_and_without_gradients() -> None:
    """A view would keep the activations of its stride alive."""
    model = model_of("atlas", "mag")
    for parameter in model.parameters():
        assert parameter.requires_grad
    for name, leaf in opened(model).reading.state.leaves().items():
        assert leaf.untyped_storage().nbytes() == leaf.nbytes, name
        assert leaf.is_contiguous() and not leaf.requires_grad and not leaf.is_inference(), name


def test_training_mode_changes_nothing_and_stays() -> None:
    model = model_of("titans", "mag")
    wanted = opened(model)
    answer = wanted.ask([1], 4)
    model.train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    modes: set[bool] = set()
    model.model.layers[0].register_forward_pre_hook(lambda layer, _: modes.add(layer.training))
    stream = opened(model)
    assert_same(stream, wanted)
    assert stream.ask([1], 4) == answer
    assert modes == {False}
    assert model.training and not model.model.layers[1].training and model.model.layers[0].training


def test_half_precision_is_respected() -> None:
    model = model_of("titans", "mag").to(torch.bfloat16)
    stream = opened(model)
    tails = [leaf for name, leaf in stream.reading.state.leaves().items() if ".tails." in name]
    assert {leaf.dtype for leaf in tails if leaf.is_floating_point()} == {torch.bfloat16}
    assert stream.logits().dtype == torch.float32
    assert_same(opened(model), stream)


# generating


def greedy(stream: Stream, ids: list[int], tokens: int) -> list[int]:
    """Token by token from logits alone."""
    new: list[int] = []
    for _ in range(tokens):
        new.append(int(stream.logits(ids + new).argmax()))
    return new


@pytest.mark.parametrize("tokens", [1, STRIDE - 1, STRIDE, STRIDE + 1, TOKENS])
def test_generating_is_greedy_and_remembered(model: AtlasForCausalLM, tokens: int) -> None:
    ids = draw_ids()[:tokens]
    for prompt in (None, [7], [9, 8, 7]):
        stream = opened(model, ids)
        wanted = greedy(stream, prompt or [], 12)
        assert stream.ask(prompt, 12) == wanted
        assert stream.generate(prompt, 12) == wanted
        assert_same(stream, opened(model, torch.tensor([*ids.tolist(), *(prompt or []), *wanted])))


def test_a_prompt_may_be_longer_than_a_stride(model: AtlasForCausalLM) -> None:
    """And is read stride by stride, so it needs no more working memory."""
    ids = draw_ids()
    stream = opened(model, ids[:20])
    with tokens_per_call(model) as sizes:
        logits = stream.logits(ids[20:])
    assert sizes == [19, STRIDE, STRIDE, STRIDE, 7]
    assert_close("logits", logits, opened(model, ids).logits(), 1e-4)


def test_the_whole_text_gives_the_same_answer(model: AtlasForCausalLM) -> None:
    """As transformers gives without a stream, also with beams and sampling."""
    ids = draw_ids()
    stream = opened(model, ids)
    for options in (
        dict(),
        dict(num_beams=3),
        dict(num_beams=3, num_return_sequences=2),
        dict(do_sample=True, top_k=20, temperature=0.7),
    ):
        torch.manual_seed(3)
        out = model.generate(ids.unsqueeze(0), max_new_tokens=10, pad_token_id=258, **options)
        torch.manual_seed(3)
        assert stream.ask(max_new_tokens=10, **options) == out[0, TOKENS:].tolist()


def test_the_end_is_remembered_but_not_returned(model: AtlasForCausalLM) -> None:
    stream = opened(model)
    answer = stream.ask([1], 12)
    end = answer[-1]
    kept = answer[: answer.index(end)]
    for options in (dict(eos_token_id=end), dict(eos_token_id=[258, end])):
        other = stream.fork()
        assert other.generate([1], 12, **options) == kept
        assert other.tokens == TOKENS + 1 + len(kept) + 1
        assert_same(other, opened(model, torch.tensor([*draw_ids().tolist(), 1, *kept, end])))


def test_pad_ids_in_a_stream_are_tokens(model: AtlasForCausalLM) -> None:
    """`generate` of transformers would mask them."""
    stream, ids = opened(model), [258, 5, 258]
    assert stream.ask(ids, 6, pad_token_id=258, eos_token_id=257) == greedy(stream, ids, 6)


def test_tokens_can_be_watched_as_they_come(model: AtlasForCausalLM) -> None:
    class Watch:
        seen: list[list[int]] = []  # noqa: RUF012

        def put(self, value: Tensor) -> None:
            self.seen.append(value.reshape(-1).tolist())

        def end(self) -> None:
            self.seen.append([])

    watch = Watch()
    answer = opened(model).ask([3, 4], 5, streamer=watch)
    assert watch.seen[0][-2:] == [3, 4]
    assert watch.seen[1:] == [*([number] for number in answer), []]


def test_prompts_that_cannot_be(model: AtlasForCausalLM) -> None:
    with pytest.raises(ValueError, match="empty prompt: nothing was read"):
        Stream(model).generate()
    with pytest.raises(ValueError, match="empty prompt"):
        Stream(model).logits([])
    with pytest.raises(ValueError, match="token id 300 at place 0"):
        opened(model).ask([300])
    with pytest.raises(ValueError, match="num_return_sequences is 2 with 1 beams"):
        opened(model).ask([1], 3, do_sample=True, num_return_sequences=2)


def test_a_border_is_no_special_place(model: AtlasForCausalLM) -> None:
    """A stream that was reopened exactly on a border can still tell what comes next."""
    on_border = opened(model, draw_ids()[: 2 * STRIDE])
    reopened = Stream(model, reading=on_border.reading)
    assert torch.equal(reopened.logits([5]), on_border.logits([5]))
    with torch.no_grad():
        wanted = model(draw_ids()[None, : 2 * STRIDE]).logits[0, -1]
    torch.testing.assert_close(reopened.logits(), wanted, rtol=1e-4, atol=1e-4)
    assert reopened.ask(max_new_tokens=3) == on_border.ask(max_new_tokens=3)


def test_a_failed_answer_leaves_the_stream(model: AtlasForCausalLM) -> None:
    def stop(*_: object) -> bool:
        raise KeyboardInterrupt

    stream = opened(model)
    with pytest.raises(KeyboardInterrupt):
        stream.generate([1], 5, stopping_criteria=[stop])
    assert_same(stream, opened(model))


# asking, forking, going back


@pytest.mark.parametrize(("preset", "block"), KINDS)
def test_asking_leaves_no_trace(preset: str, block: str) -> None:
    model = model_of(preset, block)
    stream, untouched = opened(model), opened(model)
    first = stream.ask([1, 2, 3], 6)
    stream.ask([9] * 60, 6, num_beams=2)
    assert stream.ask([1, 2, 3], 6) == first
    assert_same(stream, untouched)
    stream.absorb([4, 5])
    untouched.absorb([4, 5])
    assert torch.equal(stream.logits(), untouched.logits())


def test_asking_again_is_cheap(model: AtlasForCausalLM) -> None:
    stream = opened(model)
    with tokens_per_call(model) as sizes:
        for _ in range(2):
            stream.logits([1, 2])
    assert sizes == [TOKENS % STRIDE - 1, 3, 3]


def test_forks_do_not_meet(model: AtlasForCausalLM) -> None:
    stream, ids = opened(model), draw_ids(seed=2)
    other = stream.fork()
    other.absorb(ids)
    assert_same(stream, opened(model))
    assert_same(other, opened(model, torch.cat([draw_ids(), ids])))
    stream.absorb(ids)
    assert_same(stream, other)


@pytest.mark.parametrize(("preset", "block"), KINDS)
def test_rollback_forgets_exactly(preset: str, block: str) -> None:
    model, ids = model_of(preset, block), draw_ids()
    stream = opened(model, ids)
    reach = TOKENS % STRIDE + 2 * STRIDE - 1  # one token must be left to go on from
    for tokens in (0, 1, TOKENS % STRIDE - 1, TOKENS % STRIDE, TOKENS % STRIDE + 1, 74, 75, reach):
        other = stream.fork()
        other.logits()  # what is kept for asking must not survive
        other.rollback(tokens)
        wanted = opened(model, ids[: TOKENS - tokens])
        assert_same(other, wanted)
        assert torch.equal(other.logits([3]), wanted.logits([3]))
        other.absorb(ids[TOKENS - tokens :])
        assert_same(other, stream)


def test_rollback_says_how_far_it_goes(model: AtlasForCausalLM) -> None:
    stream = opened(model)
    for tokens in (123, -1):
        with pytest.raises(
            ValueError, match=f"cannot roll back {tokens} of 170 tokens, wanted 0 to 121"
        ):
            stream.rollback(tokens)
    assert_same(stream, opened(model))
    stream.rollback(100)
    with pytest.raises(ValueError, match="wanted 0 to 21"):
        stream.rollback(22)
    long = Stream(model, stride=STRIDE, history=9)
    long.absorb(draw_ids())
    long.rollback(TOKENS)
    assert_same(long, Stream(model, stride=STRIDE))


def test_snapshots_are_values(model: AtlasForCausalLM) -> None:
    stream, ids = opened(model), draw_ids(seed=2)
    place = stream.snapshot()
    stream.absorb(ids)
    later = stream.snapshot()
    stream.restore(place)
    assert_same(stream, opened(model))
    stream.absorb(ids)
    assert_same(stream, later)
    assert_same(Stream(model, reading=place), place)


def test_readings_that_do_not_fit_are_refused(model: AtlasForCausalLM) -> None:
    reading = opened(model).reading
    with pytest.raises(ValueError, match="stride is 64, but the reading was made in strides of 48"):
        Stream(model, stride=64, reading=reading)
    two = reading.state.rows(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="has 2 rows, wanted one"):
        Stream(model, reading=replace(reading, state=two))
    with pytest.raises(
        ValueError, match="170 tokens in strides of 10 with 26 of them pending, wanted 10"
    ):
        Stream(model, reading=replace(reading, stride=10))
    with pytest.raises(ValueError, match="belongs to another model"):
        Stream(model_of("atlas", "mag"), reading=reading)
    for wrong in (dict(stride=0), dict(history=0)):
        with pytest.raises(ValueError, match="wanted 1 or more"):
            Stream(model, **wrong)


def test_streams_say_once_that_they_grow(model: AtlasForCausalLM, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        Stream(model).absorb([1])
        assert not caplog.records
        stream = Stream(model_of("transformer", "attention"), stride=STRIDE)
        stream.absorb(draw_ids())
        stream.fork().ask([1], 2)
    assert [record.message for record in caplog.records] == [
        "this model has full attention, so its state grows with the stream and memory is not constant"
    ]
    size = stream.bytes
    stream.absorb(draw_ids())
    assert stream.bytes > size


# without end


def test_a_long_stream_costs_what_a_short_one_costs() -> None:
    """100,000 tokens: memory and time per token stay as they are.

    The load of a machine changes while it reads, so the old stream and a new one read in turns.
    """
    if resident_bytes() is None:
        pytest.skip("the system does not tell resident memory")
    old, ids = Stream(model_of("gated_deltanet", "lmm")), draw_ids(10_000)
    size, memory = old.bytes, []
    for _ in range(10):
        old.absorb(ids)
        memory.append(resident_bytes() or 0)
    assert old.tokens == 100_000 and old.bytes == size
    assert abs(memory[-1] - memory[0]) < 0.02 * memory[0]
    new = Stream(old.model)
    ratios = [_seconds(old, ids[:2048]) / _seconds(new, ids[:2048]) for _ in range(15)]
    assert 0.7 < statistics.median(ratios) < 1.3


def _seconds(stream: Stream, ids: Tensor) -> float:
    begin = time.process_time()
    stream.absorb(ids)
    return time.process_time() - begin


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_state_lives_where_the_model_does(model: AtlasForCausalLM) -> None:
    reading, wanted = opened(model).reading, opened(model).logits()
    there = model_of("titans", "mag").cuda()
    stream = Stream(there, reading=reading)
    assert {leaf.device.type for leaf in stream.reading.state.leaves().values()} == {"cuda"}
    assert_close("logits", stream.logits().cpu(), wanted, 1e-3)
    assert_same(opened(there), opened(there))
