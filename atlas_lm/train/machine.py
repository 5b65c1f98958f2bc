"""Processes and devices: one, or several that torchrun started, and how a module is spread over them."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from atlas_lm.train.learner import Learner

SPREADS = ("alone", "ddp", "fsdp")
PATIENCE = timedelta(minutes=30)  # for the others, e.g. while one makes shards
Thing = TypeVar("Thing")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This process among all."""

    device: torch.device
    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None  # None: no process group, this one is alone

    @property
    def first(self) -> bool:
        """Whether this process writes and talks."""
        return self.rank == 0

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def gather(self, thing: Thing) -> list[Thing]:
        """What every process has, in the order of ranks."""
        if self.world == 1:
            return [thing]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, thing)
        return found

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()

    def share(self, rows: int) -> tuple[int, int]:
        """Of the rows of a step the first one of this process, and how many."""
        if rows % self.world:
            raise ValueError(
                f"a step of {rows} rows cannot be shared alike by {self.world} processes; start a number of "
                "processes that divides it"
            )
        return self.rank * (rows // self.world), rows // self.world


@contextmanager
def join(device: str) -> Iterator[Machine]:
    """Take one's place among the processes that torchrun started; alone where it did not."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ:
        yield Machine(device=_device(device, 0))
        return
    place = _device(device, int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        mesh = init_device_mesh(place.type, (world,), mesh_dim_names=("rows",))
        yield Machine(device=place, rank=dist.get_rank(), world=world, mesh=mesh)
        dist.barrier()  # who leaves while others still work takes their connections down
    finally:
        dist.destroy_process_group()


def _device(name: str, local: int) -> torch.device:
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but PyTorch finds no CUDA device here; use cpu")
    device = torch.device("cuda", local if device.index is None else device.index)
    torch.cuda.set_device(device)
    return device


def spread(learner: Learner, machine: Machine, how: str | None, *, streams: bool) -> nn.Module:
    """The module on its device and over all processes.

    Args:
        how: alone, ddp (every process has all weights) or fsdp (each has a part of them); None: fsdp where
            there are several processes.
        streams: whether parts go on with the streams of others. Then the memory that a stream begins with,
            which is learned, is not used in every part.
    """
    how = how or ("fsdp" if machine.world > 1 else "alone")
    _check_spread(how, machine)
    if how == "fsdp":
        # it warns that states are views; nothing here is changed in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        for block in learner.backbone.layers:
            fully_shard(block, mesh=machine.mesh)
        fully_shard(learner, mesh=machine.mesh)
        return learner.to(machine.device)  # its buffers; weights are there already
    learner.to(machine.device)
    if how == "alone":
        return learner
    return DistributedDataParallel(learner, find_unused_parameters=streams)


def _check_spread(how: str, machine: Machine) -> None:
    if how not in SPREADS:
        raise ValueError(f"spread is {how!r}, wanted one of {', '.join(SPREADS)}")
    if how == "alone" and machine.world > 1:
        raise ValueError(f"{machine.world} processes train one model: spread it by ddp or fsdp")
    if how != "alone" and machine.mesh is None:
        raise ValueError(f"{how} needs processes; start them with torchrun, or --processes")


@contextmanager
def syncing(module: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are summed over processes in the last backward pass of a step only."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    quiet = isinstance(module, DistributedDataParallel) and not last
    with module.no_sync() if quiet else nullcontext():  # type: ignore[operator]
        yield


def inner(module: nn.Module) -> Learner:
    """The learner itself, whatever is around it."""
    found = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(found, Learner)
    return found
