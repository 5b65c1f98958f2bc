"""Whole models, ours and their peers, in one run on one GPU: `python -m benchmarks.models --help`.

Train: forward, loss, backward and fused AdamW, in rows of rising length; with checkpointing where a step does
not fit without. Prefill: one prompt, the logits of its last token. Stream: a million tokens in long strides.
Decode: one token of many streams after another. Weights are bf16 in all of it, for every model, so that
products and fused losses of all of them run in bf16; nothing is compiled by torch unless it is asked for.

Rows are written as they come, behind those of earlier runs. What fails is a row with its reason. Peers that
cannot be imported are left out with a word: flash-linear-attention 0.6.0 must be on the path.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.kernel_bench import report
from benchmarks.kernel_bench.measuring import Limits, synchronize
from benchmarks.model_bench.families import FAMILIES, Family, Model, count, pick
from benchmarks.model_bench.jobs import WHAT, Job, Plan, Unfit, do, jobs, release, training_step
from benchmarks.model_bench.plot import plot
from benchmarks.model_bench.profiling import kernels, listing
from benchmarks.model_bench.rows import Row, add, load, measured, say, table

RESULTS = Path(__file__).parent / "results"


@dataclass
class Bench:
    """Where models are measured and until when (seconds of `time.monotonic`)."""

    device: torch.device
    plan: Plan = field(default_factory=Plan)
    limits: Limits = field(default_factory=lambda: Limits(repeats=10, seconds=1.5))
    deadline: float = float("inf")
    facts: dict[str, str] = field(default_factory=dict)  # what stands in every row
    lost: str = ""  # why the device no longer answers

    def run(self, families: Sequence[Family], todo: Sequence[Job]) -> Iterator[Row]:
        """Rows for each model and job, whatever happens."""
        for family in families:
            yield from self.family(family, todo)
            self.recover()

    def family(self, family: Family, todo: Sequence[Job]) -> Iterator[Row]:
        if self.reason_to_stop:
            yield self.row(family, None, status=report.SKIPPED, note=self.reason_to_stop)
            return
        try:
            model = family.build(self.plan.size, self.device)
        except Exception as trouble:
            yield self.failed(family, None, None, trouble)
            return
        for job in todo:
            yield self.job(family, model, job)
            self.recover()

    def job(self, family: Family, model: Model, job: Job) -> Row:
        params = count(model)
        if self.reason_to_stop:
            note = self.reason_to_stop
            return self.row(family, job, params=params, status=report.SKIPPED, note=note)
        try:
            done = do(job, family, model, self.device, self.plan, self.limits)
        except Unfit as reason:
            return self.row(family, job, params=params, status=report.SKIPPED, note=str(reason))
        except Exception as trouble:
            model.zero_grad()
            return self.failed(family, job, params, trouble)
        return self.row(family, job, params=params, **measured(done))

    @property
    def reason_to_stop(self) -> str:
        return self.lost or ("the budget is spent" if time.monotonic() > self.deadline else "")

    def recover(self) -> None:
        """Give memory back, and find out whether the device still answers."""
        if self.lost:
            return
        try:
            synchronize(self.device)
            release(self.device)
        except Exception as trouble:
            self.lost = f"the device was lost: {shortly(trouble)}"

    def failed(
        self, family: Family, job: Job | None, params: int | None, trouble: Exception
    ) -> Row:
        missing = isinstance(trouble, ImportError)
        status = report.MISSING if missing else report.FAILED
        return self.row(family, job, params=params, status=status, note=shortly(trouble))

    def row(self, family: Family, job: Job | None, **found: object) -> Row:
        """job: None where the model itself is not there."""
        what, batch, tokens = ("", 0, 0) if job is None else (job.what, job.batch, job.tokens)
        made = dict(name=family.name, what=what, batch=batch, tokens=tokens, peer=not family.ours)
        return Row(**(made | self.facts | found))  # type: ignore[arg-type]


def shortly(trouble: Exception) -> str:
    """The kind of an error and its first line."""
    lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
    return f"{type(trouble).__name__}: {lines[0] if lines else ''}"[:200]


def describe(device: torch.device, commit: str | None) -> dict[str, str]:
    """The facts of a run: what a row needs beside it to be read later."""
    versions = {"torch": str(torch.__version__)}
    versions |= {name: report.version(name) for name in ("triton", "transformers", "fla-core")}
    named = [f"{name} {version}" for name, version in versions.items()]
    return dict(
        command=shlex.join(["python", "-m", "benchmarks.models", *sys.argv[1:]]),
        commit=commit or report.git_commit(),
        device=", ".join([report.hardware(device), *named]),
    )


def profile(family: Family, bench: Bench) -> str:
    """Kernels of one training step of the first length."""
    first = jobs(bench.plan, ["train"])[0]
    model = family.build(bench.plan.size, bench.device)
    step = training_step(first, family, model, bench.device)
    head = (
        f"{family.name}, training step of {first.batch} x {first.tokens}, {count(model):,} weights"
    )
    return f"{head}\n{listing(kernels(step, bench.device))}"


def draw_plot(source: Path) -> None:
    target = source.with_suffix(".png")
    try:
        plot(load(source), target)
    except ImportError:
        print(f"no plot, matplotlib is missing: --plot {source} makes it elsewhere")
    else:
        print(f"written to {target}")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    plan = Plan()
    names = ", ".join(family.name for family in FAMILIES)
    parser.add_argument("--only", nargs="+", metavar="NAMES", help=f"some of {names}")
    parser.add_argument("--what", nargs="+", metavar="WHAT", help=f"some of {', '.join(WHAT)}")
    parser.add_argument("--size", default=plan.size, help="of atlas_lm.models.sizes")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=plan.lengths, metavar="TOKENS", help="of rows"
    )
    parser.add_argument(
        "--step", type=int, default=plan.step, metavar="TOKENS", help="of a training step, at least"
    )
    parser.add_argument(
        "--stream", type=int, default=plan.stream, metavar="TOKENS", help="of the stream"
    )
    parser.add_argument("--batch", type=int, default=plan.batch, help="streams that are decoded")
    parser.add_argument("--repeats", type=int, default=10, help="at most, per figure")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.5,
        help="at most, per figure; longer runs are timed twice",
    )
    parser.add_argument(
        "--budget", type=float, default=300, metavar="SECONDS", help="after which nothing is begun"
    )
    parser.add_argument(
        "--compile", action="store_true", help="let torch.compile join the steps of decoding"
    )
    parser.add_argument("--device", default="cuda", help="cpu: to try the way, not to measure")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    parser.add_argument(
        "--profile", metavar="MODEL", help="only list the kernels of a training step"
    )
    parser.add_argument("--plot", type=Path, metavar="CSV", help="only draw the plot of a file")
    return parser.parse_args(given)


def split(names: list[str] | None) -> list[str] | None:
    """Names may stand apart or with commas between them."""
    if names is None:
        return None
    return [part.strip() for name in names for part in name.split(",") if part.strip()]


def main(given: Sequence[str] | None = None) -> None:
    began, options = time.monotonic(), arguments(given)
    if options.plot:
        draw_plot(options.plot)
        return
    families, what = pick(FAMILIES, split(options.only)), split(options.what)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("models are timed on a CUDA GPU, and there is none here")
    device = torch.device(options.device)
    plan = Plan(
        size=options.size,
        lengths=tuple(options.lengths),
        step=options.step,
        stream=options.stream,
        batch=options.batch,
        compiled=options.compile,
    )
    limits = Limits(repeats=options.repeats, seconds=options.seconds)
    facts = describe(device, options.commit)
    bench = Bench(device, plan, limits, began + options.budget, facts)
    print(f"{facts['device']}, commit {facts['commit']}\n{facts['command']}", flush=True)
    if options.profile:
        (family,) = pick(FAMILIES, [options.profile])
        print(profile(family, bench))
        return
    target = options.out / "models.csv"
    rows: list[Row] = []
    for row in bench.run(families, jobs(plan, what)):
        print(say(row), flush=True)
        add(target, row)
        rows.append(row)
    print(f"{table(rows)}\n\n{time.monotonic() - began:.0f} s, written to {target}")
    draw_plot(target)


if __name__ == "__main__":
    main()
