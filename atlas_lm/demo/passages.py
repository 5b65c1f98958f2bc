"""The page of the demo: what every memory did at the facts and around them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from atlas_lm.demo.hidden import HiddenTale, Span
from atlas_lm.models import AtlasForCausalLM
from atlas_lm.stream import Reading
from atlas_lm.stream.atomic import write_atomically
from atlas_lm.text import Tokenizer
from atlas_lm.watch import (
    About,
    Cell,
    LayerRecord,
    Record,
    build_page,
    describe_model,
    observe,
    to_cells,
)

NOTE = (
    "The facts of the tale and some of the book around each, read from the memory that the stream had there. "
    "Lines like [token 1,234] say where a passage begins; all between the passages is left out."
)


def write_page(
    path: Path,
    model: AtlasForCausalLM,
    tokenizer: Tokenizer,
    tale: HiddenTale,
    passages: Sequence[tuple[Span, Reading]],
) -> None:
    """Read the passages once more, each from where the stream stood then, and write them as one page."""
    records: list[Record] = []
    cells: list[Cell] = []
    for span, reading in passages:
        ids = tale.read(span)
        records.append(observe(model, torch.from_numpy(ids), reading=reading))
        first, *others = to_cells(tokenizer, ids.tolist())
        gap = "\n\n" if cells else ""
        cells.append(Cell(f"{gap}[token {span.first:,}]\n{first.text}", first.tokens))
        cells += others
    record, spec = _joined(records), model.config.spec
    assert spec is not None  # observe refuses a model without a memory
    about = About(
        model=Path(model.config.name_or_path or "model").name,
        text=f"a tale in {tale.tokens:,} tokens of books",
        facts=describe_model(model),
        note=NOTE,
    )
    write_atomically(path, [build_page(record, cells, spec, about).encode()])


def _joined(records: Sequence[Record]) -> Record:
    layers = tuple(
        LayerRecord(
            wiring=same[0].wiring,
            seen={name: torch.cat([one.seen[name] for one in same]) for name in same[0].seen},
        )
        for same in zip(*(record.layers for record in records), strict=True)
    )
    return Record(
        ids=torch.cat([record.ids for record in records]),
        loss=torch.cat([record.loss for record in records]),
        layers=layers,
        start=records[0].start,
    )
