"""What reading a long context takes: seconds, and memory of the process, its own and that of mapped files.

ATLAS_DATA=… OMP_NUM_THREADS=1 python benchmarks/contexts.py MODEL --lengths 10k,100k,1M
"""

import argparse
import tempfile
import time
from pathlib import Path

from atlas_lm.cli.models import open_any
from atlas_lm.evaluate import registry
from atlas_lm.evaluate.opening import open_reader
from atlas_lm.evaluate.runner import run
from atlas_lm.evaluate.tasks.options import Options
from atlas_lm.runs.journal import Journal


def resident() -> dict[str, int]:
    """MiB of this process by kind, as Linux tells them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = {"RssAnon:": "own", "RssFile:": "files", "VmHWM:": "peak of both"}
    words = [line.split() for line in lines]
    return {kinds[word[0]]: int(word[1]) // 1024 for word in words if word and word[0] in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="10k,100k,1M")
    options = parser.parse_args()
    reader = open_reader(*open_any(options.model, "cpu", None), name="model")
    for length in options.lengths.split(","):
        [task] = registry.build(["babilong/qa1"], Options(lengths=(length,), count=1))
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run([task], reader, Journal(Path(folder), {}, {}), 1)
        told = ", ".join(f"{name} {mib} MiB" for name, mib in resident().items())
        print(f"{length}: {time.perf_counter() - began:.1f} s; {told}", flush=True)


if __name__ == "__main__":
    main()
