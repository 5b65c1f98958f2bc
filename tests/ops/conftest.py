"""Fixtures that tests of several ops share."""

import pytest


@pytest.fixture
def scans(monkeypatch):
    """Cuts sequences into as many runs as they have chunks for; tells how many each of them has."""
    pytest.importorskip("triton", reason="the fused form is written in Triton")
    from atlas_lm.ops.chunk_walk import fused as walk

    made = []

    def cut(sequences, each):
        made.append(each)
        return plain(sequences, each)

    plain = walk.cut
    monkeypatch.setattr(walk, "SHORTEST", 1)
    monkeypatch.setattr(walk, "cut", cut)
    return made
