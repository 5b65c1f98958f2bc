"""Every example is short and runs."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {"train_recall.py": ["{folder}/model", "--steps", "2"]}
PROMISED = {
    "remember.py": ["k is 7 after 100012 tokens", "b is 4 still", "b is 9 in one, 4 in the other"],
    "hugging_face.py": ["96 tokens read", "generated ["],
    "train_recall.py": ["step 0:"],
}  # fmt: skip
NEEDS = {"titans_pytorch_layers.py": "titans_pytorch"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name], reason="examines a package that is not installed")
    arguments = [a.format(folder=tmp_path) for a in ARGUMENTS.get(path.name, [])]
    done = subprocess.run(
        [sys.executable, path, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in PROMISED.get(path.name, []):
        assert line in done.stdout
