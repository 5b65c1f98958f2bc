"""Memory and time of a long stream, and that it ends in the same place however it is read:
`python benchmarks/stream.py --help`.

Each run is a fresh process. Ids are random bytes, drawn in blocks as they are read. The load of a machine
changes over minutes, so at the end the old stream and one that just began read the same ids in turns, and
their times per token are compared turn by turn.
"""

import argparse
import csv
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from forms import describe_machine
from numpy.typing import NDArray
from torch import Tensor

from atlas_lm.models import AtlasForCausalLM, StreamState
from atlas_lm.models.sizes import configure
from atlas_lm.stream import Stream
from atlas_lm.stream.resident import resident_bytes
from atlas_lm.stream.running import read

BLOCKS = 100  # in which a stream is drawn and read
CASES = ["gated_deltanet:lmm", "titans:lmm", "titans:mag", "atlas:mag"]
STRIDES = [512, 128, 200]  # the first is the one that is measured
SEEDS = [1, 2]  # of the cuts
TURNS = 30  # of the old and the new stream at the end, each of so many strides:
TURN = 4


@dataclass(frozen=True)
class Run:
    """One way through the stream."""

    case: str  # preset:block
    size: str
    tokens: int
    stride: int = STRIDES[0]
    cuts: int | None = None  # seed of pieces of random size; None: block by block
    threads: int = 1


@dataclass(frozen=True)
class End:
    """What a run found."""

    resident: dict[int, int]  # bytes of the process after so many tokens
    seconds: float  # for all
    new: float  # seconds per token of a stream that just began, median over the turns
    slower: list[float]  # time of the old stream / time of the new one, turn by turn
    state: dict[str, NDArray]  # after the last stride
    live: dict[str, NDArray]  # after the last token


@dataclass(frozen=True)
class Figure:
    case: str
    tokens: int
    state_bytes: int
    mib_after_1_percent: float
    mib_after_10_percent: float
    mib_at_the_end: float
    us_per_token_of_a_new_stream: float
    old_against_new: (
        float  # time per token at the end / that of a new stream, median over the turns
    )
    quartiles: str  # of the same
    tokens_per_second: float
    cuts_differ_by: float  # largest difference of the state, 0: equal to the last bit
    strides_differ_by: float  # the same, relative to the largest entry of a tensor


def build(case: str, size: str) -> AtlasForCausalLM:
    preset, _, block = case.partition(":")
    torch.manual_seed(0)
    return AtlasForCausalLM(configure(preset, block=block or None, size=size)).eval()


def blocks(tokens: int) -> Iterator[Tensor]:
    """The stream: the same ids every time."""
    for i in range(BLOCKS):
        generator = torch.Generator().manual_seed(i)
        yield torch.randint(256, (tokens // BLOCKS,), generator=generator)


def cut(ids: Tensor, seed: int) -> Iterator[Tensor]:
    generator, start = random.Random(seed), 0
    while start < len(ids):
        size = generator.choice([1, 3, 64, 500, 513, 4000])
        yield ids[start : start + size]
        start += size


def go(run: Run) -> End:
    """In a fresh process: read it all, look at the clock and the memory on the way."""
    torch.set_num_threads(run.threads)
    stream = Stream(build(run.case, run.size), stride=run.stride)
    resident: dict[int, int] = {}
    begin = time.perf_counter()
    for i, block in enumerate(blocks(run.tokens), 1):
        stream.absorb(block if run.cuts is None else cut(block, run.cuts))
        if i in (1, BLOCKS // 10, BLOCKS):
            resident[stream.tokens] = resident_bytes() or 0
    seconds, reading = time.perf_counter() - begin, stream.reading
    live = read(stream.model, reading.state, reading.pending)
    new, slower = in_turns(stream)
    return End(resident, seconds, new, slower, arrays(reading.state), arrays(live))


def in_turns(old: Stream) -> tuple[float, list[float]]:
    """Seconds per token of a new stream, and by how much the old one differs, turn by turn."""
    new = Stream(old.model, stride=old.stride)
    size = TURN * old.stride
    times = []
    for turn in range(TURNS):
        ids = torch.randint(256, (size,), generator=torch.Generator().manual_seed(turn))
        pair = {}
        for stream in (old, new) if turn % 2 else (new, old):
            begin = time.perf_counter()
            stream.absorb(ids)
            pair[stream] = time.perf_counter() - begin
        times.append((pair[old], pair[new]))
    return statistics.median(n for _, n in times) / size, [o / n for o, n in times]


def arrays(state: StreamState) -> dict[str, NDArray]:
    return {name: leaf.numpy() for name, leaf in state.leaves().items()}


def in_fresh_process(run: Run) -> End:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(go, run).result()


def difference(one: dict[str, NDArray], other: dict[str, NDArray], relative: bool) -> float:
    """Largest difference of all entries, relative to the largest entry of each tensor or not."""
    worst = 0.0
    for name, mine in one.items():
        apart = float(np.abs(mine.astype(float) - other[name]).max(initial=0))
        scale = float(np.abs(mine).max(initial=1e-12)) if relative else 1.0
        worst = max(worst, apart / scale)
    return worst


def measure(case: str, limits: argparse.Namespace) -> Figure:
    def run(tokens: int, **changes: int) -> End:
        return in_fresh_process(Run(case, limits.size, tokens, threads=limits.threads, **changes))

    full = run(limits.tokens)
    same = full if limits.equal == limits.tokens else run(limits.equal)
    cuts = [difference(same.state, run(limits.equal, cuts=s).state, False) for s in SEEDS]
    strides = [difference(same.live, run(limits.equal, stride=s).live, True) for s in STRIDES[1:]]
    mib = [held / 2**20 for held in full.resident.values()]
    low, middle, high = statistics.quantiles(full.slower, n=4)
    return Figure(
        case,
        limits.tokens,
        sum(leaf.nbytes for leaf in full.state.values()),
        *mib,
        1e6 * full.new,
        middle,
        f"{low:.3f}-{high:.3f}",
        limits.tokens / full.seconds,
        max(cuts),
        max(strides),
    )


def show(figure: Figure) -> None:
    held = (figure.mib_after_1_percent, figure.mib_after_10_percent, figure.mib_at_the_end)
    print(
        f"{figure.case:20} {figure.state_bytes:11,} "
        + " ".join(f"{number:9.1f}" for number in (*held, figure.us_per_token_of_a_new_stream))
        + f" {figure.old_against_new:9.3f} {figure.quartiles:>13} {figure.tokens_per_second:9,.0f}"
        + f" {figure.cuts_differ_by:8.0e} {figure.strides_differ_by:8.0e}",
        flush=True,
    )


def save(path: Path, figures: list[Figure], machine: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(field.name for field in fields(Figure)), "machine"])
        writer.writeheader()
        writer.writerows(asdict(figure) | {"machine": machine} for figure in figures)
    print(f"\nwritten to {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help=f"a multiple of {BLOCKS}")
    parser.add_argument(
        "--equal", type=int, help="tokens for the comparison of cuts and strides; default: all"
    )
    parser.add_argument("--cases", nargs="+", default=CASES, help="preset:block")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "stream.csv"
    )
    limits = parser.parse_args()
    limits.equal = limits.equal or limits.tokens
    for tokens in (limits.tokens, limits.equal):
        if tokens < BLOCKS or tokens % BLOCKS:
            parser.error(f"{tokens} tokens, wanted a multiple of {BLOCKS}")
    return limits


def main() -> None:
    limits = arguments()
    machine = describe_machine(limits.threads)
    print(f"{machine}\n{limits.tokens:,} tokens, {limits.equal:,} for the comparisons")
    print(
        f"{'':20} {'state':>11} {'MiB 1%':>9} {'10%':>9} {'100%':>9} {'us/token':>9} {'old/new':>9} "
        f"{'quartiles':>13} {'tokens/s':>9} {'cuts':>8} {'strides':>8}"
    )
    figures = []
    for case in limits.cases:
        figures.append(measure(case, limits))
        show(figures[-1])
    save(limits.out, figures, machine)


if __name__ == "__main__":
    main()
