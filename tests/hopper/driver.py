"""Launches of kernels that were compiled for Hopper, run by the emulator, tensors on the CPU."""

import collections
import contextlib
import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.kernel_bench.hopper import Launch, launches_to
from tests.hopper.decoder import Decoder
from tests.hopper.instructions import INSTRUCTIONS
from tests.hopper.machine import Block, Fault, Memory, Order
from tests.hopper.parse import parse
from tests.hopper.tensor_cores import TENSOR_CORES
from tests.hopper.transfers import TRANSFERS

RESIDENT = 5  # programs that run side by side
PATIENCE = 1000  # looks for a sign of others that are in vain
END = object()


@contextlib.contextmanager
def emulated(order: Order, edit: Callable[[str], str] = lambda text: text) -> Iterator[None]:
    """Kernels that are launched inside run on the emulator. edit: changes their text, to plant a fault"""
    with launches_to(lambda launch: run(launch, decoded(edit(launch.text)), order)):
        yield


@functools.cache
def decoded(text: str) -> Decoder:
    return Decoder(parse(text), INSTRUCTIONS | TRANSFERS | TENSOR_CORES)


def run(launch: Launch, program: Decoder, order: Order) -> None:
    """All programs of the grid, one after the other; while one waits, others go on, or the next begin."""
    memory = Memory([region(a) for a in launch.arguments if isinstance(a, torch.Tensor)])
    arguments = [*map(word, launch.arguments), 0, 0]  # two pointers to scratch, which nobody uses
    warps, shared = launch.metadata.num_warps, launch.metadata.shared
    places = list(itertools.product(*map(range, launch.grid)))
    waiting = collections.deque(places if order.warps == "up" else reversed(places))
    running: collections.deque[Iterator[None]] = collections.deque()
    patience, signals = PATIENCE, 0
    with np.errstate(all="ignore"):
        while waiting or running:
            if waiting and len(running) < RESIDENT:
                running.append(
                    Block(
                        program.code, program.registers, memory, arguments, warps, shared, waiting.popleft(),
                        launch.grid, order,
                    ).run()
                )  # fmt: skip
                running.rotate(1)
            ended = next(running[0], END) is END
            if ended:
                running.popleft()
            running.rotate(-1)
            moved = ended or memory.signals != signals
            patience, signals = PATIENCE if moved else patience - 1, memory.signals
            if not patience:
                raise Fault(f"{len(running)} programs wait for each other for ever")


def word(argument: Any) -> int:
    """An argument as bits."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return int(struct.unpack("<I", struct.pack("<f", argument))[0])
    return int(argument) % 2**64


def region(tensor: torch.Tensor) -> tuple[int, Any]:
    """Where the storage of a tensor lies, and its bytes."""
    storage = tensor.untyped_storage()
    size = max(storage.nbytes(), 1)
    start = storage.data_ptr()
    return start, np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)
