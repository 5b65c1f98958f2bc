"""The doctor: holds rules of ours and layers of anybody's to the laws of a causal memory."""

from atlas_lm.doctor.report import Verdict, as_records, as_table, examine, judge, laws_for, passed
from atlas_lm.doctor.subjects import LayerSubject, RuleSubject, load_layer, preset_subject

__all__ = [
    "LayerSubject",
    "RuleSubject",
    "Verdict",
    "as_records",
    "as_table",
    "examine",
    "judge",
    "laws_for",
    "load_layer",
    "passed",
    "preset_subject",
]
