"""A small model and a memory file of it, for the tests of files."""

from pathlib import Path

import pytest

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.stream.files import save_memory
from tests.models.builders import small_model
from tests.stream.readings import read


@pytest.fixture(scope="module")
def model() -> AtlasForCausalLM:
    return small_model("mag", "titans")


@pytest.fixture
def file(tmp_path: Path, model: AtlasForCausalLM) -> Path:
    path = tmp_path / "a.mem"
    save_memory(path, model, read(model))
    return path
