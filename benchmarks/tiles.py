"""Try other tiles for a kernel on this GPU: which of them are right, and how long they take.

python -m benchmarks.tiles "linear_memory momentum" "walk_forward_kernel momentum" 64,8,2,128 32,4,2

A tile is block,warps,stages[,registers], as in `atlas_lm/ops/tiles.py`, or for kernels of the delta rule
features,values,warps[,stages], as in `atlas_lm/ops/delta_rule/tiles.py`; of `mlp_memory`, whose keys are
written mlp_memory:KERNEL, hidden,features,warps[,stages], as in `atlas_lm/ops/mlp_memory/launch.py`. Every
variant is checked as in `benchmarks.kernels`, each in a process of its own: a wrongly compiled kernel may
take its process down, and compiling goes on side by side. Those that pass are timed one after the other.
"""

import argparse
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

import torch

from benchmarks.kernel_bench.cases import Case, Tokens, pick, reshape
from benchmarks.kernel_bench.checking import check
from benchmarks.kernel_bench.measuring import by_kernel
from benchmarks.kernels import CASES, pair

HALF = 2  # bytes of the numbers that benchmarks run on
DEEP = "mlp_memory:"  # before the names of its kernels


def set_tile(key: str, tile: str) -> None:
    """Put a tile into the table that has the key; an unknown key is a mistake."""
    from atlas_lm.ops.chunk_walk import fused as walk
    from atlas_lm.ops.delta_rule.tiles import BLOCKINGS, Blocking
    from atlas_lm.ops.linear_memory import fused as linear
    from atlas_lm.ops.tiles import Tile

    numbers = list(map(int, tile.split(",")))
    if key.startswith(DEEP):
        set_block(key.removeprefix(DEEP), numbers)
        return
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


def set_block(key: str, numbers: list[int]) -> None:
    """The same for kernels of `mlp_memory`, some of which have the names of others."""
    from atlas_lm.ops.mlp_memory.launch import BLOCKS, Block

    if key not in BLOCKS:
        known = ", ".join(DEEP + name for name in BLOCKS)
        raise ValueError(f"the tile is for {DEEP + key!r}, wanted one of: {known}")
    BLOCKS[key] = Block(*numbers)


def kernel_of(key: str) -> str:
    return key.removeprefix(DEEP).split()[0]


def verdict(name: str, features: int | None, key: str, tile: str) -> str:
    """What the check says of a tile, in a process of its own."""
    set_tile(key, tile)
    case = wanted(name, features, None)
    found = check(case, torch.device("cuda"))
    torch.cuda.synchronize()
    return "" if found.passed else str(found)


def wanted(name: str, features: int | None, shape: str | None) -> Case:
    """The case, with so many features and values if a number is given, at its own shapes or at one."""
    [case] = pick(CASES, [name])
    case = reshape(case, None if shape is None else [pair(shape)])
    sizes = {} if features is None else dict(features=features, values=features)
    assert isinstance(case.small, Tokens)
    return replace(
        case,
        small=replace(case.small, **sizes),
        shapes=tuple(replace(s, **sizes) for s in case.shapes if isinstance(s, Tokens)),
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
    parser.add_argument("--features", type=int, help="and values; else those of the row")
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
        print(f"{tile:>16}  {time_of(case, kernel_of(options.key)):.3f} ms", flush=True)


if __name__ == "__main__":
    main()
