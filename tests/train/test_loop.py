"""The loop against a plain one, typed out; micro-batches, segments and carried streams against the whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from atlas_lm.data.mad import Compression
from atlas_lm.data.row_source import RowSource
from atlas_lm.models import AtlasCache, AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.train.checkpoint import whole_weights
from atlas_lm.train.feed import Feed
from atlas_lm.train.learner import build_learner
from atlas_lm.train.loop import Run
from atlas_lm.train.machine import join
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Optimizer, Recipe, Schedule
from atlas_lm.train.schedule import share_of_rate
from tests.train.builders import VOCAB, Exam, Walks, run, small_recipe

BLOCKS = [("titans", None), ("atlas", "mag"), ("gated_deltanet", "mal"), ("omeganet", "mac")]


def plain_losses(recipe: Recipe) -> list[float]:
    """A training loop as one would write it for one process, with the model's own labels and cache."""
    torch.manual_seed(recipe.seed)
    model = AtlasForCausalLM(recipe.model).train()
    inside = {id(m.weight) for m in model.model.modules() if isinstance(m, torch.nn.Linear)}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in inside], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) not in inside], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.optimizer.rate, betas=(0.9, 0.95))
    caches: list[AtlasCache] = [AtlasCache() for _ in range(recipe.source.shape(0)[0])]
    losses = []
    for step in range(recipe.steps):
        rate = recipe.optimizer.rate * share_of_rate(recipe.schedule, step, recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = recipe.source.batch(step, 0, len(caches))
        places, total = (batch.labels != -100).sum(), 0.0
        optimizer.zero_grad()
        for row in range(len(caches)):  # row by row: nothing to get wrong
            if batch.fresh is None or batch.fresh[row]:
                caches[row] = AtlasCache()
            size = batch.inputs.shape[1] if batch.count is None else int(batch.count[row])
            ids = torch.from_numpy(batch.inputs[row : row + 1, :size])
            labels = torch.from_numpy(batch.labels[row : row + 1, :size])
            cut = recipe.segment or size
            for begin in range(0, size, cut):
                part = slice(begin, begin + cut)
                out = model(ids[:, part], past_key_values=caches[row], use_cache=True)
                nats = cross_entropy(out.logits[0], labels[0, part], reduction="sum")
                (nats / int(places)).backward()
                total += nats.item()
                caches[row] = out.past_key_values.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total / int(places))
    return losses


@pytest.mark.parametrize(("preset", "block"), BLOCKS, ids=str)
@pytest.mark.parametrize("segment", [None, 7])
@pytest.mark.parametrize("carries", [False, True])
def test_the_loop_is_the_plain_loop(
    preset: str, block: str | None, segment: int | None, carries: bool, tmp_path: Path
) -> None:
    recipe = small_recipe(preset, block, source=Walks(carries=carries), segment=segment, steps=4)
    _, heard = run(recipe, tmp_path, micro=3)
    assert heard.losses == pytest.approx(plain_losses(recipe), rel=1e-5)
    assert heard.losses[-1] != heard.losses[0]


def test_how_a_step_is_cut_up_changes_nothing(tmp_path: Path) -> None:
    recipe = small_recipe(source=Walks(carries=True), segment=12)
    _, wanted = run(recipe, tmp_path / "whole")
    for i, options in enumerate([{"micro": 1}, {"micro": 3, "workers": 1}, {"recompute": True}]):
        _, heard = run(recipe, tmp_path / str(i), **options)
        assert heard.losses == pytest.approx(wanted.losses, rel=1e-5), options
        assert heard.marks[-1]["walks"].nats == pytest.approx(
            wanted.marks[-1]["walks"].nats, rel=1e-5
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo
def test_compiled_blocks_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_block = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **how: compile_block(self, backend="aot_eager", **how),
    )
    recipe = small_recipe("gated_deltanet", steps=3, source=Walks(rows=2, length=8))
    _, wanted = run(recipe, tmp_path / "plain")
    _, heard = run(recipe, tmp_path / "compiled", compiled=True)
    assert heard.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert heard.reports[0].gates.keys() == wanted.reports[0].gates.keys() != set()


def closing_recipe(**changes: Any) -> Recipe:
    model = configure(
        "deltanet", size="tiny", vocab_size=VOCAB, initializer_range=0.1, gate_margin=0.1
    )
    return small_recipe(source=Walks(rows=2, length=24), model=model, **changes)


def test_a_price_of_writing_is_a_part_of_the_gradient(tmp_path: Path) -> None:
    """The first priced step moves as the gradient of loss and price, typed out, says."""
    recipe = closing_recipe(steps=2, segment=12)
    model = AtlasForCausalLM(recipe.model)
    bias = model.train().model.layers[0].mixer.memory.gates.eta_bias
    found = {}
    for price in (0.0, 8.0):
        priced = replace(recipe, price=price)
        with join("cpu") as machine:
            made = Run(priced, Place(out=tmp_path, workers=0), machine)
            inner = made.module.model
            inner.load_state_dict(model.state_dict())
            made.trained.progress = replace(made.trained.progress, step=1)
            share = next(
                iter(Feed(priced.source, machine, range(1, 2), micro=None, segment=12, workers=0))
            )
            made._learn(share, torch.tensor(float(share.labelled)))
            gates = [block.mixer.memory.gates for block in inner.model.layers]
            assert all(gate.priced == bool(price) and gate.opened is None for gate in gates)
            found[price] = inner.model.layers[0].mixer.memory.gates.eta_bias.grad.clone()
    batch = recipe.source.batch(1, 0, 2)
    for layer in model.model.layers:
        layer.mixer.memory.gates.priced = True
    opened, cache = [], AtlasCache()
    for part in torch.from_numpy(batch.inputs).split(12, dim=1):
        model(part, past_key_values=cache, use_cache=True)
        opened += [layer.mixer.memory.gates.opened for layer in model.model.layers]
        cache = cache.detach()
    (wanted,) = torch.autograd.grad(torch.stack(opened).mean(), bias)
    assert wanted.abs().min() > 0
    now = replace(recipe, price=8.0).price_at(1)
    torch.testing.assert_close(found[8.0] - found[0.0], now * wanted, rtol=1e-3, atol=1e-6)


def test_a_price_comes_in_over_the_second_third_and_needs_a_margin() -> None:
    recipe = closing_recipe(steps=12, price=0.4)
    assert [recipe.price_at(step) for step in (0, 4, 6, 8, 11)] == pytest.approx(
        [0, 0, 0.2, 0.4, 0.4]
    )
    with pytest.raises(ValueError, match=r"price is 0.4 and the model's gate_margin 0.0"):
        small_recipe("deltanet", price=0.4)
    for given in ({"price": 0.4}, {"start": "somewhere"}):
        with pytest.raises(ValueError, match="head is 'auto-encoder' with price"):
            closing_recipe(head="auto-encoder", **given)


def test_a_run_begins_with_the_weights_of_another_model(tmp_path: Path) -> None:
    """Of another rule: what both have is taken over, gates that are new begin as usual."""
    torch.manual_seed(7)
    smooth = configure("gated_deltanet", size="tiny", vocab_size=VOCAB, initializer_range=0.3)
    other = AtlasForCausalLM(smooth)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mixer.memory.gates.eta_bias.fill_(0.7)
    other.save_pretrained(tmp_path / "other")
    recipe = closing_recipe(start=str(tmp_path / "other"))
    fresh, begun = (
        build_learner(r).model.state_dict() for r in (replace(recipe, start=None), recipe)
    )
    given = other.state_dict()
    assert any("log_alpha" in name for name in given.keys() - begun.keys())
    for name, weight in begun.items():
        wanted = fresh if name.endswith("eta_bias") else given
        assert torch.equal(weight, wanted[name]), name
    large = configure("deltanet", size="tiny", vocab_size=VOCAB + 1, gate_margin=0.1)
    with pytest.raises(ValueError, match=r"differs in more than its gates, e\.g\. in lm_head"):
        build_learner(replace(recipe, model=large))


def test_products_in_bf16_keep_weights_and_averages_in_fp32(tmp_path: Path) -> None:
    recipe = small_recipe(source=Walks(carries=True), segment=12)
    _, wanted = run(recipe, tmp_path / "fp32")
    made, heard = run(recipe, tmp_path / "bf16", dtype="bfloat16")
    assert heard.losses == pytest.approx(wanted.losses, rel=3e-2)
    assert heard.losses != wanted.losses
    tensors = [*made.module.parameters()]
    tensors += [t for o in made.trained.optimizers for s in o.state.values() for t in s.values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    state = made.trained.carried
    assert state.layers[0].memory.memory["w0"].dtype == torch.float32


def test_exams_are_means_over_all_places_and_by_position(tmp_path: Path) -> None:
    recipe = small_recipe(segment=7)
    made, heard = run(recipe, tmp_path, micro=2)
    assert len(heard.marks) == 2
    exam = Exam()
    batch = exam.batch(0, exam.rows)
    ids, labels = torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
    with torch.no_grad():
        logits = made.module.model.eval()(ids).logits
    nats = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    mark = heard.marks[-1]["walks"]
    assert mark.places == labels.numel()
    assert mark.nats == pytest.approx(nats.mean().item(), rel=1e-5)
    assert mark.right == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    bucket = torch.arange(exam.length) * 16 // exam.length
    wanted = [nats[:, bucket == i].mean().item() for i in range(16)]
    assert mark.by_position == pytest.approx(wanted, rel=1e-5)


def test_a_run_learns_and_its_model_can_be_used(tmp_path: Path) -> None:
    recipe = small_recipe(
        "gated_deltanet",
        steps=60,
        schedule=Schedule(curve="wsd"),
        optimizer=Optimizer(kind="muon", rate=1e-2),
    )
    made, heard = run(recipe, tmp_path)
    assert heard.losses[-1] < 0.6 * heard.losses[0]
    made.export(tmp_path / "model")
    model = AtlasForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in whole_weights(made.module).items():
        assert torch.equal(model.state_dict()[name.removeprefix("model.")], weight), name
    assert model.config.blocks == recipe.model.blocks


def test_the_auto_encoder_is_trained_by_the_same_loop(tmp_path: Path) -> None:
    task = Compression(seq_len=8)
    recipe = Recipe(
        name="compression",
        model=configure("gated_deltanet", size="tiny", vocab_size=task.vocab_size),
        source=RowSource(tasks={"compression": task}, steps=40, tokens=256, exam_rows=16),
        steps=40,
        head="auto-encoder",
        optimizer=Optimizer(rate=1e-2),
        exams=1,
    )
    made, heard = run(recipe, tmp_path)
    assert heard.losses[-1] < heard.losses[0] and 0 <= heard.marks[0]["compression"].right <= 1
    made.export(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_recipes_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"ids up to 28.*only up to 9.*wrong tokenizer"):
        replace(small_recipe(), model=configure("titans", vocab_size=10))
    with pytest.raises(ValueError, match="full attention"):
        small_recipe("transformer", source=Walks(carries=True))
    with pytest.raises(ValueError, match="steps is 0"):
        small_recipe(steps=0)
    with pytest.raises(ValueError, match="segment is 1"):
        small_recipe(segment=1)
    with pytest.raises(ValueError, match="optimizer is 'sgd', wanted one of adamw, muon"):
        Optimizer(kind="sgd")
