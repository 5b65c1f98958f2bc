"""What a run tells while it goes on: lines of JSON, TensorBoard, and whoever else listens."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atlas_lm.runs.about import surroundings, versions
from atlas_lm.runs.journal import Journal, Record
from atlas_lm.train.checkpoint import Progress
from atlas_lm.train.examine import Mark
from atlas_lm.train.listener import Listener, Report

TOGETHER = 20  # steps that are written at once


class Diary(Listener):
    """A line for every step and every exam, in `records.jsonl` of the run's folder.

    What was told after the newest checkpoint is dropped when a run goes on, and told again, so that the file
    is that of a run that was never stopped. A folder that holds another run is refused.
    """

    def __init__(self, folder: Path, what: dict[str, Any]) -> None:
        beside = surroundings() | {"versions": versions()}
        self.journal = Journal(folder, what, beside)
        self._waiting: list[Record] = []

    def resumed(self, progress: Progress) -> None:
        self.journal.cut(lambda record: int(record["step"]) <= progress.step)

    def stepped(self, report: Report) -> None:
        record = asdict(report)
        if not report.gates:
            del record["gates"]
        self._waiting.append({"id": f"step/{report.step}", **record})
        if len(self._waiting) >= TOGETHER:
            self.flush()

    def examined(self, step: int, marks: dict[str, Mark]) -> None:
        told = {name: asdict(mark) for name, mark in marks.items()}
        self._waiting.append({"id": f"exam/{step}", "step": step, "exams": told})
        self.flush()

    def saving(self, step: int) -> None:
        self.flush()

    def closed(self) -> None:
        self.flush()

    def flush(self) -> None:
        self.journal.add(self._waiting)
        self._waiting = []

    @property
    def steps(self) -> list[Record]:
        return [r for name, r in self.journal.records.items() if name.startswith("step/")]

    @property
    def exams(self) -> list[Record]:
        return [r for name, r in self.journal.records.items() if name.startswith("exam/")]


class TensorBoard(Listener):
    """The same as scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    @staticmethod
    def missing() -> str | None:
        """Why there is none."""
        if find_spec("tensorboard") is None:
            return "tensorboard is not installed (pip install 'atlas-lm[train]'): no logs for it"
        return None

    def resumed(self, progress: Progress) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what an earlier start told of later steps is no longer shown
        self._writer = SummaryWriter(str(self.folder), purge_step=progress.step + 1)

    def stepped(self, report: Report) -> None:
        speed = report.tokens / max(report.seconds, 1e-9)
        told = {"loss": report.loss, "gradient norm": report.norm, "rate": report.rate}
        for name, value in {**told, "tokens per second": speed, **report.gates}.items():
            self._writer.add_scalar(name.replace(" ", "_"), value, report.step)

    def examined(self, step: int, marks: dict[str, Mark]) -> None:
        for name, mark in marks.items():
            self._writer.add_scalar(f"exam/{name}/nats", mark.nats, step)
            self._writer.add_scalar(f"exam/{name}/right", mark.right, step)

    def saving(self, step: int) -> None:
        self._writer.flush()

    def closed(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Several(Listener):
    """Tells several listeners the same."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = listeners

    def resumed(self, progress: Progress) -> None:
        for listener in self.listeners:
            listener.resumed(progress)

    def stepped(self, report: Report) -> None:
        for listener in self.listeners:
            listener.stepped(report)

    def examined(self, step: int, marks: dict[str, Mark]) -> None:
        for listener in self.listeners:
            listener.examined(step, marks)

    def saving(self, step: int) -> None:
        for listener in self.listeners:
            listener.saving(step)

    def closed(self) -> None:
        for listener in self.listeners:
            listener.closed()
