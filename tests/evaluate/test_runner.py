"""Runs: fixed batches, nothing done twice, nothing lost when they are killed, refusals told."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atlas_lm.evaluate.intervals import wilson
from atlas_lm.evaluate.reader import Abilities, Reader, TooLong
from atlas_lm.evaluate.report import markdown, tables
from atlas_lm.evaluate.results import evaluate
from atlas_lm.evaluate.runner import Outcome, Pace, Refusal, run
from atlas_lm.evaluate.task import Record, Row, Sample, averages, share_rows
from atlas_lm.runs import about
from atlas_lm.runs.journal import RECORDS, Journal
from tests.evaluate.builders import reader


class Counting:
    """A task that only counts; its scores tell which samples stood side by side."""

    name = "counting"
    axis = "length"

    def __init__(self, die_at: int | None = None, too_long: str | None = None) -> None:
        self.die_at, self.too_long = die_at, too_long  # a batch; the beginning of a sample's id
        self.batches: list[list[str]] = []

    @property
    def settings(self) -> dict[str, Any]:
        return {"of": "counting"}

    def samples(self) -> list[Sample]:
        return [
            Sample(id=f"counting/{length}/{i}", cell={"length": length}, index=i, tokens=10)
            for length in ("1k", "2k")
            for i in range(5)
        ]

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Any) -> list[Record]:
        if self.too_long and any(s.id.startswith(self.too_long) for s in samples):
            raise TooLong("too long for this model")
        if self.die_at is not None and len(self.batches) == self.die_at:
            raise KeyboardInterrupt
        self.batches.append([sample.id for sample in samples])
        tell(10 * len(samples))
        return [{"score": sample.index % 2, "beside": len(samples)} for sample in samples]

    def rows(self, records: Sequence[Record]) -> list[Row]:
        return share_rows(self.name, records)


def journal(folder: Path, **what: Any) -> Journal:
    return Journal(folder, what, {"time": "now"})


def test_a_run_that_was_stopped_goes_on_and_gives_the_same(tmp_path: Path) -> None:
    whole = run([Counting()], reader("memory"), journal(tmp_path / "a"), 2)
    dying = Counting(die_at=3)
    with pytest.raises(KeyboardInterrupt):
        run([dying], reader("memory"), journal(tmp_path / "b"), 2)
    rest = Counting()
    outcome = run([rest], reader("memory"), journal(tmp_path / "b"), 2)
    assert outcome == whole
    assert [i for batch in dying.batches + rest.batches for i in batch] == [
        sample.id for sample in Counting().samples()
    ]
    assert (tmp_path / "a" / RECORDS).read_bytes() == (tmp_path / "b" / RECORDS).read_bytes()


def test_a_torn_line_is_done_again_in_its_own_batch(tmp_path: Path) -> None:
    run([Counting()], reader("memory"), journal(tmp_path), 3)
    path = tmp_path / RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])  # within the last line
    again = Counting()
    run([again], reader("memory"), journal(tmp_path), 3)
    assert again.batches == [["counting/2k/3", "counting/2k/4"]]
    assert path.read_bytes() == whole


def test_another_run_does_not_mix_with_the_one_in_a_folder(tmp_path: Path) -> None:
    journal(tmp_path, model="a", batch=2)
    journal(tmp_path, model="a", batch=2)
    with pytest.raises(ValueError, match=r"batch was 2 and is 4; model was 'a' and is 'b'; choose"):
        journal(tmp_path, model="b", batch=4)
    nested = {"tasks": {"piqa": {"count": 2, "of": "many"}}}
    journal(tmp_path / "deep", **nested)
    with pytest.raises(ValueError, match="another run: tasks piqa count was 2 and is 3; choose"):
        journal(tmp_path / "deep", tasks={"piqa": {"count": 3, "of": "many"}})
    assert len(json.loads((tmp_path / "run.json").read_text())["times"]) == 2


def test_damaged_files_of_a_run_are_named(tmp_path: Path) -> None:
    run([Counting()], reader("memory"), journal(tmp_path), 2)
    records = tmp_path / RECORDS
    records.write_bytes(b"{}x\n" + records.read_bytes())
    with pytest.raises(ValueError, match=r"line 1 of .*records.jsonl is no record .* remove it"):
        journal(tmp_path)
    (tmp_path / "run.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"run.json is not the header of a run"):
        journal(tmp_path)


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from atlas_lm.runs.journal import Journal; "
        "held = Journal(pathlib.Path(sys.argv[1]), {}, {}); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="another process is at work in"):
            journal(tmp_path)
        other.communicate()
    journal(tmp_path)


def test_models_without_padding_run_one_by_one(tmp_path: Path) -> None:
    alone = reader("memory")
    alone.can = Abilities(padded=False)
    task = Counting()
    run([task], alone, journal(tmp_path), 4)
    assert [len(batch) for batch in task.batches] == [1] * 10


def test_progress_counts_what_is_read_and_what_was_there(tmp_path: Path) -> None:
    told: list[float] = []
    for _ in range(2):
        run([Counting()], reader("memory"), journal(tmp_path), 2, lambda t, s, n: told.append(n))
    assert sum(told) == 2 * 100


def test_progress_reaches_the_end_whatever_the_tokenizer() -> None:
    told: list[float] = []
    pace = Pace(100, 5, told.append)
    for _ in range(4):
        pace.go(200)  # bytes, of 100 tokens
    pace.finish()
    assert told == [40, 40, 20, 0, 0]


@pytest.mark.parametrize("too_long", ["counting/2k/", "counting/2k/4"])
def test_cells_that_a_model_cannot_take_are_refused_and_others_run(
    too_long: str, tmp_path: Path
) -> None:
    """Also when only their last sample does not fit: a part of a cell is no result."""
    outcome = evaluate([Counting(too_long=too_long)], reader("memory"), tmp_path, batch=2)
    assert [row.cell["length"] for row in outcome.rows] == ["1k"]
    assert outcome.refusals == [
        Refusal(task="counting", cell={"length": "2k"}, reason="too long for this model")
    ]
    table = (tmp_path / "table.md").read_text()
    assert "counting (2k): too long for this model" in table


def test_a_folder_of_results_holds_all(tmp_path: Path) -> None:
    outcome = evaluate([Counting()], reader("memory"), tmp_path, batch=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.json",
        "records.jsonl",
        "table.md",
        "counting.png",
    }
    header = json.loads((tmp_path / "run.json").read_text())
    assert header["what"]["fingerprint"] == reader("memory").fingerprint
    assert header["what"]["tasks"] == {"counting": {"of": "counting"}} and header["times"]
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 10
    assert evaluate([Counting()], reader("memory"), tmp_path, batch=2) == outcome


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # by statsmodels' proportion_confint(method="wilson")
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
        (1, 3, 0.0615, 0.7923),
    ],
)
def test_intervals_are_wilsons(right: int, count: int, low: float, high: float) -> None:
    found = wilson(right / count, count)
    assert found == pytest.approx((low, high), abs=2e-4)


def row(value: float, notes: tuple[str, ...] = (), **cell: str) -> Row:
    low, high = wilson(value, 20)
    return Row(
        task="t",
        cell=cell,
        metric="accuracy",
        value=value,
        count=20,
        low=low,
        high=high,
        notes=notes,
    )


def test_two_entries_make_a_grid_and_notes_are_marked() -> None:
    rows = [
        row(1.0, question="qa1", length="1k"),
        row(0.5, question="qa1", length="2k", notes=("3 of 20 truncated",)),
        row(0.0, question="qa2", length="1k"),
    ]
    [table] = tables(rows)
    assert table.header == ["question \\ length", "1k", "2k"]
    assert table.lines == [["qa1", "100.0 (84–100)", "50.0 (30–70)†"], ["qa2", "0.0 (0–16)", ""]]
    assert table.below.endswith("20 samples a cell. † qa1, 2k: 3 of 20 truncated.")


def test_averages_need_all_that_they_are_taken_over() -> None:
    rows = [
        row(1.0, question="qa1", length="1k"),
        row(0.5, question="qa2", length="1k"),
        row(0.5, question="qa1", length="2k"),  # at which qa2 was refused
    ]
    [mean] = averages(rows, over="question")
    assert mean.cell == {"question": "average", "length": "1k"}
    assert mean.value == 0.75 and mean.count == 40
    assert (mean.low, mean.high) == wilson(0.75, 40)
    [table] = tables([*rows, mean])
    assert table.lines[-1] == ["average", "75.0 (60–86)", ""]
    assert table.below.endswith("20 samples a cell.")


def test_a_report_tells_what_was_run() -> None:
    text = markdown(Outcome(rows=[row(0.5)], refusals=[]), {"model": "tiny", "seed": 3})
    assert text.startswith("# tiny\n") and "| accuracy | 50.0 (30–70) | 20 |" in text
    assert "- seed: 3" in text


def test_shares_mark_what_was_cut() -> None:
    records = [
        {"cell": {"length": "1k"}, "score": 1.0, "truncated": 5},
        {"cell": {"length": "1k"}, "score": 0.0, "truncated": 0},
    ]
    [found] = share_rows("t", records)
    assert found.value == 0.5 and found.notes == ("1 of 2 truncated",)


def test_pictures_that_cannot_be_drawn_are_told_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(about, "find_spec", lambda name: None)
    task = Counting()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'atlas-lm\[demo\]'"):
        evaluate([task], reader("memory"), tmp_path, batch=2)
    assert not task.batches
