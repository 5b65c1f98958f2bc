"""Matrix memories with a chunk anchor on a GPU: the full grid, real sizes, more numbers than int32 counts."""

import dataclasses
import itertools

import pytest
import torch

from atlas_lm.ops.linear_memory import linear_memory
from tests.ops.judging import distance
from tests.ops.linear_cases import (
    Case,
    assert_twice_plain,
    draw,
    named,
    run,
)


def device_grid():
    """bf16, in which models train, meets every rule at every size; fp16 and fp32 run the same code but for
    the products, and meet every size once. Lengths do not enter the compiled code, so they take turns."""
    sizes = [(32, 32), (64, 128), (72, 40), (128, 128), (153, 64), (256, 256)]
    rules = list(itertools.product((1, 16), (False, True)))
    for (i, (features, values)), (j, (window, momentum)) in itertools.product(
        enumerate(sizes), enumerate(rules)
    ):
        turn = 5 * i + j + 1
        case = Case(
            tokens=(63, 130, 500)[turn % 3], chunk=(64, 32, 64, 16)[turn % 4], window=window,
            momentum=momentum, features=features, values=values, heads=2, batch=2,
        )  # fmt: skip
        yield torch.bfloat16, case
        for dtype, shift in ((torch.float16, 0), (torch.float32, 1)):
            if j == (i + shift) % 4:
                yield dtype, case


LARGE = Case(tokens=500, chunk=64, window=16, momentum=True, features=128, values=128, heads=2)
DEVICE_CASES = [
    *device_grid(),
    (torch.bfloat16, dataclasses.replace(LARGE, borders=(0, 130, 131, 400, 500))),
    (torch.bfloat16, dataclasses.replace(LARGE, batch=2, before=15, past=(15, 4))),
    (torch.bfloat16, dataclasses.replace(LARGE, batch=3, length=(500, 0, 77), momentum=False)),
    (torch.bfloat16, dataclasses.replace(LARGE, window=1, keep="checkpoints")),
    (torch.bfloat16, dataclasses.replace(LARGE, objective="dot", decays=False, warm=False)),
    (torch.bfloat16, dataclasses.replace(LARGE, features=256, values=256, chunk=16, window=17)),
    (torch.bfloat16, dataclasses.replace(LARGE, features=256, values=64, chunk=32, momentum=False)),
    (torch.bfloat16, dataclasses.replace(LARGE, features=153, values=64, before=15, past=(3,))),
]


def on_the_device(case, dtype):
    wanted = run(case, "parallel", draw(case, dtype), torch.float64)
    first = assert_twice_plain(case, dtype, wanted)
    again = run(case, "fused", draw(case, dtype), dtype)
    for name in first:
        assert torch.equal(first[name], again[name]), f"{name} is not the same twice"


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    ("dtype", "case"), DEVICE_CASES, ids=lambda x: named(x) if isinstance(x, Case) else str(x)
)
def test_on_the_device(dtype, case):
    on_the_device(case, dtype)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(LARGE, tokens=3000, window=1, momentum=False),
        dataclasses.replace(LARGE, tokens=3000, features=64, values=64),
        dataclasses.replace(LARGE, tokens=3000, features=256, values=72, keep="checkpoints"),
    ],
    ids=named,
)
def test_many_runs_on_the_device(case, dtype, scans):
    on_the_device(case, dtype)
    assert min(scans) > 1


@pytest.mark.gpu
@pytest.mark.slow
@gpu
def test_more_numbers_than_int32_can_count():
    """The last tokens of 2^31 numbers and some more, against the same tokens by themselves."""
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of GPU memory")
    torch.manual_seed(0)
    border, rows = 2**21, (1, 2**21 + 64 * 3 + 17, 8)
    q, k, v = (torch.randn(*rows, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    for x in (q, k):
        x /= x.norm(dim=-1, keepdim=True)
    eta, theta = (torch.rand(rows, device="cuda") / 2 for _ in range(2))
    given = dict(q=q, k=k, v=v, eta=eta, theta=theta, log_alpha=-eta / 4)
    with torch.no_grad():
        y, end = linear_memory(**given, form="fused")
        wanted = y[:, border:].clone()
        del y
        early = linear_memory(**{n: x[:, :border] for n, x in given.items()}, form="fused")[1]
        late = {n: x[:, border:] for n, x in given.items()}
        y, same = linear_memory(**late, memory=early.memory, momentum=early.momentum, form="fused")
    assert distance(y, wanted) < 2e-2
    assert distance(same.memory, end.memory) < 2e-2
