"""Robustness: what is left of a few facts after an attack, by its strength."""

from collections.abc import Sequence
from typing import Any

from atlas_lm.data.asked import Asked
from atlas_lm.data.poison import ATTACKS, STYLES, poison
from atlas_lm.evaluate.task import Sample
from atlas_lm.evaluate.tasks.asking import Asking
from atlas_lm.evaluate.tasks.options import Options

COUNT = 100
STRENGTHS = ("0", "1", "4", "16", "64", "256", "1024")


class Robustness(Asking):
    """Eight facts, an attack, one question; `--lengths` are strengths: hostile words or facts."""

    name = "robustness"
    axis = "strength"

    def __init__(self, attacks: Sequence[str], options: Options) -> None:
        options.check(self.name, "lengths", "style")
        unknown = [attack for attack in attacks if attack not in ATTACKS]
        if unknown:
            raise ValueError(
                f"robustness has no {unknown[0]!r}, wanted some of {', '.join(ATTACKS)}"
            )
        self._attacks = tuple(attacks) or tuple(ATTACKS)
        self._strengths = options.lengths or STRENGTHS
        self._style = options.style or "sentences"
        if self._style not in STYLES:
            raise ValueError(f"style is {self._style!r}, wanted one of {', '.join(STYLES)}")
        if not all(strength.isdecimal() for strength in self._strengths):
            raise ValueError(
                f"strengths of attacks are {', '.join(self._strengths)}, wanted numbers of hostile words or "
                "facts, e.g. --lengths 0,16,256"
            )
        self._options = options

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "attacks": list(self._attacks),
            "strengths": list(self._strengths),
            "count": self._options.count or COUNT,
            "seed": self._options.seed,
            "style": self._style,
        }

    def samples(self) -> list[Sample]:
        return [
            Sample(
                id=f"robustness/{attack}/{strength}/{index}",
                cell={"attack": attack, "strength": strength},
                index=index,
                tokens=64 + 8 * int(strength),
            )
            for attack in self._attacks
            for strength in self._strengths
            for index in range(self._options.count or COUNT)
        ]

    def make(self, sample: Sample) -> Asked:
        name = (self._options.seed, sample.index)
        return poison(sample.cell["attack"], int(sample.cell["strength"]), self._style, *name)

    def score(self, sample: Sample, asked: Asked, answer: str) -> float:
        return float(answer.strip().startswith(asked.targets[0]))
