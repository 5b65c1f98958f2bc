"""What runs show on a terminal while they go on, and that they leave it as they found it."""

import io
import sys
from pathlib import Path

import pytest
import torch

from atlas_lm.cli.screen import Screen
from atlas_lm.train.compare import Name, compare
from atlas_lm.train.machine import Machine
from atlas_lm.train.place import Place
from tests.train.builders import small_recipe

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_runs_one_after_the_other_share_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its line while it goes on, also one that goes wrong, and then lets go of it."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "stderr", terminal)
    machine, place = Machine(device=torch.device("cpu")), Place(out=tmp_path, workers=0)
    recipes = {
        Name("titans", "", 0): small_recipe(steps=30, diverged=0.1, patience=2),
        Name("deltanet", "", 0): small_recipe("deltanet", steps=2),
    }
    compare(recipes, place, machine, lambda n: [Screen(recipes[n], place, machine, n.folder)])
    shown = terminal.getvalue()
    assert shown.count(HIDDEN) == shown.count(SHOWN) == 2
    first, second = shown.split(SHOWN)[:2]
    assert "titans-0: step 2/30, loss" in first and "deltanet-0" not in first
    assert "deltanet-0: step 2/2, loss" in second and "titans-0" not in second
    assert "deltanet-0: exam after step 2: walks" in second
