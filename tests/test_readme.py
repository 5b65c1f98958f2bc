"""What the README shows works as it is printed there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block(block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for promised in re.findall(r"print\(.*#.*?(tensor\(.*?\)|\[.*?\])", block):
        assert promised in done.stdout


def test_presets_in_the_table_exist_and_none_is_missing() -> None:
    from atlas_lm.memory.presets import PRESETS

    table = README[README.index("| preset |") : README.index("`…_pairs`")]
    named = set(re.findall(r"`(\w+)`", table))
    assert named == {name for name in PRESETS if not name.endswith("_pairs")}
