"""Several processes learn what one learns, and take over each other's checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.test_restart import records

STEPS = 8


def walks(out: Path, *options: object, processes: int = 1) -> list[float]:
    """Train in so many processes; the losses of all steps that the folder has."""
    words: list[object] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={processes}", "-m", "tests.train.walks", out, *options]
    if processes == 1:
        words = [sys.executable, "-m", "tests.train.walks", out, *options]
    found = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return [float(str(record["loss"])) for record in records(out) if "loss" in record]


@pytest.fixture(scope="module", params=["adamw", "muon"])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[float]]:
    out = tmp_path_factory.mktemp("alone")
    return request.param, walks(out, "--optimizer", request.param)


@pytest.mark.parametrize(
    ("alone", "options"),
    [
        ("adamw", ("--spread", "fsdp")),
        ("muon", ("--spread", "fsdp", "--micro", "1")),
        ("adamw", ("--spread", "ddp", "--micro", "1")),
    ],
    ids=str,
    indirect=["alone"],
)
def test_two_processes_learn_what_one_learns(
    alone: tuple[str, list[float]], options: tuple[str, ...], tmp_path: Path
) -> None:
    """Carried streams, segments with cut gradients, rows that begin anew in one process and not the other."""
    optimizer, wanted = alone
    losses = walks(tmp_path, "--optimizer", optimizer, *options, processes=2)
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("alone", "before", "after"), [("adamw", 2, 1), ("muon", 1, 2)], indirect=["alone"]
)
def test_a_checkpoint_loads_into_another_number_of_processes(
    alone: tuple[str, list[float]], before: int, after: int, tmp_path: Path
) -> None:
    optimizer, wanted = alone
    walks(tmp_path, "--optimizer", optimizer, "--stop", 3, processes=before)
    done = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1]
    assert "step-00000003" <= done < "step-00000008"
    losses = walks(tmp_path, "--optimizer", optimizer, processes=after)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert len(json.loads((tmp_path / "run.json").read_text())["times"]) == 2
