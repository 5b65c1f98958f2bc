"""Arrows point one way: a room may import the rooms before it, and no others."""

import ast
import subprocess
import sys
from pathlib import Path

import atlas_lm

PACKAGE = Path(atlas_lm.__file__).parent
MAY_IMPORT = {  # room -> rooms it may use
    "ops": set(),
    "memory": {"ops"},
    "layers": {"memory", "ops"},
    "blocks": {"layers", "memory"},
    "models": {"blocks", "layers", "memory"},
    "text": set(),
    "data": {"text"},
    "stream": {"models", "memory", "text"},
    "watch": {"stream", "models", "memory", "text"},
    "doctor": {"models", "memory", "ops"},
    "experiments": {"memory", "ops"},
    "demo": {"watch", "stream", "data", "models", "text"},
    "runs": {"stream"},
    "evaluate": {"runs", "data", "stream", "models", "memory", "text"},
    "train": {"runs", "data", "stream", "models", "layers", "memory", "ops", "text"},
    "recipes": {"train", "data", "models", "memory", "text"},
    "cli": {
        "watch",
        "stream",
        "text",
        "models",
        "memory",
        "ops",
        "doctor",
        "demo",
        "experiments",
        "data",
        "runs",
        "evaluate",
        "train",
        "recipes",
    },
}


def rooms_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; write the full name"
            names = [f"{node.module}.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("atlas_lm.")}
    return found & MAY_IMPORT.keys()


def test_no_import_points_backward() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room.endswith(".py"):
            continue
        wrong += [f"{path}: {other}" for other in rooms_imported(path) - MAY_IMPORT[room] - {room}]
    assert not wrong


def test_inside_the_memory_parts_do_not_know_forms() -> None:
    """Parts and specs stand below the forms that run them."""
    forms = {
        "reference",
        "parallel",
        "chunks",
        "online",
        "pairs",
        "layout",
        "trajectory",
        "memorize",
    }
    parts = [
        "architectures",
        "features",
        "objectives",
        "windows",
        "optimizers",
        "retention",
        "spec",
    ]
    for part in [*parts, "state", "gates", "basis", "presets"]:
        tree = ast.parse((PACKAGE / "memory" / f"{part}.py").read_text())
        modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {f"atlas_lm.memory.{form}" for form in forms} & modules, part


def test_import_is_quick_because_torch_waits() -> None:
    code = "import sys, atlas_lm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
