"""Every law on every preset and on points between them, in fp64, at rounding error."""

import pytest

from atlas_lm.doctor import RuleSubject, judge, laws_for, preset_subject
from atlas_lm.doctor.subjects import small_spec
from atlas_lm.memory import presets
from tests.laws.variants import TOKENS, VARIANTS, variant_subject

LAWS = list(laws_for(preset_subject("titans")))
NOT_APPLICABLE = {  # every exception is written down here, with the reason that the doctor gives
    ("slopes", "softmax_attention"): "kept pairs have no weight matrix",
    ("slopes", "deep_transformer_pairs"): "kept pairs have no weight matrix",
    ("slopes", "swdt_pairs"): "kept pairs have no weight matrix",
    ("slopes", "dot_pairs"): "kept pairs have no weight matrix",
    ("slopes", "pairs_of_pairs"): "kept pairs have no weight matrix",
    ("slopes", "normalised_window"): "kept pairs have no weight matrix",
    ("forms", "renormalised_every_token"): "one weight matrix per token",
    ("forms", "deep_online"): "is not linear",
} | {("paper", name): "no paper gives this rule" for name in VARIANTS}


def check(subject, law: str) -> None:
    verdict = judge(subject, law)
    reason = NOT_APPLICABLE.get((law, subject.name))
    if reason:
        assert verdict.status == "not applicable" and reason in verdict.note
    else:
        assert verdict.status == "holds", verdict


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets(name: str, law: str) -> None:
    check(RuleSubject(name=name, spec=small_spec(name), length=TOKENS), law)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", VARIANTS)
def test_between_presets(name: str, law: str) -> None:
    check(variant_subject(name), law)
