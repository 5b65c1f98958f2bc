"""A run that was killed and gone on with is, bit for bit, one that never was."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

STEPS = 12


def start(out: Path, *options: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.train.walks", out, "--steps", STEPS, *options]
    return subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)


def records(out: Path) -> list[dict[str, object]]:
    """All that a run wrote of its steps and exams, but for how long they took."""
    lines = (out / "records.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def assert_same_run(one: Path, two: Path) -> None:
    assert records(one) == records(two)
    assert [r["step"] for r in records(one) if "loss" in r] == list(range(1, STEPS + 1))
    mine, theirs = (load_file(out / "model" / "model.safetensors") for out in (one, two))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    with start(out) as process:
        assert process.wait() == 0
    return out


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_any_step(never_killed: Path, tmp_path: Path, seed: int) -> None:
    """kill -9 after a random step, twice, then to the end: weights, optimizers and streams as they were."""
    for last in sorted(random.Random(seed).sample(range(1, STEPS), 2)):
        with start(tmp_path) as process:
            for line in process.stdout or ():
                if json.loads(line)[0] >= last:
                    process.kill()
                    break
            assert process.wait() == -signal.SIGKILL
    with start(tmp_path) as process:
        assert process.wait() == 0
    assert_same_run(tmp_path, never_killed)
    times = json.loads((tmp_path / "run.json").read_text())["times"]
    assert len(times) == 3


def test_asked_to_stop_it_saves_and_goes_on(never_killed: Path, tmp_path: Path) -> None:
    with start(tmp_path, "--stop", 5) as process:
        assert process.wait() == 0
    # the signal came while step 5 was told, so step 6 heard it
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000006"
    assert not (tmp_path / "model").exists()
    with start(tmp_path) as process:
        assert process.wait() == 0
    assert_same_run(tmp_path, never_killed)


def test_a_finished_run_is_not_run_again(never_killed: Path) -> None:
    before = records(never_killed)
    with start(never_killed) as process:
        assert process.stdout is not None and process.stdout.read() == ""
        assert process.wait() == 0
    assert records(never_killed) == before


def test_the_folder_of_another_run_is_refused(never_killed: Path) -> None:
    words = [sys.executable, "-m", "tests.train.walks", str(never_killed), "--steps", "13"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "holds the results of another run" in found.stderr
    assert "steps was 12 and is 13" in found.stderr
