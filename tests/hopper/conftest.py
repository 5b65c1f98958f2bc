"""Compiled kernels need a process of their own: in this one Triton either interprets or compiles."""

from pathlib import Path

import pytest

from atlas_lm.ops.backend import interpreted

HERE = Path(__file__).parent
REASON = "kernels are interpreted here; TRITON_INTERPRET=0 pytest tests/hopper, as make test does"


def pytest_collection_modifyitems(items):
    if interpreted():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Cases that other folders lend would go to a GPU where there is one."""
    from tests.ops import linear_cases, mlp_cases, test_memory_step, test_newton_schulz_fused

    for module in (linear_cases, mlp_cases, test_memory_step, test_newton_schulz_fused):
        monkeypatch.setattr(module, "DEVICE", "cpu")
