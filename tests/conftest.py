"""One thread per process, of tests and of what they start: sizes are tiny, and workers run side by side.

Without a GPU, Triton kernels run under its interpreter, which must be said before Triton is imported; with
TRITON_INTERPRET=0 the tests of compiled kernels (tests/hopper) run instead.

Data is that of the package, whatever ATLAS_DATA says; tests of the large sets ask for `large_data`.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and NumPy are imported

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import quicken

    quicken()

LARGE = os.environ.pop("ATLAS_DATA", None)


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is made of data goes to a folder of this run, which its processes share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["XDG_CACHE_HOME"] = str(shared / "cache")


@pytest.fixture
def large_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the large data; tests that want it are skipped where it is not."""
    if LARGE is None or not (Path(LARGE) / "books" / "test.tar.xz").is_file():
        pytest.skip("needs the large data: set ATLAS_DATA to its folder (see `atlas data`)")
    monkeypatch.setenv("ATLAS_DATA", LARGE)
    return Path(LARGE)
