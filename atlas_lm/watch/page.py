"""A record as one page: text coloured by what the memory did, in a single file that opens anywhere."""

import base64
import dataclasses
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_lm.memory import MemorySpec
from atlas_lm.memory.optimizers import ImplicitDescent, Momentum, Muon
from atlas_lm.memory.retention import DecayToStart
from atlas_lm.memory.spec import PARTS
from atlas_lm.models import AtlasForCausalLM
from atlas_lm.models.counts import parameters
from atlas_lm.models.fingerprint import fingerprint
from atlas_lm.watch.cells import Cell, show
from atlas_lm.watch.record import LayerRecord, Record

CODES = (
    65534  # logarithmic steps of a packed number; 0 stands for zero, the last code for no number
)
NO_NUMBER = 65535
HEADS = ("surprise_max", "write_max")  # told on hovering, beside the mean over heads


@dataclass(frozen=True, kw_only=True)
class About:
    """What the page says about its origin."""

    model: str
    text: str
    facts: dict[str, str]  # name -> value, in the order in which they are shown
    first: int = 0  # place of the first token in the text
    note: str = ""  # what a reader must know first, e.g. that this is a part of a text


def build_page(record: Record, cells: Sequence[Cell], spec: MemorySpec, about: About) -> str:
    """The HTML: everything inside it, nothing fetched, every text escaped.

    Args:
        cells: as `to_cells` makes them; together they hold the record's tokens.
        spec: the rule of the model's memory, for the explanations.
    """
    counts = [cell.tokens for cell in cells]
    if sum(counts) != len(record.ids):
        raise ValueError(
            f"the cells hold {sum(counts)} tokens, the record {len(record.ids)}; make them of the same ids"
        )
    wide = int(record.ids.max()) > 65535
    data = {
        "model": _line(about.model),
        "text_name": _line(about.text),
        "facts": {_line(n): _line(value) for n, value in (about.facts | rule(spec)).items()},
        "note": _line(about.note),
        "first": about.first,
        "tokens": len(record.ids),
        "ids": _base64(record.ids.numpy(), "<u4" if wide else "<u2"),
        "wide": wide,
        "text": "".join(cell.text for cell in cells),
        "lengths": _base64([len(cell.text.encode("utf-16-le")) // 2 for cell in cells], "<u2"),
        "counts": _base64(counts, "<u2"),
        "quantities": explain(record, spec),
        "loss": pack(record.loss),
        "layers": [_layer(layer) for layer in record.layers],
    }
    template = resources.files("atlas_lm.watch").joinpath("page.html").read_text(encoding="utf-8")
    title = html.escape(_line(f"{about.text}, read by {about.model}"))
    return template.replace("<!--title-->", title).replace("<!--data-->", _json(data))


def describe_model(model: AtlasForCausalLM) -> dict[str, str]:
    """What a page says of a model, as facts of `About`."""
    groups = [(len(list(same)), name) for name, same in groupby(model.config.blocks)]
    return {
        "fingerprint": fingerprint(model),
        "parameters": f"{parameters(model.config)['total']:,}",
        "blocks": ", ".join(f"{count} x {name}" for count, name in groups),
    }


def _line(text: str) -> str:
    """A name as one line in which all can be seen."""
    return show(" ".join(text.split()))


def _layer(layer: LayerRecord) -> dict[str, Any]:
    """Retention lies so close to one that its distance from one is stored."""
    numbers = {n: 1 - v if n == "retention" else v for n, v in layer.seen.items()}
    return {"wiring": layer.wiring, "seen": {n: pack(v) for n, v in numbers.items()}}


def pack(values: Tensor) -> dict[str, Any]:
    """Numbers from zero on as 16 bits each, equal steps of their logarithm: at most 0.1 % off.

    Code 0 is zero, code c in 1 .. 65534 is exp(low + (c - 1) step), code 65535 is no (finite) number.
    """
    numbers = values.double().clamp_min(0)
    finite, positive = numbers.isfinite(), numbers.isfinite() & (numbers > 0)
    logs = numbers[positive].log()
    low, high = (float(logs.min()), float(logs.max())) if len(logs) else (0.0, 0.0)
    step = (high - low) / (CODES - 1)
    codes = torch.where(finite, 0, NO_NUMBER)
    codes[positive] = 1 + ((logs - low) / (step or 1.0)).round().long()
    return {"low": low, "step": step, "codes": _base64(codes.numpy(), "<u2")}


def _base64(numbers: Sequence[int] | np.ndarray, kind: str) -> str:
    return base64.b64encode(np.asarray(numbers).astype(kind).tobytes()).decode("ascii")


def _json(data: dict[str, Any]) -> str:
    """Plain ASCII in which no tag can begin."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def rule(spec: MemorySpec) -> dict[str, str]:
    """The parts of a rule in words, fields that differ from their default included."""
    found = {"heads": f"{spec.heads}, keys {spec.key_dim} and values {spec.value_dim} wide"}
    for axis in PARTS:
        part = getattr(spec, axis)
        changed = [
            f"{field.name} {getattr(part, field.name)}"
            for field in dataclasses.fields(part)
            if getattr(part, field.name) != field.default
        ]
        kind = [] if axis in ("window", "timing") else [part.kind.replace("_", " ")]
        found[axis] = ", ".join(kind + [one.replace("_", " ") for one in changed]) or "default"
    return found


def explain(record: Record, spec: MemorySpec) -> list[dict[str, str]]:
    """The quantities on the page in order: what each is called, what it means, how its scale ends read."""
    seen = {name for layer in record.layers for name in layer.seen}
    return [one for one in _quantities(spec) if one["name"] in seen | {"loss"}]


def _quantities(spec: MemorySpec) -> list[dict[str, str]]:
    forgets = (
        "toward its learned start" if isinstance(spec.retention, DecayToStart) else "toward zero"
    )
    return [
        {
            "name": "surprise",
            "label": "surprise",
            "sign": "|G|",
            "means": "How far what the memory predicts is from what it now reads: the size of the gradient "
            "with which it learns this token.",
            "low": "expected",
            "high": "surprising",
        },
        {
            "name": "write",
            "label": "write strength",
            "sign": "η |G|",
            "means": "How hard this token is written: its surprise times the step η that the layer chose "
            f"for it. {_after_the_write(spec)}",
            "low": "hardly written",
            "high": "written hard",
        },
        {
            "name": "retention",
            "label": "retention",
            "sign": "α",  # noqa: RUF001
            "means": "What the layer keeps of its memory when this token comes. 1 keeps everything; below "
            f"it, the memory fades {forgets}.",
            "low": "keeps",
            "high": "forgets",
        },
        {
            "name": "memory",
            "label": "memory size",
            "sign": "|M|",
            "means": "The size of the memory's weights after this token: how full it is.",
            "low": "small",
            "high": "large",
        },
        {
            "name": "momentum",
            "label": "momentum",
            "sign": "|S|",
            "means": "What earlier surprises still push: the memory moves on along it after a surprising "
            "token is over.",
            "low": "at rest",
            "high": "on the move",
        },
        {
            "name": "loss",
            "label": "the model's loss",
            "sign": "-log p",
            "means": "How little the whole model expected this token, in nats: 0 is certain, 0.7 is one in "
            "two, 4.6 one in a hundred. Not of one layer, and not what the memories learn from.",
            "low": "foreseen",
            "high": "unforeseen",
        },
    ]


def _after_the_write(spec: MemorySpec) -> str:
    if isinstance(spec.optimizer, Muon):
        return (
            "Such pushes are summed, and Newton-Schulz brings their sum to one size before it moves the "
            "memory: compare tokens, not layers."
        )
    if isinstance(spec.optimizer, Momentum):
        return "Momentum carries it on through the tokens after it."
    if isinstance(spec.optimizer, ImplicitDescent):
        return "The step is the one solved implicitly, η / (1 + η)."
    return "This is the length of the step that the memory takes."
