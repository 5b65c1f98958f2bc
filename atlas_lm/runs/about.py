"""What is worth knowing of where a run runs: versions that change its numbers, the machine beside them."""

import platform
import time
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from atlas_lm import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """Of the packages that results may depend on."""
    return {name: version(name) for name in PACKAGES} | {"atlas-lm": __version__}


def surroundings() -> dict[str, Any]:
    """Time and machine of one start of a run."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": platform.machine(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def check_pictures(wanted: bool) -> None:
    """Whether pictures can be drawn, before hours of work end in that question."""
    if wanted and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "pictures of results need matplotlib, which is not here; pip install 'atlas-lm[demo]'",
            name="matplotlib",
        )
