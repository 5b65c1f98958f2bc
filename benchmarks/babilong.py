"""The table and the curve of docs/results.md, from folders of `atlas eval babilong`:
`python benchmarks/babilong.py reader=docs/runs/reader/eval gated_deltanet=docs/runs/gated_deltanet/eval`.

A name may have several folders, e.g. one for each machine: their records are joined; a sample that two of
them hold counts once, and must have the same score in both.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from atlas_lm.data.babilong import parse_length
from atlas_lm.evaluate.task import AVERAGE, Row, averages, share_rows
from atlas_lm.runs.look import COLOURS, DASHES, MARKERS, plain

# fine-tuned models, off arXiv 2501.00663, 2505.23735 and 2407.04841: tokens -> share
PUBLISHED = {
    "Titans (MAC), published": {4_000: 0.99, 1_000_000: 0.94, 10_000_000: 0.69},
    "Atlas, published: above": {10_000_000: 0.80},
    "ARMT, published, qa1 alone": {50_000_000: 0.799},
}
SHORTEST = 500  # where 0k stands on the logarithmic axis


def read_records(folders: Sequence[Path]) -> list[dict]:
    """The records of several runs, each sample once."""
    found: dict[str, dict] = {}
    for folder in folders:
        for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            known = found.setdefault(record["id"], record)
            if known["score"] != record["score"]:
                raise ValueError(
                    f"{record['id']} has score {known['score']} in one folder and {record['score']} in "
                    f"{folder}; give folders of one model"
                )
    return list(found.values())


def cells(records: Sequence[dict]) -> dict[tuple[str, str], Row]:
    """By question and length; the average over questions where none is missing."""
    rows = share_rows("babilong", records)
    return {
        (row.cell["question"], row.cell["length"]): row
        for row in [*rows, *averages(rows, "question")]
    }


def lengths_of(tables: Iterable[dict[tuple[str, str], Row]]) -> list[str]:
    return sorted({length for table in tables for _, length in table}, key=parse_length)


def markdown(tables: dict[str, dict[tuple[str, str], Row]]) -> str:
    """A line for each model and question; percent, interval and samples."""
    lengths = lengths_of(tables.values())
    lines = [f"| model | task | {' | '.join(lengths)} |", "|---|---" + "|---" * len(lengths) + "|"]
    for name, table in tables.items():
        for question in sorted(
            {question for question, _ in table}, key=lambda q: (q == AVERAGE, q)
        ):
            shown = [_shown(table.get((question, length))) for length in lengths]
            lines.append(f"| {name} | {question} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(row: Row | None) -> str:
    if row is None:
        return ""
    assert row.low is not None and row.high is not None
    return f"{100 * row.value:.1f} ({100 * row.low:.0f}–{100 * row.high:.0f}; {row.count})"


def draw(tables: dict[str, dict[tuple[str, str], Row]], path: Path) -> None:
    """Averages against length, with their intervals, and the published points."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, table) in enumerate(tables.items()):
        rows = [table[AVERAGE, n] for n in lengths_of([table]) if (AVERAGE, n) in table]
        places = [max(parse_length(row.cell["length"]), SHORTEST) for row in rows]
        axes.plot(
            places, [row.value for row in rows], color=COLOURS[i], marker=MARKERS[i], label=name
        )
        low, high = [row.low or 0.0 for row in rows], [row.high or 0.0 for row in rows]
        axes.fill_between(places, low, high, color=COLOURS[i], alpha=0.12, linewidth=0)
    for i, (name, points) in enumerate(PUBLISHED.items()):
        style = {"color": "#666666", "marker": MARKERS[-1 - i], "linestyle": DASHES[1 + i % 2]}
        axes.plot(list(points), list(points.values()), label=name, **style)
    ticks = sorted({*lengths_of(tables.values()), "1M", "10M"}, key=parse_length)
    axes.set_xscale("log")
    axes.set_xticks([max(parse_length(tick), SHORTEST) for tick in ticks], labels=ticks)
    axes.minorticks_off()
    axes.set_xlabel("length of the text, GPT-2 tokens")
    axes.set_ylabel("right answers, mean of qa1 to qa5")
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(frameon=False, loc="lower left")
    plain(axes)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="name=folder, or name=folder,folder")
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/babilong.png"))
    options = parser.parse_args()
    tables = {}
    for run in options.runs:
        name, _, folders = run.partition("=")
        tables[name] = cells(read_records([Path(folder) for folder in folders.split(",")]))
    print(markdown(tables))
    draw(tables, options.picture)


if __name__ == "__main__":
    main()
