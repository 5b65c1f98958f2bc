"""Run laws on subjects, and say what was found: a table, or records for a script."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atlas_lm.doctor.laws import LAWS, Finding, Law
from atlas_lm.doctor.rule_laws import RULE_LAWS
from atlas_lm.doctor.subjects import RuleSubject, Subject

LEGEND = (
    "one_token: the influence of the first token, which must not vanish; "
    "gradients: tensors without one; finite: numbers that are not"
)


@dataclass(frozen=True)
class Verdict:
    subject: str
    law: str
    status: str  # holds, broken, not applicable, error
    figure: float | None
    limit: float | None
    note: str


def laws_for(subject: Subject) -> dict[str, Law]:
    return LAWS | RULE_LAWS if isinstance(subject, RuleSubject) else LAWS


def judge(subject: Subject, name: str) -> Verdict:
    """Hold one subject to one law. A law that cannot run to its end is broken, and the error is shown."""
    torch.manual_seed(0)
    try:
        finding = laws_for(subject)[name](subject)
    except Exception as error:
        return Verdict(subject.name, name, "error", None, None, f"{type(error).__name__}: {error}")
    if not isinstance(finding, Finding):
        return Verdict(subject.name, name, "not applicable", None, None, finding.reason)
    status = "holds" if finding.holds else "broken"
    return Verdict(subject.name, name, status, finding.figure, finding.limit, finding.note)


def examine(subjects: Iterable[Subject]) -> Iterator[Verdict]:
    """Hold every subject to every law that applies to its kind, one verdict after the other."""
    for subject in subjects:
        for name in laws_for(subject):
            yield judge(subject, name)


def passed(verdicts: Iterable[Verdict]) -> bool:
    return all(verdict.status in ("holds", "not applicable") for verdict in verdicts)


def as_records(verdicts: Iterable[Verdict]) -> list[dict[str, object]]:
    """For JSON, which has no infinity: a figure that is not finite becomes None, the status stays."""
    records = [asdict(verdict) for verdict in verdicts]
    return [r | ({} if math.isfinite(r["figure"] or 0) else {"figure": None}) for r in records]


def as_table(verdicts: list[Verdict], width: int = 160) -> RenderableType:
    """Law x subject with the measured figure in each cell, remarks below.

    Laws go down for a few subjects; for many they go across, in as many tables as the width asks for.
    """
    laws = list(dict.fromkeys(verdict.law for verdict in verdicts))
    subjects = list(dict.fromkeys(verdict.subject for verdict in verdicts))
    cells = {(v.subject, v.law): _cell(v) for v in verdicts}
    if len(subjects) <= 3:
        tables = [_grid("law", laws, subjects, lambda law, subject: cells.get((subject, law)))]
    else:
        room = width - max(map(len, subjects)) - 4
        tables = [
            _grid("subject", subjects, some, lambda subject, law: cells.get((subject, law)))
            for some in _lines(laws, room)
        ]
    tables[0].title = "laws of a causal memory: largest relative error, 0 is exact"
    return Group(*tables, Text(LEGEND, style="dim"), *_remarks(verdicts))


def _grid(
    corner: str, down: list[str], across: list[str], cell: Callable[[str, str], Text | None]
) -> Table:
    table = Table()
    table.add_column(corner, no_wrap=True)
    for name in across:
        table.add_column(name, justify="right", no_wrap=True)
    for row in down:
        table.add_row(row, *(cell(row, column) or Text("") for column in across))
    return table


def _lines(laws: list[str], room: int) -> list[list[str]]:
    """Laws broken into groups whose columns fit into the room."""
    lines: list[list[str]] = [[]]
    for law in laws:
        if lines[-1] and sum(max(len(name), 5) + 3 for name in [*lines[-1], law]) > room:
            lines.append([])
        lines[-1].append(law)
    return lines


def _cell(verdict: Verdict) -> Text:
    if verdict.status == "not applicable":
        return Text("n/a", style="dim")
    if verdict.status == "error":
        return Text("error", style="bold red")
    figure = verdict.figure
    assert figure is not None
    text = f"{figure:g}" if math.isinf(figure) or figure == int(figure) else f"{figure:.0e}"
    return Text(text, style="green" if verdict.status == "holds" else "bold red")


def _remarks(verdicts: list[Verdict]) -> list[Text]:
    """Every broken law with its note, and every law that was not applied with its reason."""
    lines = [
        Text(
            f"broken: {v.subject}, {v.law}: {v.note or f'{v.figure:.1e} > {v.limit:.0e}'}",
            style="red",
        )
        for v in verdicts
        if v.status in ("broken", "error")
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for v in verdicts:
        if v.status == "not applicable":
            reasons.setdefault((v.law, v.note), []).append(v.subject)
    for (law, reason), subjects in reasons.items():
        lines.append(Text(f"n/a: {law} for {', '.join(subjects)}: {reason}", style="dim"))
    held = sum(v.status == "holds" for v in verdicts)
    broken = len([v for v in verdicts if v.status in ("broken", "error")])
    lines.append(
        Text(f"{held} hold, {broken} broken, {len(verdicts) - held - broken} not applicable")
    )
    return lines
