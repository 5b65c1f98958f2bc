"""Try other tiles for a kernel on this GPU: which of them are right, and how long they take.

python -m benchmarks.tiles "linear_memory momentum" "walk_forward_kernel momentum" 64,8,2,128 32,4,2

A tile is block,warps,stages[,registers], as in `atlas_lm/ops/tiles.py`, or for kernels of the delta rule
features,values,warps[,stages], as in `atlas_lm/ops/delta_rule/tiles.py`. Every variant is checked as in
`benchmarks.kernels`, each in a process of its own: a wrongly compiled kernel may take its process down, and
compiling goes on side by side. Those that pass are timed one after the other.
"""

import argparse
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

import torch

from benchmarks.kernel_bench.cases import Case, Tokens, pick
from benchmarks.kernel_bench.checking import check
from benchmarks.kernel_bench.measuring import by_kernel
from benchmarks.kernels import CASES, pair

HALF = 2  # bytes of the numbers that benchmarks run on


def set_tile(key: str, tile: str) -> None:
    """Put a tile into the table that has the key; an unknown key is a mistake."""
    from atlas_lm.ops.chunk_walk import fused as walk
    from atlas_lm.ops.delta_rule.tiles import BLOCKINGS, Blocking
    from atlas_lm.ops.linear_memory import fused as linear
    from atlas_lm.ops.tiles import Tile

    numbers = list(map(int, tile.split(",")))
    for table in (walk.TILES, linear.TILES):
        if key in table:
            table[key] = Tile(*numbers)
            return
    if (key, HALF) in BLOCKINGS:
        names = ("features", "values", "warps", "stages")
        BLOCKINGS[key, HALF] = Blocking(**dict(zip(names, numbers, strict=False)))
        return
    known = ", ".join((*walk.TILES, *linear.TILES, *dict.fromkeys(name for name, _ in BLOCKINGS)))
    raise ValueError(f"the tile is for {key!r}, wanted one of: {known}")


def verdict(name: str, features: int, key: str, tile: str) -> str:
    """What the check says of a tile, in a process of its own."""
    set_tile(key, tile)
    case = wanted(name, features, None)
    found = check(case, torch.device("cuda"))
    torch.cuda.synchronize()
    return "" if found.passed else str(found)


def wanted(name: str, features: int, shape: str | None) -> Case:
    """The case with so many features and values, at its own shapes or at one."""
    [case] = pick(CASES, [name])
    sizes = dict(features=features, values=features)
    shapes = case.shapes if shape is None else (Tokens(*pair(shape)),)
    assert isinstance(case.small, Tokens)
    return replace(
        case,
        small=replace(case.small, **sizes),
        shapes=tuple(replace(s, **sizes) for s in shapes if isinstance(s, Tokens)),
    )


def time_of(case: Case, kernel: str) -> float:
    """Milliseconds that the kernel takes of a forward and backward pass."""
    inputs = case.draw(case.shapes[0], torch.device("cuda"))
    slope = torch.randn_like(next(iter(case.call(inputs).values())))

    def both() -> None:
        y = next(iter(case.call(inputs).values()))
        torch.autograd.grad(y, list(inputs.values()), slope, allow_unused=True)

    return by_kernel(both)[kernel]


def result(future: "Future[str]") -> str:
    try:
        return future.result()
    except Exception as trouble:
        return f"{type(trouble).__name__}: {trouble}".splitlines()[0][:120]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", help="a row of benchmarks.kernels")
    parser.add_argument("key", help="an entry of the table of tiles")
    parser.add_argument("tiles", nargs="+", help="block,warps,stages[,registers], or as above")
    parser.add_argument("--shape", default="16x4096")
    parser.add_argument("--features", type=int, default=128, help="and values")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tiles are tried on a CUDA GPU, and there is none here")
    spawn = multiprocessing.get_context("spawn")
    # one worker per tile: the pool of a process that died is lost
    pools = {tile: ProcessPoolExecutor(1, mp_context=spawn) for tile in options.tiles}
    given = (options.case, options.features, options.key)
    futures = {tile: pool.submit(verdict, *given, tile) for tile, pool in pools.items()}
    wrong = {tile: result(future) for tile, future in futures.items()}
    for pool in pools.values():
        pool.shutdown()
    case = wanted(options.case, options.features, options.shape)
    for tile in options.tiles:
        if wrong[tile]:
            print(f"{tile:>16}  refused: {wrong[tile]}", flush=True)
            continue
        set_tile(options.key, tile)
        print(f"{tile:>16}  {time_of(case, options.key.split()[0]):.3f} ms", flush=True)


if __name__ == "__main__":
    main()
