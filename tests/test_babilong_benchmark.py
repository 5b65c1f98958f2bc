"""The table and the curve of docs/results.md: joined runs, averages, conflicts."""

import json
from pathlib import Path

import pytest

from benchmarks import babilong

RUNS = Path(__file__).parent.parent / "docs" / "runs"


def write(folder: Path, scores: dict[tuple[str, str], list[float]]) -> Path:
    folder.mkdir()
    lines = [
        json.dumps(
            {
                "id": f"babilong/{task}/{length}/{n}",
                "cell": {"question": task, "length": length},
                "score": score,
            }
        )
        for (task, length), found in scores.items()
        for n, score in enumerate(found)
    ]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_runs_are_joined_and_averaged(tmp_path: Path) -> None:
    short = write(tmp_path / "short", {("qa1", "0k"): [1, 1, 0, 1], ("qa2", "0k"): [1, 0]})
    long = write(tmp_path / "long", {("qa1", "1M"): [1], ("qa1", "0k"): [1]})
    table = babilong.cells(babilong.read_records([short, long]))
    assert {cell: (row.value, row.count) for cell, row in table.items()} == {
        ("qa1", "0k"): (0.75, 4),
        ("qa2", "0k"): (0.5, 2),
        ("average", "0k"): (0.625, 6),
        ("qa1", "1M"): (1.0, 1),
    }
    lines = babilong.markdown({"mine": table}).splitlines()
    assert lines[0] == "| model | task | 0k | 1M |"
    assert lines[2] == "| mine | qa1 | 75.0 (30–95; 4) | 100.0 (21–100; 1) |"
    assert lines[-1].startswith("| mine | average | 62.5 (") and lines[-1].endswith("; 6) |  |")
    babilong.draw({"mine": table}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_folders_of_two_models_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {("qa1", "0k"): [1]})
    other = write(tmp_path / "other", {("qa1", "0k"): [0]})
    with pytest.raises(ValueError, match=r"babilong/qa1/0k/0 has score 1 in one folder and 0 in"):
        babilong.read_records([one, other])


def test_the_tables_of_the_docs_are_what_the_logs_say() -> None:
    tables = {
        name: babilong.cells(babilong.read_records([RUNS / name / "eval"]))
        for name in ("keeper", "gated_deltanet")
    }
    results = (RUNS.parent / "results.md").read_text(encoding="utf-8")
    card = RUNS.parents[1] / "atlas_lm" / "pretrained" / "babilong" / "README.md"
    assert babilong.markdown(tables) in results
    assert babilong.markdown({"keeper": tables["keeper"]}) in card.read_text(encoding="utf-8")
