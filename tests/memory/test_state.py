"""A state is one value: it can be flattened, moved, chosen from, saved, and the stream goes on."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from atlas_lm.memory import MemoryState, initial_state, memorize, recall
from tests.builders import (
    HEADS,
    KEY,
    NAMES,
    assert_all_close,
    leaf,
    random_gates,
    random_inputs,
    random_weights,
    small_spec,
    wave,
)

SAVED = ("titans", "atlas", "omeganet", "dot_pairs", "deltanet")
BATCH, TOKENS = 2, 11  # not on a chunk border


def piece(spec, tokens=TOKENS, seed=0, dtype=torch.float32, batch=BATCH):
    """q, k, v and gates of a stretch."""
    inputs = random_inputs(spec, batch, tokens, dtype=dtype, seed=10 + seed)
    return *inputs, random_gates(spec, batch, tokens, dtype=dtype, seed=20 + seed)


def warm(name, *, dtype=torch.float32, form="auto", tokens=TOKENS, seed=0, **spec_changes):
    """A spec, its weights, and the state that a short stream has left behind."""
    spec = small_spec(name, **spec_changes)
    weights = random_weights(spec, dtype=dtype)
    _, state = memorize(spec, weights, None, *piece(spec, tokens, seed, dtype), form=form)
    return spec, weights, state


def assert_same(one: MemoryState, two: MemoryState):
    """Bit for bit, leaf by leaf."""
    assert one.spec == two.spec
    a, b = one.leaves(), two.leaves()
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_flatten_and_unflatten_is_the_identity(name):
    spec, _, state = warm(name)
    tensors, structure = pytree.tree_flatten(state)
    assert len(tensors) == len(state.leaves())
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    again = pytree.tree_unflatten(tensors, structure)
    assert isinstance(again, MemoryState) and again.spec is spec
    assert_same(again, state)


def test_tree_map_changes_every_tensor_and_keeps_the_spec():
    spec, _, state = warm("atlas")
    doubled = pytree.tree_map(lambda tensor: 2 * tensor, state)
    assert doubled.spec is spec
    assert_all_close(doubled.leaves(), {n: 2 * x for n, x in state.leaves().items()}, 0)


@pytest.mark.parametrize("name", NAMES)
def test_leaves_round_trip(name):
    spec, _, state = warm(name)
    assert_same(MemoryState.from_leaves(spec, state.leaves()), state)


@pytest.mark.parametrize("name", NAMES)
def test_leaves_are_what_the_rule_needs(name):
    """Momentum only where there is one, an anchor only in chunks, c - 1 pairs of a window."""
    spec, _, state = warm(name)
    assert bool(state.momentum) == spec.optimizer.has_momentum
    assert bool(state.anchor) == (not spec.online)
    assert {p.shape[2] for p in state.window.values()} == {spec.window.size - 1}
    assert state.position.dtype == torch.int64 and state.position.tolist() == [TOKENS] * BATCH


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x: x | {"weather.sun": x["position"]},
            "tensor 'weather.sun', wanted one of memory",
        ),
        (lambda x: {n: t for n, t in x.items() if n != "momentum.w0"}, "wanted .*; make it with"),
        (lambda x: x | {"memory.w9": x["memory.w0"]}, "wanted .*; make it with initial_state"),
        (lambda x: x | {"memory.w0": x["memory.w0"][..., :1]}, "memory.w0 has shape .*, wanted"),
        (lambda x: x | {"position": x["position"].int()}, "position is torch.int32, wanted int64"),
        (lambda x: {n: t for n, t in x.items() if n != "position"}, "position"),
    ],
)
def test_from_leaves_refuses_what_does_not_fit(change, words):
    spec, _, state = warm("atlas")
    with pytest.raises(ValueError, match=words):
        MemoryState.from_leaves(spec, change(state.leaves()))


@pytest.mark.parametrize("name", ["titans", "atlas", "dot_pairs", "gated_deltanet"])
def test_detach_cuts_gradients_and_nothing_else(name):
    spec = small_spec(name)
    weights = random_weights(spec)
    q, k, v, gates = piece(spec, dtype=torch.float64)
    v = leaf(v)
    _, state = memorize(spec, weights, None, q, k, v, gates)
    cut = state.detach()
    assert_same(cut, state)
    assert not any(x.requires_grad for x in cut.leaves().values())
    y, _ = memorize(spec, weights, state, *piece(spec, seed=1, dtype=torch.float64))
    (through,) = torch.autograd.grad(wave(y), v)
    assert through.abs().max() > 1e-6
    y, _ = memorize(spec, weights, cut, *piece(spec, seed=1, dtype=torch.float64))
    assert not y.requires_grad


def test_clone_shares_no_storage_and_keeps_gradients():
    spec = small_spec("titans")
    weights = {n: leaf(w) for n, w in random_weights(spec).items()}
    state = initial_state(spec, weights, BATCH, dtype=torch.float64)
    copy = state.clone()
    assert_same(copy, state)
    pointers = {x.data_ptr() for x in state.leaves().values() if x.numel()}
    assert not pointers & {x.data_ptr() for x in copy.leaves().values() if x.numel()}
    (grad,) = torch.autograd.grad(copy.memory["w0"].sum(), weights["memory.w0"])
    assert bool((grad == BATCH).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("position", [11, 70_001, 20_000_001, 2**40 + 1])
def test_to_casts_tensors_and_leaves_the_position_alone(dtype, position):
    """No float but fp64 can hold a long stream's position."""
    _, _, state = warm("atlas")
    state = dataclasses.replace(state, position=torch.full((BATCH,), position))
    moved = state.to(dtype)
    assert moved.position.dtype == torch.int64
    assert moved.position.tolist() == [position] * BATCH
    assert {x.dtype for n, x in moved.leaves().items() if n != "position"} == {dtype}
    for name, x in state.memory.items():
        assert torch.equal(moved.memory[name], x.to(dtype))


def test_a_state_cast_to_fp64_continues_there():
    spec, weights, state = warm("atlas")
    wide = {n: w.double() for n, w in weights.items()}
    y, _ = memorize(spec, weights, state, *piece(spec, seed=1))
    q, k, v, gates = piece(spec, seed=1)
    inputs = [x.double() for x in (q, k, v)], {n: g.double() for n, g in gates.items()}
    truth, after = memorize(spec, wide, state.to(torch.float64), *inputs[0], inputs[1])
    assert after.memory["w0"].dtype == torch.float64
    assert_all_close({"y": y.double()}, {"y": truth}, 1e-5)


@pytest.mark.parametrize("form", ["reference", "parallel"])
@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded_the_stream_goes_on_bit_for_bit(name, form, tmp_path):
    spec, weights, state = warm(name, form=form)
    stored = {
        n: x.detach().clone(memory_format=torch.contiguous_format)
        for n, x in state.leaves().items()
    }
    save_file(stored, tmp_path / "state.safetensors")
    loaded = MemoryState.from_leaves(spec, load_file(tmp_path / "state.safetensors"))
    assert {n: x.shape for n, x in loaded.leaves().items()} == {
        n: x.shape for n, x in stored.items()
    }
    next_piece = piece(spec, tokens=9, seed=1)
    y, after = memorize(spec, weights, state, *next_piece, form=form)
    again, after_again = memorize(spec, weights, loaded, *next_piece, form=form)
    assert torch.equal(y, again)
    for leaf_name, tensor in after.leaves().items():
        assert torch.equal(tensor, after_again.leaves()[leaf_name]), leaf_name


@pytest.mark.parametrize("name", SAVED)
def test_forgetting_one_group_at_a_cut_shows(name):
    """Each of the five fields is needed: without it the stream goes on differently."""
    spec, weights, state = warm(name, dtype=torch.float64)
    fresh = initial_state(spec, weights, BATCH, dtype=torch.float64)
    next_piece = piece(spec, seed=1, dtype=torch.float64)
    y, _ = memorize(spec, weights, state, *next_piece, form="reference")
    groups = ["memory", "anchor", "momentum", "window"]
    if spec.keeps_pairs:
        groups.remove("memory")  # without its pairs the state is not well formed
    for group in groups:
        if any(x.numel() for x in getattr(state, group).values()):
            poor = dataclasses.replace(state, **{group: getattr(fresh, group)})
            other, _ = memorize(spec, weights, poor, *next_piece, form="reference")
            assert (other - y).abs().max() > 1e-6, group


@pytest.mark.parametrize("name", NAMES)
def test_where_takes_whole_rows(name):
    spec, weights, one = warm(name, dtype=torch.float64)
    _, _, two = warm(name, dtype=torch.float64, seed=5)
    chosen = one.where(torch.tensor([True, False]), two)
    assert chosen.spec == spec
    for leaf_name, x in chosen.leaves().items():
        assert torch.equal(x[0], one.leaves()[leaf_name][0])
        assert torch.equal(x[1], two.leaves()[leaf_name][1])
    stretch = piece(spec, seed=1, dtype=torch.float64)
    ys = [memorize(spec, weights, s, *stretch)[0] for s in (chosen, one, two)]
    assert_all_close({"0": ys[0][0], "1": ys[0][1]}, {"0": ys[1][0], "1": ys[2][1]}, 1e-12)


@pytest.mark.parametrize("other_tokens", [0, 1, 4])
@pytest.mark.parametrize("name", ["titans", "atlas", "dot_pairs", "softmax_attention"])
def test_where_resets_a_row_to_a_shorter_stream(name, other_tokens):
    """A row that starts anew, or comes from a stream of another length, reads its own past alone."""
    spec, weights, long = warm(name, dtype=torch.float64)
    short = initial_state(spec, weights, BATCH, dtype=torch.float64)
    if other_tokens:
        _, _, short = warm(name, dtype=torch.float64, tokens=other_tokens, seed=5)
    chosen = long.where(torch.tensor([True, False]), short)
    assert chosen.position.tolist() == [TOKENS, other_tokens]
    q, *rest = piece(spec, seed=1, dtype=torch.float64)
    read = [recall(spec, weights, s, q) for s in (chosen, long, short)]
    written = [memorize(spec, weights, s, q, *rest)[0] for s in (chosen, long, short)]
    for ys in (read, written):
        assert_all_close({"0": ys[0][0], "1": ys[0][1]}, {"0": ys[1][0], "1": ys[2][1]}, 1e-12)


@pytest.mark.parametrize("name", ["titans", "dot_pairs", "softmax_attention"])
def test_recall_reads_what_the_last_token_read_and_writes_nothing(name):
    spec, weights, state = warm(name, dtype=torch.float64)
    before = {n: x.clone() for n, x in state.leaves().items()}
    q, k, v, gates = piece(spec, seed=1, dtype=torch.float64)
    y, after = memorize(spec, weights, state, q, k, v, gates)
    assert_all_close({"y": recall(spec, weights, after, q[:, -1:])}, {"y": y[:, -1:]}, 1e-12)
    assert_all_close(state.leaves(), before, 0)


def test_initial_state_is_the_learned_memory_in_every_row():
    spec = small_spec("atlas")
    weights = random_weights(spec)
    state = initial_state(spec, weights, 3, dtype=torch.float64)
    for name in spec.fast_shapes:
        for group in (state.memory, state.anchor):
            assert torch.equal(group[name], weights[f"memory.{name}"].expand(3, -1, -1, -1))
        assert bool((state.momentum[name] == 0).all())
    assert state.window["k"].shape == (3, HEADS, spec.window.size - 1, KEY)
    assert state.position.tolist() == [0, 0, 0]


@pytest.mark.parametrize("form", ["reference", "parallel"])
def test_a_state_does_not_share_memory_with_the_weights(form):
    """An optimizer that changes the weights in place must not reach into a stream that goes on."""
    spec = small_spec("titans")
    weights = random_weights(spec)
    q, k, v = random_inputs(spec, 1, 3)  # one row, less than a chunk: the anchor is the start
    _, state = memorize(spec, weights, None, q, k, v, random_gates(spec, 1, 3), form=form)
    before = state.clone()
    for weight in weights.values():
        weight.zero_()
    for name, tensor in state.leaves().items():
        assert torch.equal(tensor, before.leaves()[name]), name


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["titans", "deltanet", "dot_pairs"])
def test_an_initial_state_can_be_saved_as_it_is(name, batch, tmp_path):
    spec = small_spec(name)
    state = initial_state(spec, random_weights(spec), batch, dtype=torch.float64)
    save_file(state.leaves(), tmp_path / "state.safetensors")
    again = MemoryState.from_leaves(spec, load_file(tmp_path / "state.safetensors"))
    for leaf_name, tensor in again.leaves().items():
        assert torch.equal(tensor, state.leaves()[leaf_name])
