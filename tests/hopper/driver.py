"""Triton's door: compile for Hopper, launch on the emulator, tensors on the CPU."""

import atexit
import contextlib
import ctypes
import functools
import itertools
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from atlas_lm.ops.backend import COMPILED_FOR
from tests.hopper.decoder import Decoder
from tests.hopper.instructions import INSTRUCTIONS
from tests.hopper.machine import Block, Memory, Order
from tests.hopper.parse import parse
from tests.hopper.tensor_cores import TENSOR_CORES
from tests.hopper.transfers import TRANSFERS

SHARED = 227 * 1024  # bytes that a block can have
DEVICE = 90  # the number under which Triton keeps what it compiled for the emulator, apart from real devices


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED, "multiprocessor_count": 132}

    text = ""  # of the kernel that is being loaded

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        """The function that launches will name is the kernel's text."""
        return "module", self.text, 0, 0, 1024

    def read(self, module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        [path] = [path for file, path in files.items() if file.endswith(".ptx")]
        self.text = Path(path).read_text()


@functools.cache
def decoded(text: str) -> Decoder:
    return Decoder(parse(text), INSTRUCTIONS | TRANSFERS | TENSOR_CORES)


class Launcher:
    """Runs all programs of a grid, one after the other."""

    order = Order()
    edit: Callable[[str], str] = staticmethod(lambda text: text)  # to plant a fault

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata

    def __call__(self, x: int, y: int, z: int, stream: int, text: str, *rest: Any) -> None:
        _, _, _, _, *arguments = rest
        given = list(flat(list(self.source.signature.values()), arguments))
        memory = Memory([region(a) for a in given if isinstance(a, torch.Tensor)])
        code, numbers = decoded(Launcher.edit(text)), list(map(word, given))
        with np.errstate(all="ignore"):
            for place in itertools.product(range(x), range(y), range(z)):
                Block(
                    code.code, code.registers, memory, [*numbers, 0, 0], self.metadata.num_warps,
                    self.metadata.shared, place, (x, y, z), Launcher.order,
                ).run()  # fmt: skip


def flat(signature: Any, arguments: Any) -> Iterator[Any]:
    """The arguments that a kernel gets: tuples unpacked, constants left out."""
    for kind, argument in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, argument)
        elif kind != "constexpr":
            yield argument


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


class Hopper:
    """A Triton driver."""

    utils, launcher_cls = Utils(), Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def emulated(order: Order, edit: Callable[[str], str] = lambda text: text) -> Iterator[None]:
    """Kernels that are launched inside run on the emulator, on tensors of the CPU."""
    before, driver._active = driver._active, Hopper()
    Launcher.order, Launcher.edit = order, staticmethod(edit)
    COMPILED_FOR.add("cpu")
    knobs.runtime.kernel_load_start_hook.add(Hopper.utils.read)
    try:
        with knobs.cache.scope(), knobs.runtime.scope():
            knobs.cache.dir = cache()
            knobs.runtime.add_stages_inspection_hook = no_assembly
            yield
    finally:
        knobs.runtime.kernel_load_start_hook.remove(Hopper.utils.read)
        COMPILED_FOR.discard("cpu")
        driver._active = before


def no_assembly(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    """PTX is all that is wanted: half of the time of compiling goes to what comes after it."""
    stages["cubin"] = lambda text, metadata: b"none"


@functools.cache
def cache() -> str:
    """A folder of its own, for kernels without machine code."""
    folder = tempfile.mkdtemp(prefix="hopper-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
