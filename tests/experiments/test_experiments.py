"""The quick demo end to end, and the claims that its experiments make."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from atlas_lm.experiments import cue, run_experiments
from atlas_lm.experiments.capacity import MEMORIES
from atlas_lm.experiments.pairs import recalled, relative_error

PICTURES = ("capacity", "window", "newton_schulz", "cue")
PNG = b"\x89PNG\r\n\x1a\n"
Demo = tuple[Path, dict[str, Any], str]  # the folder, the numbers and the terminal of one run


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out = tmp_path_factory.mktemp("demo") / "not" / "there" / "yet"
    terminal = io.StringIO()
    run_experiments(out, quick=True, console=Console(file=terminal, width=100))
    return out, json.loads((out / "results.json").read_text()), terminal.getvalue()


def test_every_picture_is_a_png(demo: Demo) -> None:
    from matplotlib.image import imread

    out, _, _ = demo
    for name in PICTURES:
        path = out / f"{name}.png"
        assert path.read_bytes().startswith(PNG)
        image = imread(path)
        assert (
            min(image.shape[:2]) > 500 and image.std() > 0.05
        )  # of a readable size, and not blank
    assert {path.name for path in out.iterdir()} == {
        *(f"{n}.png" for n in PICTURES),
        "results.json",
    }


def test_the_terminal_says_what_was_found(demo: Demo) -> None:
    _, results, terminal = demo
    words = " ".join(terminal.split())
    for name in PICTURES:
        assert results[name]["finding"] in words
        assert f"{name}.png" in words


def test_memories_have_equal_size(demo: Demo) -> None:
    curves = demo[1]["capacity"]["curves"]
    sizes = [curve["floats"] for curve in curves]
    assert len(sizes) == MEMORIES
    assert max(sizes) <= 1.05 * min(sizes)


def test_polynomial_features_hold_more_pairs_than_the_matrix(demo: Demo) -> None:
    record = demo[1]["capacity"]
    at = record["settings"]["counts"].index(64)
    matrix, squares = record["curves"][0], record["curves"][1]
    assert (matrix["name"], squares["name"]) == ("matrix", "polynomial p=2")
    assert squares["recall"][at] > 0.9
    assert matrix["recall"][at] < 0.5  # 64 pairs, 14 dimensions
    # no matrix can do better than least squares, whose error at n > K is sqrt(1 - K/n) on average
    assert matrix["error"][at] > 0.95 * (1 - record["settings"]["key_dim"] / 64) ** 0.5


def test_a_wide_window_remembers_more_of_the_recent_pairs(demo: Demo) -> None:
    record = demo[1]["window"]
    one, wide = record["tuned"][0], record["tuned"][-1]
    assert (one["window"], wide["window"]) == (1, 16)
    assert wide["recent"] > one["recent"] + 0.1
    newest = [row["newest"] for row in record["equal"]]
    assert newest[0] == 1.0  # step 1 on a unit key stores the newest value exactly
    assert newest[-1] < 0.5  # a sixteenth of a step does not


def test_newton_schulz_is_a_dial(demo: Demo) -> None:
    courses = {
        course["schedule"]: course["error"] for course in demo[1]["newton_schulz"]["courses"]
    }
    starts = {errors[0] for errors in courses.values()}
    assert len(starts) == 1  # k = 0 is the same descent, whatever the schedule
    express = courses["polar_express"]
    assert all(after <= before + 0.02 for before, after in itertools.pairwise(express))
    assert express[-1] < 0.4 * express[0]
    assert express[2] < courses["cubic"][2]  # it converges sooner


def test_the_window_solves_the_cue_task_and_window_1_does_not(demo: Demo) -> None:
    record = demo[1]["cue"]
    one, wide = record["curves"][0], record["curves"][-1]
    assert (one["window"], wide["window"]) == (1, 9)
    assert min(wide["recall"]) >= 0.99
    assert one["recall"][0] == 1.0  # as many pairs as keys: nothing to choose
    assert one["recall"][-1] < record["bound"][-1] + 0.06 < 0.2


def test_window_1_ends_in_the_same_state_whatever_the_cues() -> None:
    settings, generator = cue.QUICK, torch.Generator().manual_seed(3)
    stream = cue.draw_stream(settings, 4, generator)
    tokens = stream.is_cue().shape
    other = torch.rand(stream.cued.shape, generator=generator) < 0.3
    elsewhere = cue.CueStream(pairs=stream.pairs, cued=other, block=stream.block)

    def after(which: cue.CueStream, cue_step: torch.Tensor) -> torch.Tensor:
        return cue.write_each_token(settings, which, 0.5, cue_step).memory["w0"]

    quiet = after(stream, torch.zeros(tokens))
    loud = after(elsewhere, 5 * torch.rand(tokens, generator=generator))
    assert torch.equal(quiet, loud)
    kept = cue.write_at_cues(settings, stream, 9).memory["w0"]
    assert not torch.allclose(kept, cue.write_at_cues(settings, elsewhere, 9).memory["w0"])


def test_the_window_writes_the_cued_pairs_and_nothing_else() -> None:
    settings = cue.QUICK
    stream = cue.draw_stream(settings, 4, torch.Generator().manual_seed(4))
    assert stream.cued.sum(-1).eq(settings.key_dim).all()
    pairs, kept = stream.pairs, stream.cued.unsqueeze(-1)
    wanted = (pairs.values * kept).mT @ pairs.keys  # sum of v k^T over the cued pairs
    torch.testing.assert_close(
        cue.write_at_cues(settings, stream, 9).memory["w0"].squeeze(1), wanted, atol=1e-5, rtol=0
    )


def test_the_same_seed_gives_the_same_numbers() -> None:
    settings = cue.CueSettings(repeats=(2,), windows=(1, 3), tuning_draws=2, draws=4)
    assert cue.measure_cue(settings, seed=1) == cue.measure_cue(settings, seed=1)
    assert cue.measure_cue(settings, seed=1) != cue.measure_cue(settings, seed=2)


def test_scores_by_hand() -> None:
    values = torch.eye(3)
    reads = torch.tensor([[0.6, 0.1, 0.0], [0.9, 0.2, 0.0], [float("nan"), 0.0, 1.0]])
    assert recalled(reads, values).tolist() == [1.0, 0.0, 0.0]
    assert relative_error(values / 2, values).item() == pytest.approx(0.5)
    assert relative_error(reads, values).item() == float("inf")
