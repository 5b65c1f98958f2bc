"""The loop: one for every recipe, every kind of model and every number of processes."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from atlas_lm.models.state import StreamState
from atlas_lm.train.checkpoint import Checkpoints, Progress, Trained, check_room, whole_weights
from atlas_lm.train.examine import Mark, examine
from atlas_lm.train.feed import Feed
from atlas_lm.train.health import Pulse, Stopped, explain, gate_statistics, look_inside
from atlas_lm.train.learner import build_learner
from atlas_lm.train.listener import Ended, Listener, Report
from atlas_lm.train.machine import Machine, inner, spread, syncing
from atlas_lm.train.optim import build_optimizers, set_rate
from atlas_lm.train.parts import Part, Share
from atlas_lm.train.place import Place
from atlas_lm.train.recipe import Recipe
from atlas_lm.train.schedule import share_of_rate

LOOKS = 100  # times in a run that gates are looked at
Seen = list[
    list[tuple[Part, StreamState | None]]
]  # of each micro-batch its parts, states before them


class Run:
    """A recipe under way."""

    def __init__(
        self, recipe: Recipe, place: Place, machine: Machine, listener: Listener | None = None
    ) -> None:
        self.recipe, self.place, self.machine = recipe, place, machine
        self.listener = listener or Listener()
        for rows, _ in recipe.shapes():
            machine.share(rows)
        learner = build_learner(recipe)
        weights = sum(weight.numel() for weight in learner.parameters())
        check_room(place.out, weights, place.keep)
        learner.train()
        if place.recompute:
            learner.backbone.gradient_checkpointing_enable()
        if place.compiled:
            for block in learner.backbone.layers:
                block.compile(dynamic=False)  # a recipe has few shapes, and each is worth its own
        streams = recipe.source.carries or recipe.segment is not None
        module = spread(learner, machine, place.spread, streams=streams)
        optimizers = build_optimizers(module, recipe.optimizer)
        self.trained = Trained(
            module=module, optimizers=optimizers, progress=Progress(), carried=None
        )
        self.checkpoints = Checkpoints(place.out / "checkpoints", machine, recipe.model, place.keep)
        self.dtype = place.chosen_dtype(machine.device)
        self.exams = recipe.source.exams()
        self.marks: dict[str, Mark] = {}
        self._pulse = Pulse(recipe.diverged, recipe.patience)
        self._since: float | None = None  # when the step before ended

    @property
    def module(self) -> nn.Module:
        return self.trained.module

    def resume(self) -> Progress:
        """Go to the newest checkpoint, if there is one."""
        if self.checkpoints.steps():
            self.checkpoints.load(self.trained)
        self.listener.resumed(self.trained.progress)
        return self.trained.progress

    def go(self) -> Ended:
        """Train to the end, or until a signal asks to stop; a checkpoint is written in either case."""
        first = self.trained.progress.step
        feed = Feed(
            self.recipe.source,
            self.machine,
            range(first, self.recipe.steps),
            micro=self.place.micro,
            segment=self.recipe.segment,
            workers=self.place.workers,
        )
        trained_for, asked = self.trained.progress.seconds, False
        with _signals() as stop:
            for share in feed:
                asked = self.step(share, bool(stop))
                done = self.trained.progress.step
                if done in self.recipe.exam_steps():
                    self._examine()
                if asked or done == self.recipe.steps or done % self._save_every == 0:
                    self.save()
                if asked:
                    break
                self._since = time.perf_counter()
        seconds = self.trained.progress.seconds - trained_for
        return Ended(
            progress=self.trained.progress,
            marks=self.marks,
            interrupted=self.trained.progress.step < self.recipe.steps,
            waited=feed.waited / max(seconds, 1e-9),
        )

    @property
    def _save_every(self) -> int:
        return self.place.save_every or max(1, self.recipe.steps // 20)

    def save(self) -> Path:
        self.listener.saving(self.trained.progress.step)
        return self.checkpoints.save(self.trained)

    def export(self, folder: Path) -> None:
        """Write the model for everybody: weights and configuration, and its tokenizer."""
        weights = whole_weights(self.module)
        if self.machine.first:
            inner(self.module).save(folder, weights)
            if self.recipe.tokenizer is not None:
                self.recipe.tokenizer.save(folder)
        self.machine.wait()

    def _examine(self) -> None:
        rows, _ = self.recipe.source.shape(self.recipe.steps - 1)
        # uncompiled: exams have shapes of their own, and compiling for them would take longer than they do
        with self._products(), torch.compiler.set_stance("force_eager"):
            self.marks = examine(
                self.module,
                self.exams,
                self.machine,
                rows=self.place.micro or self.machine.share(rows)[1],
                segment=self.recipe.segment,
            )
        self.listener.examined(self.trained.progress.step, self.marks)

    def _products(self) -> Any:
        """Weights are fp32 and so are memories; what is below is for the products between."""
        on = self.dtype != torch.float32
        return torch.autocast(self.machine.device.type, dtype=self.dtype, enabled=on)

    def step(self, share: Share, stop: bool = False) -> bool:
        """One step of the optimizer. Returns whether any process was asked to stop."""
        began = self._since or time.perf_counter()
        recipe, step = self.recipe, self.trained.progress.step
        rate = recipe.optimizer.rate * share_of_rate(recipe.schedule, step, recipe.steps)
        set_rate(self.trained.optimizers, rate)
        counted = [share.labelled, share.tokens, float(stop)]
        counts = torch.tensor(counted, dtype=torch.float64, device=self.machine.device)
        counts = self.machine.sum(counts)
        nats, seen = self._learn(share, counts[0])
        norm = self._gradient_norm()
        # the one place where the host waits for the device: nothing that is not finite gets into a weight
        labelled, tokens, asked, total, size = torch.cat(
            [counts, self.machine.sum(nats).reshape(1), norm.double().reshape(1)]
        ).tolist()
        loss = total / max(1.0, labelled)
        self._check(loss, size, seen)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), recipe.optimizer.clip, norm)
        for optimizer in self.trained.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        gates = self._gates(seen[0][0][0])
        self._since = time.perf_counter()
        report = Report(
            step=step + 1,
            loss=loss,
            norm=size,
            rate=rate,
            tokens=int(tokens),
            labelled=int(labelled),
            seconds=self._since - began,
            gates=gates,
        )
        self.trained.progress = self.trained.progress.after(report.tokens, report.seconds, loss)
        self.listener.stepped(report)
        return asked > 0

    def _learn(self, share: Share, labelled: Tensor) -> tuple[Tensor, Seen]:
        """Forward and backward over all parts. Returns the summed nats of this process, and what was read.

        The loss is the mean over the labelled places of all processes, which average their gradients.
        """
        scale = self.machine.world / labelled.clamp_min(1.0)
        price = self.recipe.price_at(self.trained.progress.step)
        price /= sum(len(parts) for parts in share.batches)
        nats = torch.zeros((), dtype=torch.float64, device=self.machine.device)
        carried = self._carried_rows(share)
        seen: Seen = []
        after: list[StreamState] = []
        for number, parts in enumerate(share.batches):
            state = carried[number]
            seen.append([])
            for place, part in enumerate(parts):
                part = part.to(self.machine.device)
                if part.fresh is not None and state is None:
                    part = replace(part, fresh=None)  # the first step of all: every row begins
                seen[-1].append((part, state))
                last = number == len(share.batches) - 1 and place == len(parts) - 1
                with syncing(self.module, last):
                    with self._products():
                        said = self.module(part, state)
                    loss = said.nats.sum() * scale
                    if said.opened is not None:
                        loss = loss + price * said.opened
                    loss.backward()
                nats += said.nats.detach().sum()
                state = said.state
            if self.recipe.source.carries and state is not None:
                after.append(state)
        self.trained.carried = _join(after)
        return nats, seen

    def _gradient_norm(self) -> Tensor:
        """Over all weights and processes."""
        gradients = [w.grad for w in self.module.parameters() if w.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _carried_rows(self, share: Share) -> list[StreamState | None]:
        """Of each micro-batch the state of its rows."""
        carried = self.trained.carried
        if carried is None or not self.recipe.source.carries:
            return [None] * len(share.batches)
        sizes = [len(parts[0].inputs) for parts in share.batches]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [
            carried.map(lambda tensor, first=end - size, end=end: tensor[first:end])  # type: ignore[misc]
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _check(self, loss: float, norm: float, seen: Seen) -> None:
        """Stop before a step that would spoil the weights, or when the run has diverged."""
        step = self.trained.progress.step + 1
        kept = self.checkpoints.steps()
        good = (
            f"the checkpoint of step {kept[-1]} is kept"
            if kept
            else "no checkpoint was written yet"
        )
        if not (math.isfinite(loss) and math.isfinite(norm)):
            with self._products():
                told = explain(self.module, seen, self.machine)
            raise Stopped(
                f"step {step}: the loss is {loss:.4g} and the gradient's norm {norm:.4g}; {told}; "
                f"the weights were not changed, {good}; try a lower rate"
            )
        if self._pulse.diverged(loss, self.trained.progress.first):
            found = self._look(seen[0][0][0]).items()
            values = [f"{name} {value:.4g}" for name, value in found if not name.endswith("norm")]
            gates = f"; gates of the first row, by layer: {', '.join(values)}" if values else ""
            raise Stopped(
                f"step {step}: the loss is {loss:.4g} and has diverged: for {self.recipe.patience} steps it "
                f"was over {self.recipe.diverged} times what it began with{gates}; {good}; try a lower rate"
            )

    def _gates(self, part: Part) -> dict[str, float]:
        """What the gates of the first row are, now and then."""
        every = max(1, self.recipe.steps // LOOKS)
        if self.trained.progress.step % every or self.recipe.model.spec is None:
            return {}
        return self._look(part)

    def _look(self, part: Part) -> dict[str, float]:
        """Statistics of the gates on the first row of a part."""
        with self._products():
            watch = look_inside(self.module, replace(part, fresh=None), None, rows=1)
        return gate_statistics(watch)


def _join(states: list[StreamState]) -> StreamState | None:
    """The rows of several states, one behind the other."""
    if len(states) < 2:
        return states[0] if states else None
    leaves = [pytree.tree_flatten(state) for state in states]
    joined = [torch.cat(rows) for rows in zip(*(found for found, _ in leaves), strict=True)]
    whole: StreamState = pytree.tree_unflatten(joined, leaves[0][1])
    return whole


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that is no longer empty once the process was asked to end; a second time ends it at once."""
    heard: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)

    def hear(number: int, _: Any) -> None:
        heard.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {}
    if (
        threading.current_thread() is threading.main_thread()
    ):  # elsewhere signals are not ours to hear
        before = {kind: signal.signal(kind, hear) for kind in kinds}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
