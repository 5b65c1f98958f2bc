"""The doctor finds what is wrong, names the right law, and leaves honest layers alone."""

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from atlas_lm.cli.main import app
from atlas_lm.doctor import (
    LayerSubject,
    as_records,
    as_table,
    judge,
    laws_for,
    passed,
    preset_subject,
)
from atlas_lm.memory import stretch
from tests.doctor import layers

FAULTS = {
    layers.SymmetricConvolution: {"causality"},
    layers.ChunkEndReads: {"causality"},
    layers.SharedMemory: {"rows", "padding"},  # padded apart, rows meet at other times
    layers.WindowCut: {"cuts"},
    layers.MomentumLost: {"cuts"},
    layers.PaddingDecays: {"padding"},
    layers.WritesOnlyInTraining: {"modes"},
    layers.DeadValues: {"gradients"},
    layers.NoEpsilon: {"finite"},
    layers.BreaksOnShortPieces: {"cuts"},
}


def examine(layer: type) -> dict[str, str]:
    subject = LayerSubject(layer.__name__, layer(), width=layers.WIDTH, length=14)
    return {law: judge(subject, law).status for law in laws_for(subject)}


def broken(found: dict[str, str]) -> set[str]:
    return {law for law, status in found.items() if status in ("broken", "error")}


def test_an_honest_layer_passes_every_law() -> None:
    found = examine(layers.Honest)
    assert found.pop("packing") == "not applicable"  # it takes no packed sequences
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize("layer", FAULTS, ids=lambda layer: layer.__name__)
def test_each_fault_is_flagged_under_its_law(layer: type) -> None:
    assert broken(examine(layer)) == FAULTS[layer]


def test_a_memory_that_is_never_written_is_flagged() -> None:
    assert {"one_token", "gradients"} <= broken(examine(layers.NeverWrites))


def test_a_state_hidden_in_the_module_is_flagged() -> None:
    assert "cuts" in broken(examine(layers.HiddenState))


def test_a_window_cut_at_chunk_borders_is_flagged_in_our_own_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commonest mistake: slopes of the halo dropped instead of taken anew at the new anchor."""
    honest = stretch.Stretch.writes

    def cut(self: stretch.Stretch, spec: object) -> torch.Tensor:
        writes = honest(self, spec).clone()
        writes[..., : spec.window.size - 1] = 0
        return writes

    monkeypatch.setattr(stretch.Stretch, "writes", cut)
    subject = preset_subject("omeganet")
    assert {judge(subject, law).status for law in ("forms", "cuts", "paper")} == {"broken"}


def test_a_figure_that_is_not_a_number_can_be_printed_and_written() -> None:
    subject = LayerSubject("nan", lambda x: x * torch.nan, width=4, length=5)
    verdicts = [judge(subject, law) for law in laws_for(subject)]
    assert {v.law for v in verdicts if v.status == "broken"} >= {"causality", "rows", "one_token"}
    console = Console(width=120, record=True)
    console.print(as_table(verdicts, 120))
    assert "inf" in console.export_text()
    assert json.loads(json.dumps(as_records(verdicts), allow_nan=False))


def test_a_layer_without_state_or_mask_says_why_laws_do_not_apply() -> None:
    subject = LayerSubject("plain", torch.nn.Linear(8, 8), width=8, length=6)
    verdicts = {law: judge(subject, law) for law in laws_for(subject)}
    for law in ("cuts", "padding", "save_load"):
        assert verdicts[law].status == "not applicable"
        assert "takes no" in verdicts[law].note
    assert verdicts["one_token"].status == "broken"  # a linear layer remembers nothing


def test_a_layer_that_fails_is_an_error_not_a_crash() -> None:
    subject = LayerSubject("wrong", lambda x: x.sum(), width=8, length=6)
    verdict = judge(subject, "causality")
    assert verdict.status == "error"
    assert "wanted a tensor" in verdict.note
    assert not passed([verdict])


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_command_exits_zero_on_a_sound_preset() -> None:
    result = run("--preset", "deltanet", "--json")
    assert result.exit_code == 0
    records = json.loads(result.stdout)
    assert {record["status"] for record in records} == {"holds"}
    assert max(r["figure"] for r in records if r["law"] == "forms") < 1e-12


def test_command_exits_one_on_a_broken_layer_and_names_the_law() -> None:
    path = "tests.doctor.layers:MomentumLost"
    result = run("--layer", path, "--width", str(layers.WIDTH), "--length", "10")
    assert result.exit_code == 1
    assert "broken: MomentumLost, cuts" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "unknown"], "wanted one of"),
        ([], "nothing to examine"),
        (["--layer", "no_such_module:thing"], "cannot load"),
        (["--layer", "nonsense"], "package.module:factory"),
        (["--preset", "titans", "--dtype", "int8"], "wanted one of"),
    ],
)
def test_command_says_what_it_wants(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
