"""Checkpoints: weights, optimizers, carried states and progress, by PyTorch's distributed checkpointing.

A checkpoint is a folder that appears as a whole. It can be loaded by any number of processes, sharded in any
way, because tensors are stored by name and place, not by process.
"""

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from atlas_lm.models.config import AtlasConfig
from atlas_lm.models.state import StreamState
from atlas_lm.stream.atomic import ADVICE
from atlas_lm.train.machine import Machine

PROGRESS = "progress.json"
CARRIED = "carried"
FIRST = 10  # losses that say where a run began


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0  # finished ones
    tokens: int = 0
    seconds: float = 0.0  # of training, exams and starts left out
    first: tuple[float, ...] = ()  # the first losses, which say where the run began

    def after(self, tokens: int, seconds: float, loss: float) -> "Progress":
        """One step further."""
        return Progress(
            step=self.step + 1,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
            first=self.first if len(self.first) == FIRST else (*self.first, loss),
        )


@dataclass(kw_only=True)
class Trained:
    """All that changes while a run goes on."""

    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    progress: Progress
    carried: StreamState | None  # of this process' rows; None: nothing is carried


class Checkpoints:
    """The checkpoints of a run, the last few of them."""

    def __init__(self, folder: Path, machine: Machine, config: AtlasConfig, keep: int = 2) -> None:
        self.folder, self.machine, self.config, self.keep = folder, machine, config, keep

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        whole = [path for path in self.folder.glob("step-*") if (path / PROGRESS).is_file()]
        return sorted(int(path.name.removeprefix("step-")) for path in whole)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, trained: Trained) -> Path:
        """Write a checkpoint beside the others, then let it take its name, then remove old ones."""
        target = self.path(trained.progress.step)
        partial = target.with_name(f".{target.name}.partial")
        with _told(target):
            if self.machine.first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.machine.wait()
            with _alone():
                dcp.save(self._named(trained), checkpoint_id=partial)
            self.machine.wait()
            if self.machine.first:
                _write(partial / PROGRESS, json.dumps(asdict(trained.progress)))
                shutil.rmtree(target, ignore_errors=True)
                os.replace(partial, target)
                for step in self.steps()[: -self.keep]:
                    shutil.rmtree(self.path(step))
        self.machine.wait()
        return target

    def load(self, trained: Trained) -> None:
        """Bring what is trained to where the newest checkpoint is."""
        path = self.path(self.steps()[-1])
        named = self._named(trained)
        leaves = self._carried_leaves(path)
        if leaves:
            named[CARRIED] = leaves
        with _alone():
            dcp.load(named, checkpoint_id=path)
        set_state_dict(
            trained.module,
            trained.optimizers,
            model_state_dict=named["model"],
            optim_state_dict=named["optimizers"],
        )
        found = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        trained.progress = Progress(**(found | {"first": tuple(found["first"])}))
        if leaves:
            mine = {name: _local(leaf).clone() for name, leaf in leaves.items()}
            trained.carried = StreamState.from_leaves(self.config.layer_specs, mine)

    def _named(self, trained: Trained) -> dict[str, Any]:
        model, optimizers = get_state_dict(trained.module, trained.optimizers)
        named: dict[str, Any] = {"model": model, "optimizers": optimizers}
        if trained.carried is not None:
            leaves = trained.carried.leaves()
            named[CARRIED] = {name: self._joint(leaf) for name, leaf in leaves.items()}
        return named

    def _joint(self, rows: Tensor) -> Tensor:
        """This process' rows as a part of those of all."""
        if self.machine.mesh is None:
            return rows
        return DTensor.from_local(rows.contiguous(), self.machine.mesh, [Shard(0)], run_check=False)

    def _carried_leaves(self, path: Path) -> dict[str, Tensor]:
        """Room for the carried states of this process' rows, by what the checkpoint says of them."""
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        leaves = {}
        for name, about in stored.items():
            if name.startswith(f"{CARRIED}.") and isinstance(about, TensorStorageMetadata):
                _, rows = self.machine.share(about.size[0])
                room = torch.empty(
                    (rows, *about.size[1:]),
                    dtype=about.properties.dtype,
                    device=self.machine.device,
                )
                leaves[name.removeprefix(f"{CARRIED}.")] = self._joint(room)
        return leaves


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """All weights by name, whole, on the CPU of the first process; the others get none."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(module, options=options))


def check_room(folder: Path, weights: int, keep: int) -> None:
    """Refuse to begin where not even the checkpoints that are kept, and one more, would fit."""
    needed = 3 * 4 * weights * (keep + 1)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{free / 2**30:.1f} GiB are free, {keep + 1} checkpoints of {weights:,} weights need "
            f"{needed / 2**30:.1f}: free some space, or choose another --out",
            str(folder),
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _alone() -> Iterator[None]:
    """Without a process group PyTorch says that it takes this process to be alone, which it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Say which checkpoint could not be written, and that older ones are still there."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        failures = getattr(error, "failures", {})
        found = [cause[0] if isinstance(cause, tuple) else cause for cause in failures.values()]
        cause = next((one for one in [error, *found] if isinstance(one, OSError)), None)
        number = errno.EIO if cause is None or cause.errno is None else cause.errno
        reason = " ".join(str(error if cause is None else cause).split())[:300]
        advice = ADVICE.get(number, "see the system's message")
        told = f"could not save ({reason}): {advice}; older checkpoints are untouched"
        raise OSError(number, told, str(target)) from error
