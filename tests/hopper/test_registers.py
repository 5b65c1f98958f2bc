"""What kernels take of a multiprocessor is told without a GPU."""

import pytest

pytest.importorskip("triton", reason="kernels are written in Triton")
from benchmarks import registers
from benchmarks.kernel_bench.cases import pick
from benchmarks.kernels import CASES
from benchmarks.registers import Resources


@pytest.mark.parametrize(
    ("warps", "per_thread", "shared", "programs"),
    [
        (4, 128, 0, 4),  # 65,536 registers
        (4, 129, 0, 3),  # given in steps of 8
        (4, 128, 100_000, 2),  # 232,448 bytes
        (8, 255, 0, 1),
        (1, 16, 0, 64),  # warps
    ],
)
def test_programs_side_by_side(warps, per_thread, shared, programs):
    assert Resources("kernel", warps, 1, per_thread, 0, shared, False).programs == programs


def test_kernels_are_assembled():
    [case] = pick(CASES, ["newton_schulz fused bf16"])
    found = registers.resources(registers.narrowed(case, 128, 128))
    assert [row.kernel for row in found] == ["forward_whole", "backward_whole"]
    assert all(32 < row.registers <= 255 and row.shared > 0 and row.programs for row in found)


def test_interpreted_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="interpreted kernels are not compiled; unset it"):
        registers.main(["newton_schulz"])
