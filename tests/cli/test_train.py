"""`atlas train` and `atlas compare` as a user meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atlas_lm.models import AtlasForCausalLM
from tests.cli.builders import atlas

QUICK = ("steps=4", "tokens=64", "pairs=2,4", "width=32")


def test_a_run_from_recipe_to_model(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = atlas("train", "mqar", "preset=gated_deltanet", *QUICK, "--out", out, "--workers", 0)
    assert result.exit_code == 0, result.output
    assert (
        "4 steps, 256 tokens" in result.stdout and "of the time waiting for data" in result.stdout
    )
    assert {path.name for path in out.iterdir()} == {
        "run.json",
        "records.jsonl",
        "checkpoints",
        "tensorboard",
        "model",
        "run.png",
    }
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert "layer 0 alpha mean" in steps[0]["gates"]
    header = json.loads((out / "run.json").read_text())
    assert header["what"]["arguments"]["steps"] == 4
    assert header["what"]["dtype"] == "torch.float32"
    model = AtlasForCausalLM.from_pretrained(out / "model")
    assert model.config.vocab_size == 256
    assert any((out / "tensorboard").iterdir())
    again = atlas("train", "mqar", "preset=gated_deltanet", *QUICK, "--out", out, "--workers", 0)
    assert again.exit_code == 0 and "goes on after step 4" in again.stderr
    other = atlas("train", "mqar", "preset=titans", *QUICK, "--out", out, "--workers", 0)
    assert other.exit_code == 2 and "holds the results of another run" in other.stderr


def test_a_dry_run_costs_nothing_and_begins_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = atlas("train", "mqar", *QUICK, "--dry-run", "--out", out)
    assert result.exit_code == 0, result.output
    for told in (
        "recipe      mqar(",
        "parameters  ",
        "tokens      256",
        " FLOP",
        "MiB for weights",
        "about ",
    ):
        assert told in result.stdout, told
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["train", "mqr"], "recipe is 'mqr', wanted one of lm,"),
        (["train", "mqar", "steps=x"], "steps is 'x', wanted int"),
        (["train", "mqar", "preset=titan"], "preset is 'titan', wanted one of transformer"),
        (["train", "mqar", "width=18"], "wanted 32 or more and a multiple of 4"),
        (["train", "mqar", "--dtype", "int8"], "dtype is 'int8', wanted one of float32, bfloat16"),
        (["train", "mqar", "--spread", "fsdp"], "fsdp needs processes"),
        (["train", "mqar", "--device", "cuda"], "no CUDA device"),
        (["train", "lm", "tokenizer=gpt3"], "tokenizer is 'gpt3'"),
        (["train", "lm", "corpora=books/trian", "tokenizer=bytes"], "books/train"),
        (["compare", "mqar", "preset=titans"], "preset=… is said by --presets here"),
        (["compare", "mqar", "--presets", "titans,atlantis"], "preset is 'atlantis'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_one_line_before_the_first_step(
    arguments: list[str], wanted: str, tmp_path: Path
) -> None:
    result = atlas(*arguments, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert wanted in " ".join(result.stderr.split()), result.stderr
    assert not (tmp_path / "run" / "records.jsonl").exists()


def test_recipes_are_listed() -> None:
    result = atlas("train", "list")
    assert (
        result.exit_code == 0 and "babilong: " in result.stdout and "preset=titans" in result.stdout
    )


def test_several_models_under_one_recipe(tmp_path: Path) -> None:
    words = [
        "compare",
        "mad",
        "steps=3",
        "tokens=256",
        "exam_rows=4",
        "--presets",
        "deltanet",
    ]
    words += ["--seeds", 2, "--out", tmp_path, "--workers", 0]
    result = atlas(*words, "--keep", 1)
    assert result.exit_code == 0, result.output
    table = (tmp_path / "table.md").read_text()
    assert "median of 2 runs (least–most)" in table
    head = next(line for line in table.splitlines() if line.startswith("| model"))
    assert head.count("|") == 11 and "compression" in head and "average" in head
    [line] = [x for x in table.split("## nats")[0].splitlines() if x.startswith("| deltanet")]
    runs = [
        json.loads(
            (tmp_path / f"deltanet-memorization-{seed}" / "records.jsonl")
            .read_text()
            .splitlines()[-1]
        )
        for seed in (0, 1)
    ]
    right = sorted(100 * one["exams"]["memorization"]["right"] for one in runs)
    assert f"{sum(right) / 2:.3f} ({right[0]:.3f}–{right[1]:.3f})" in line
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"curves-{task}.png"
        for task in (
            "compression",
            "memorization",
            "in-context-recall",
            "noisy-in-context-recall",
            "fuzzy-in-context-recall",
            "selective-copying",
        )
    }
    before = (tmp_path / "deltanet-compression-0" / "records.jsonl").read_text()
    assert atlas(*words).exit_code == 0
    assert (tmp_path / "deltanet-compression-0" / "records.jsonl").read_text() == before


def test_processes_are_started_by_the_command_itself(tmp_path: Path) -> None:
    words = ["train", "mqar", "preset=deltanet", *QUICK, "--workers", "0"]
    alone = atlas(*words, "--out", tmp_path / "one")
    assert alone.exit_code == 0, alone.output
    both = subprocess.run(
        [
            sys.executable,
            "-m",
            "atlas_lm.cli.main",
            *words,
            "--out",
            tmp_path / "two",
            "--processes",
            "2",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert both.returncode == 0, both.stderr[-2000:]
    assert both.stdout.count("4 steps, 256 tokens") == 1

    def losses(name: str) -> list[float]:
        lines = (tmp_path / name / "records.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
