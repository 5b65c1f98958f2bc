"""Triton's door to a GPU that is not there: kernels are compiled for Hopper, launches go to whoever asks.

For looking at kernels, or emulating them, on machines without a GPU; needs kernels that are not interpreted.
"""

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from atlas_lm.ops.backend import COMPILED_FOR

SHARED = 227 * 1024  # bytes that a program can have
DEVICE = 90  # the number under which Triton keeps what it compiled here, apart from real devices


@dataclass(frozen=True)
class Launch:
    """What would go to the GPU."""

    name: str
    text: str  # PTX
    metadata: Any  # warps, stages, shared memory, registers
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]  # those that the kernel gets, in its order


@contextlib.contextmanager
def launches_to(handler: Callable[[Launch], None]) -> Iterator[None]:
    """Kernels launched inside, on tensors of the CPU, are compiled and handed over instead of run."""
    utils = _Utils()
    before, driver._active = driver._active, _Hopper(utils, handler)
    COMPILED_FOR.add("cpu")
    knobs.runtime.kernel_load_start_hook.add(utils.read)
    try:
        with knobs.cache.scope(), knobs.runtime.scope():
            knobs.cache.dir = _cache()
            knobs.runtime.add_stages_inspection_hook = _no_assembly
            yield
    finally:
        knobs.runtime.kernel_load_start_hook.remove(utils.read)
        COMPILED_FOR.discard("cpu")
        driver._active = before


class _Utils:
    text = ""  # of the kernel that is being loaded

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED, "multiprocessor_count": 132}

    def read(self, module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        [path] = [path for file, path in files.items() if file.endswith(".ptx")]
        self.text = Path(path).read_text()

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        """The function that launches will name is the kernel's text."""
        return "module", self.text, 0, 0, 1024


class _Hopper:
    """A Triton driver."""

    handler: Callable[[Launch], None]  # of the context that is open; kernels outlive contexts

    def __init__(self, utils: _Utils, handler: Callable[[Launch], None]) -> None:
        self.utils, _Hopper.handler = utils, staticmethod(handler)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, text: str, *rest: Any) -> None:
            _, _, _, _, *given = rest  # metadata and hooks come first
            arguments = tuple(_flat(list(source.signature.values()), given))
            _Hopper.handler(Launch(metadata.name, text, metadata, (x, y, z), arguments))

        return launch

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


def _flat(signature: Any, arguments: Any) -> Iterator[Any]:
    """Tuples unpacked, constants left out."""
    for kind, argument in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, argument)
        elif kind != "constexpr":
            yield argument


def _no_assembly(*given: Any) -> tuple[str, str] | None:
    """PTX is all that is wanted: half of the time of compiling goes to what comes after it.

    From Triton 3.7 on it is also called with nothing, for what tells such kernels apart in caches."""
    if not given:
        return "ptx", "ptx"
    given[1]["cubin"] = lambda text, metadata: b"none"
    return None


@functools.cache
def _cache() -> str:
    """A folder of its own, for kernels without machine code."""
    folder = tempfile.mkdtemp(prefix="hopper-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
