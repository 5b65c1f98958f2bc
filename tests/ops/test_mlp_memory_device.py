"""Two-layer memories with a chunk anchor on a GPU: the full grid, real sizes, many programs per head."""

import dataclasses
import itertools

import pytest
import torch

from atlas_lm.ops.mlp_memory import why_not_sizes
from tests.ops.mlp_cases import DRAWS, Case, assert_twice_plain, draw, named, run

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def device_grid():
    """bf16, in which models train, meets every rule at every size, with Muon too; fp16 and fp32 meet every
    size once, where kernels have room for it."""
    sizes = [(64, 256, 64), (153, 256, 64), (32, 96, 24), (128, 512, 128), (256, 128, 32)]
    rules = list(itertools.product((1, 16), (False, True), (False, True)))
    for (i, (features, hidden, values)), (j, (window, momentum, gated)) in itertools.product(
        enumerate(sizes), enumerate(rules)
    ):
        turn = 5 * i + j + 1
        case = Case(
            tokens=(63, 130, 400)[turn % 3], chunk=(64, 32, 64, 16)[turn % 4], window=window,
            momentum=momentum, gated=gated, start=turn % 2 == 0, features=features, hidden=hidden,
            values=values, heads=2, batch=2,
        )  # fmt: skip
        yield torch.bfloat16, case
        if not momentum:
            yield torch.bfloat16, dataclasses.replace(case, period=(case.chunk, 8)[turn % 2])
        for dtype, shift in ((torch.float16, 0), (torch.float32, 3)):
            if j == (i + shift) % 8 and has_room(case, dtype):
                yield dtype, case


def has_room(case, dtype):
    reason = why_not_sizes(
        case.chunk, case.window, case.features, case.hidden, case.values, gated=case.gated,
        states=1 + case.momentum + case.start, element=dtype.itemsize,
    )  # fmt: skip
    return reason is None


LARGE = Case(
    tokens=400,
    chunk=64,
    window=16,
    momentum=True,
    start=True,
    features=64,
    hidden=256,
    values=64,
    heads=2,
)
DEVICE_CASES = [
    *device_grid(),
    (torch.bfloat16, dataclasses.replace(LARGE, borders=(0, 130, 131, 300, 400))),
    (torch.bfloat16, dataclasses.replace(LARGE, batch=2, before=15, past=(15, 4))),
    (torch.bfloat16, dataclasses.replace(LARGE, batch=3, length=(400, 0, 77), momentum=False)),
    (torch.bfloat16, dataclasses.replace(LARGE, objective="dot", decays=False, activation="silu")),
    (torch.bfloat16, dataclasses.replace(LARGE, window=65, gated=True)),
    (torch.bfloat16, dataclasses.replace(LARGE, norm=True)),
    (torch.bfloat16, dataclasses.replace(LARGE, norm=True, gated=True, period=64, momentum=False)),
    (torch.bfloat16, dataclasses.replace(LARGE, period=16, borders=(0, 130, 131, 300, 400))),
    (torch.bfloat16, dataclasses.replace(LARGE, period=64, batch=3, length=(400, 0, 77))),
]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    ("dtype", "case"), DEVICE_CASES, ids=lambda x: named(x) if isinstance(x, Case) else str(x)
)
def test_on_the_device(dtype, case):
    """Also the same to the last bit twice."""
    first = assert_twice_plain(case, dtype)
    again = run(case, "fused", draw(case, dtype, DRAWS - 1), dtype)
    for name in first:
        assert torch.equal(first[name], again[name]), f"{name} is not the same twice"
