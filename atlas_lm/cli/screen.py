"""What a run shows while it goes on: a line that changes on a terminal, elsewhere a line now and then."""

import sys
import time
from datetime import timedelta
from typing import Any

from atlas_lm.train.checkpoint import Progress
from atlas_lm.train.cost import matmul_rate, peak_bytes, step_flops
from atlas_lm.train.examine import Mark
from atlas_lm.train.listener import Listener, Report
from atlas_lm.train.machine import Machine
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Recipe

EVERY = 30.0  # seconds between lines, where there is no terminal
PACE = 0.9  # weight of the past in speed and loss
MOST = 6  # exams that are told on one line


class Screen(Listener):
    """Loss, speed, share of the machine's rate, memory, gates, and the time left, on standard error."""

    def __init__(self, recipe: Recipe, place: Place, machine: Machine, name: str) -> None:
        self.recipe, self.place, self.machine, self.name = recipe, place, machine, name
        self.rate = matmul_rate(machine.device, place.chosen_dtype(machine.device))
        self._loss = self._seconds = self._tokens = self._flops = 0.0
        self._gates: dict[str, float] = {}
        self._shown = time.monotonic()
        self._live: Any = None

    def resumed(self, progress: Progress) -> None:
        if progress.step:
            self._say(f"{self.name}: goes on after step {progress.step}")

    def stepped(self, report: Report) -> None:
        keep = PACE if self._seconds else 0.0
        shape = self.recipe.source.shape(report.step - 1)
        flops = step_flops(self.recipe, shape) / self.machine.world
        self._loss = keep * self._loss + (1 - keep) * report.loss
        self._seconds = keep * self._seconds + (1 - keep) * report.seconds
        self._tokens = keep * self._tokens + (1 - keep) * report.tokens
        self._flops = keep * self._flops + (1 - keep) * flops
        self._gates = report.gates or self._gates
        self._show(self._line(report), report.step == self.recipe.steps)

    def examined(self, step: int, marks: dict[str, Mark]) -> None:
        told = [
            f"{name} {mark.nats:.3f} nats, {100 * mark.right:.1f} %"
            for name, mark in list(marks.items())[:MOST]
        ]
        more = f" and {len(marks) - MOST} more" if len(marks) > MOST else ""
        self._say(f"{self.name}: exam after step {step}: {'; '.join(told)}{more}")

    def closed(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, report: Report) -> str:
        seconds = max(self._seconds, 1e-9)
        left = timedelta(seconds=int((self.recipe.steps - report.step) * seconds))
        share = self._flops / seconds / self.rate
        memory = peak_bytes(self.machine.device) / 2**30
        return (
            f"{self.name}: step {report.step}/{self.recipe.steps}, loss {self._loss:.4f}, "
            f"{self._tokens / seconds:,.0f} tokens/s, {100 * share:.1f} % of peak, {memory:.2f} GiB"
            f"{self._told_gates()}, left {left}"
        )

    def _told_gates(self) -> str:
        """Means over layers."""
        found: dict[str, list[float]] = {}
        for name, value in self._gates.items():
            if name.endswith(" mean"):
                found.setdefault(name.split()[2], []).append(value)
        told = ", ".join(f"{name} {sum(v) / len(v):.3g}" for name, v in found.items())
        return f", {told}" if told else ""

    def _show(self, line: str, last: bool) -> None:
        if sys.stderr.isatty():
            self._live_text(line)
            return
        now = time.monotonic()
        if now - self._shown >= EVERY or last:
            print(line, file=sys.stderr, flush=True)
            self._shown = now

    def _live_text(self, line: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        self._live.update(Text(line))

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
