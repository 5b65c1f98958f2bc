"""RULER: needles in a haystack, and variables to track."""

from collections.abc import Sequence
from typing import Any

from atlas_lm.data import needles, variables
from atlas_lm.data.asked import Asked
from atlas_lm.data.babilong import parse_length
from atlas_lm.evaluate.task import Record, Row, Sample, averages
from atlas_lm.evaluate.tasks.asking import Asking
from atlas_lm.evaluate.tasks.options import Options

COUNT = 100
LENGTHS = ("1k", "2k", "4k", "8k")
VARIABLES = "variables"
KINDS = (*needles.KINDS, VARIABLES)
KILO = 1024


class Ruler(Asking):
    """Numbers, words and identifiers told once in a long text; 1k are 1,024 tokens here, as in RULER."""

    name = "ruler"
    axis = "length"

    def __init__(self, kinds: Sequence[str], options: Options) -> None:
        options.check(self.name, "lengths")
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"ruler has no {unknown[0]!r}, wanted some of {', '.join(KINDS)}")
        self._kinds = tuple(kinds) or KINDS
        self._options = options
        self._lengths = options.lengths or LENGTHS
        self._numbers = {length: parse_length(length, KILO) for length in self._lengths}

    @property
    def settings(self) -> dict[str, Any]:
        essays = self._options.library.find("essays")
        return {
            "kinds": list(self._kinds),
            "lengths": list(self._lengths),
            "count": self._options.count or COUNT,
            "seed": self._options.seed,
            "data": {"essays": [essays.description, essays.fingerprint]},
        }

    def samples(self) -> list[Sample]:
        return [
            Sample(
                id=f"ruler/{kind}/{length}/{index}",
                cell={"kind": kind, "length": length},
                index=index,
                tokens=self._numbers[length],
            )
            for length in self._lengths
            for kind in self._kinds
            for index in range(self._options.count or COUNT)
        ]

    def make(self, sample: Sample) -> Asked:
        kind, length = sample.cell["kind"], self._numbers[sample.cell["length"]]
        name = (self._options.seed, length, sample.index)
        if kind == VARIABLES:
            return variables.hide_chain(length, *name)
        return needles.hide_needles(kind, length, self._options.library, *name)

    def score(self, sample: Sample, asked: Asked, answer: str) -> float:
        return needles.share_told(asked.targets, answer)

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows = super().rows(records)
        return [*rows, *averages(rows, over="kind")]
