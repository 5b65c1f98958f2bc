"""What the README shows works as it is printed there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block(block: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "recall-tiny", tmp_path / "examples" / "recall-tiny")
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    printed = iter(done.stdout.splitlines())
    for comment in re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE):
        promised = re.search(r"tensor\(.*?\)|\[.*?\]|^\d+", comment)
        line = next(printed)
        assert promised is None or promised[0] == line


def test_presets_in_the_table_exist_and_none_is_missing() -> None:
    from atlas_lm.memory.presets import PRESETS

    table = README[README.index("| preset |") : README.index("`…_pairs`")]
    named = set(re.findall(r"`(\w+)`", table))
    assert named == {name for name in PRESETS if not name.endswith("_pairs")}
