"""What kernels take of a multiprocessor, without a GPU: registers, spills, shared memory.

python -m benchmarks.registers "linear_memory momentum" --tile "writes_backward_kernel momentum" 64,8,2

Kernels of a row of `benchmarks.kernels`, forward and backward, are compiled for Hopper and assembled, none is
run. Programs: how many fit on a multiprocessor side by side. A kernel whose products are serialized waits for
each of them. Tiles are written as in `benchmarks.tiles`.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from atlas_lm.ops.backend import interpreted
from benchmarks.kernel_bench.cases import Case, Tokens, pick
from benchmarks.kernel_bench.hopper import SHARED, Launch, launches_to
from benchmarks.kernels import CASES
from benchmarks.tiles import set_tile

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
REGISTERS, WARPS, RESERVED = 65536, 64, 1024  # of a multiprocessor; bytes taken from each program


@dataclass(frozen=True)
class Resources:
    kernel: str
    warps: int
    stages: int
    registers: int  # per thread
    spills: int  # bytes stored per thread
    shared: int  # bytes
    serialized: bool

    @property
    def programs(self) -> int:
        """That fit on a multiprocessor; registers are given to a warp in steps of 8 per thread."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return min(by_registers, SHARED // (self.shared + RESERVED), WARPS // self.warps)

    def __str__(self) -> str:
        return (
            f"{self.kernel:26} {self.warps:5} {self.stages:6} {self.registers:9} {self.spills:6} "
            f"{self.shared:7} {self.programs:8}{'  serialized' * self.serialized}"
        )


HEAD = f"{'kernel':26} warps stages registers spills  shared programs"


def assembled(launch: Launch) -> Resources:
    """What the assembler says of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(launch.text)
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{source}.cubin"]
        if launch.metadata.maxnreg:
            command.append(f"--maxrregcount={launch.metadata.maxnreg}")
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        assert found, said
        return int(found[1])

    return Resources(
        launch.name,
        launch.metadata.num_warps,
        launch.metadata.num_stages,
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill stores"),
        launch.metadata.shared,
        "instructions are serialized" in said,
    )


def resources(case: Case) -> list[Resources]:
    """Of every kernel in a forward and backward pass at the first shape, in the order of launches."""
    found: dict[str, Resources] = {}

    def look(launch: Launch) -> None:
        if launch.text not in found:
            found[launch.text] = assembled(launch)

    inputs = case.draw(case.shapes[0], torch.device("cpu"))
    with launches_to(look):
        y = next(iter(case.call(inputs).values()))
        if case.backward:
            torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y), allow_unused=True)
    return list(found.values())


def narrowed(case: Case, features: int | None, values: int | None) -> Case:
    """Few tokens, on which compiled code does not depend, of so many features and values."""
    first = case.shapes[0]
    if isinstance(first, Tokens):
        first = replace(
            first,
            tokens=min(first.tokens, 128),
            features=features or first.features,
            values=values or first.values,
        )
    return replace(case, shapes=(first,))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", help="rows or groups of benchmarks.kernels")
    parser.add_argument("--tile", nargs=2, action="append", default=[], metavar=("KEY", "TILE"))
    parser.add_argument("--features", type=int, help="else those of the row")
    parser.add_argument("--values", type=int)
    options = parser.parse_args(words)
    if interpreted():
        raise SystemExit(
            "TRITON_INTERPRET=1 is set, and interpreted kernels are not compiled; unset it"
        )
    for key, tile in options.tile:
        set_tile(key, tile)
    for case in pick(CASES, options.cases):
        if not case.peer:
            print(f"{case.name}\n{HEAD}")
            for row in resources(narrowed(case, options.features, options.values)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
