"""What goes wrong is stopped, named and leaves the last good checkpoint."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from atlas_lm.train import checkpoint
from atlas_lm.train.compare import Name, compare
from atlas_lm.train.health import Pulse, Stopped, gate_statistics, look_inside
from atlas_lm.train.listener import Listener, Report
from atlas_lm.train.loop import Run
from atlas_lm.train.machine import Machine
from atlas_lm.train.parts import cut_up
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Recipe
from tests.train.builders import Walks, run, small_recipe

ALONE = Machine(device=torch.device("cpu"))


class Saboteur(Listener):
    """Spoils something after some steps."""

    def __init__(self, after: int) -> None:
        self.after, self.run = after, None

    def stepped(self, report: Report) -> None:
        if report.step == self.after:
            self.spoil()

    def spoil(self) -> None: ...


def begin(recipe: Recipe, out: Path, listener: Listener) -> Run:
    made = Run(recipe, Place(out=out, workers=0, save_every=2), ALONE, listener)
    listener.run = made
    return made


@pytest.mark.parametrize("carries", [False, True])
def test_a_number_that_is_not_finite_is_traced_to_layer_and_token(
    carries: bool, tmp_path: Path
) -> None:
    class Poison(Saboteur):
        def spoil(self) -> None:
            def spill(module, inputs, output):
                spoilt = output.clone()
                spoilt[2 % len(output), 9] = float("inf")
                return spoilt

            self.run.module.model.model.layers[1].mlp.register_forward_hook(spill)

    recipe = small_recipe(source=Walks(carries=carries), steps=9)
    made = begin(recipe, tmp_path, Poison(5))
    with pytest.raises(Stopped) as stopped:
        made.go()
    told = str(stopped.value)
    assert "step 6: the loss is nan" in told
    position = read = 0
    for batch in [recipe.source.batch(step, 2, 1) for step in range(6)]:
        read = 0 if batch.fresh is None or batch.fresh[0] else read
        position, read = read + 9, read + (0 if batch.count is None else int(batch.count[0]))
    wanted = f"the output of layer 1 is not finite at token {position} of row 2, where its gates"
    assert wanted in told
    for gate in ("alpha", "eta", "theta"):
        assert f"{gate} " in told
    assert "the weights were not changed, the checkpoint of step 4 is kept" in told
    assert made.checkpoints.steps() == [2, 4]
    assert made.trained.progress.step == 5


def test_a_gradient_that_is_not_finite_names_its_weight(tmp_path: Path) -> None:
    class Poison(Saboteur):
        def spoil(self) -> None:
            weight = self.run.module.model.model.layers[0].mlp.up_proj.weight
            weight.register_hook(lambda gradient: gradient * float("nan"))

    made = begin(small_recipe(), tmp_path, Poison(1))
    with pytest.raises(
        Stopped, match=r"activations are finite, but the gradient of .*up_proj"
    ) as stopped:
        made.go()
    assert "try a lower rate" in str(stopped.value)
    weights = [weight.detach() for weight in made.module.parameters()]
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)


def test_a_loss_that_grows_for_long_has_diverged(tmp_path: Path) -> None:
    pulse = Pulse(1.5, 3)
    assert not any(pulse.diverged(1.0, [1.0, 1.0]) for _ in range(50))
    assert not pulse.diverged(100.0, [1.0, 1.0]), "one outlier is no divergence"
    pulse = Pulse(1.5, 3)
    assert [pulse.diverged(4.0, [1.0, 1.0]) for _ in range(4)] == [False, False, True, True]
    made = begin(small_recipe(steps=30, diverged=0.5, patience=4), tmp_path, Saboteur(0))
    with pytest.raises(Stopped, match=r"has diverged: for 4 steps .* alpha mean 0\.\d+.* is kept"):
        made.go()


def test_gates_are_looked_at_without_changing_anything(tmp_path: Path) -> None:
    recipe = small_recipe()
    made, heard = run(recipe, tmp_path)
    share = cut_up(recipe.source.batch(0, 0, 4), 4, None)
    before = [weight.clone() for weight in made.module.parameters()]
    watch = look_inside(made.module, share.batches[0][0], None, rows=1)
    found = gate_statistics(watch)
    assert (
        found["layer 1 alpha min"] <= found["layer 1 alpha mean"] <= found["layer 1 alpha max"] <= 1
    )
    assert watch.traces[0][0].gates["eta"].shape == (1, 24, 2)
    with torch.no_grad():
        memory = made.module.model.model.layers[0].mixer.memory
        x = made.module.model.model.layers[0].mixer_norm(watch.hidden[0])
        eta = memory.gates(x)["eta"]
    assert found["layer 0 eta mean"] == pytest.approx(eta.mean().item(), rel=1e-5)
    after = list(made.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert made.module.training and heard.reports[0].gates


def test_a_full_disk_stops_with_a_clear_word_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = begin(small_recipe(steps=6), tmp_path, Listener())
    save = checkpoint.dcp.save

    def full(named, checkpoint_id):
        if "step-00000004" in str(checkpoint_id):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(named, checkpoint_id=checkpoint_id)

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with pytest.raises(OSError, match="the disk is full: free some space") as error:
        made.go()
    assert "older checkpoints are untouched" in str(error.value)
    assert made.checkpoints.steps() == [2]
    monkeypatch.undo()
    again, _ = run(small_recipe(steps=6), tmp_path, save_every=2)
    assert again.checkpoints.steps() == [4, 6]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_too_little_room_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"0\.0 GiB are free, 3 checkpoints of .* need"):
        begin(small_recipe(), tmp_path, Listener())


def test_a_half_written_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    made, _ = run(small_recipe(steps=4), tmp_path, save_every=2)
    path = made.checkpoints.path(4)
    (path / checkpoint.PROGRESS).unlink()
    assert made.checkpoints.steps() == [2]
    again, heard = run(small_recipe(steps=4), tmp_path, save_every=2)
    assert [report.step for report in heard.reports] == [3, 4]
    assert again.checkpoints.steps() == [2, 4]


def test_a_run_that_goes_wrong_does_not_stop_the_others(tmp_path: Path) -> None:
    recipes = {
        Name("titans", "", 0): small_recipe(steps=30, diverged=0.1, patience=2),
        Name("deltanet", "", 0): small_recipe("deltanet"),
    }
    assert compare(recipes, Place(out=tmp_path, workers=0), ALONE) is None
    table = (tmp_path / "table.md").read_text()
    assert "| titans | " in table and "— | — | — |" in table
    assert "- titans-0: step 3: the loss is " in table and "has diverged" in table
    assert (tmp_path / "curves.png").is_file()
