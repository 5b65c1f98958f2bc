"""Watch a memory while it reads: a record of every token, and a page that shows it."""

from atlas_lm.watch.cells import Cell, to_cells
from atlas_lm.watch.page import About, build_page, describe_model
from atlas_lm.watch.record import LayerRecord, Record, observe

__all__ = [
    "About",
    "Cell",
    "LayerRecord",
    "Record",
    "build_page",
    "describe_model",
    "observe",
    "to_cells",
]
