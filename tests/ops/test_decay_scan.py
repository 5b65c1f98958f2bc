"""S_t = a_t S_{t-1} + x_t: the masked matmul against the loop, at the ends of the range too."""

import pytest
import torch

from atlas_lm.ops.decay_scan import decay_scan, decay_scan_reference
from tests.builders import (
    assert_all_close,
    assert_close,
    assert_finite,
    gradients,
    leaf,
    seeded,
    wave,
)

FACTORS = {
    "random": lambda a: a,
    "zero": lambda a: torch.where(a < 0.4, 0.0, a),
    "one": lambda a: torch.where(a > 0.6, 1.0, a),
    "both": lambda a: a.round(),
    "all zero": torch.zeros_like,
    "all one": torch.ones_like,
}
LOGS = {
    "random": lambda a: a.log(),
    "zero": torch.zeros_like,
    "tiny": lambda a: -1e-14 * a,
    "very negative": lambda a: torch.where(a < 0.4, -1e4, a.log()),
    "minus infinity": lambda a: torch.where(a < 0.4, -torch.inf, a.log()),
}


def draw(tokens, shape=(2, 3), width=4):
    g = seeded(tokens)
    x = torch.randn(*shape, tokens, width, generator=g, dtype=torch.float64)
    initial = torch.randn(*shape, width, generator=g, dtype=torch.float64)
    return x, initial, torch.rand(*shape, tokens, generator=g, dtype=torch.float64)


def run(scan, x, initial, factor):
    """Outputs and the gradients of all three inputs."""
    inputs = dict(x=leaf(x), initial=leaf(initial), factor=leaf(factor))
    y = scan(**inputs)
    return {"S": y.detach()} | gradients(wave(y), inputs)


def plain(x, initial, factor):
    return decay_scan(x, initial, decay=factor)


def logarithmic(x, initial, factor):
    return decay_scan(x, initial, log_decay=factor)


def loop(x, initial, factor):
    return decay_scan_reference(x, initial, decay=factor)


def loop_of_logs(x, initial, factor):
    return decay_scan_reference(x, initial, decay=factor.exp())


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("kind", FACTORS)
def test_factors_match_the_loop(kind, tokens):
    x, initial, a = draw(tokens)
    a = FACTORS[kind](a)
    assert_all_close(run(plain, x, initial, a), run(loop, x, initial, a), 1e-13)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("kind", LOGS)
def test_logs_match_the_loop(kind, tokens):
    x, initial, a = draw(tokens)
    log = LOGS[kind](a)
    assert_all_close(run(logarithmic, x, initial, log), run(loop_of_logs, x, initial, log), 1e-13)


@pytest.mark.parametrize("kind", FACTORS)
def test_gradient_matches_finite_differences_at_zero_factors(kind):
    x, initial, a = draw(5, shape=(2,), width=2)
    inputs = (leaf(x), leaf(initial), leaf(FACTORS[kind](a)))
    assert torch.autograd.gradcheck(plain, inputs)


@pytest.mark.parametrize("kind", ["random", "zero", "very negative"])
def test_log_gradient_matches_finite_differences(kind):
    x, initial, a = draw(5, shape=(2,), width=2)
    inputs = (leaf(x), leaf(initial), leaf(LOGS[kind](a)))
    assert torch.autograd.gradcheck(logarithmic, inputs)


def test_a_scan_continues_from_its_last_state():
    x, initial, a = draw(20)
    whole = plain(x, initial, a)
    first = plain(x[..., :7, :], initial, a[..., :7])
    second = plain(x[..., 7:, :], first[..., -1, :], a[..., 7:])
    assert_close("cut", torch.cat([first, second], dim=-2), whole, 1e-14)


def test_fp32_logs_keep_a_state_over_a_long_tile():
    """Sums of logs are taken range by range: huge logs early on cost later ranges nothing."""
    x, initial, a = draw(200, shape=(), width=2)
    log = torch.where(torch.arange(200) < 100, -1e6, 1e-3 * a.log())
    truth = loop_of_logs(x, initial, log)
    got = logarithmic(x.float(), initial.float(), log.float())
    assert_finite({"S": got})
    assert_close("S", got.double(), truth, 2e-6)


def tile_products(log_decay, tile=10):
    """What each tile of steps leaves of a value of one, in fp32. log_decay: [n] -> [n / tile]"""
    logs = log_decay.reshape(-1, tile)
    ones, nothing = torch.ones(len(logs), 1), torch.zeros(len(logs), tile, 1)
    return decay_scan(nothing, ones, log_decay=logs)[:, -1, 0]


def product(factors, tile=10):
    """Tiles of tiles, until one factor is left."""
    while len(factors) > 1:
        factors = factors.reshape(-1, tile)
        ones, nothing = torch.ones(len(factors), 1), torch.zeros(*factors.shape, 1)
        factors = decay_scan(nothing, ones, decay=factors)[:, -1, 0]
    return factors.item()


@pytest.mark.parametrize(("log_decay", "left"), [(0.0, 1.0), (-1e-14, 1.0), (-1e-7, 0.36788)])
def test_ten_million_fp32_steps_in_tiles(log_decay, left):
    """A closed gate loses less than 1e-6 of a value; an open one loses what it should."""
    with torch.inference_mode():
        million = torch.full((1_000_000,), log_decay)
        tiles = tile_products(million).repeat(10)
        assert tiles.numel() * 10 == 10_000_000
        kept = product(tiles)
    tolerance = 1e-6 if left == 1.0 else 0.03  # exp(-1e-6) has four good digits in fp32
    assert abs(kept - left) < tolerance


def test_exactly_one_kind_of_decay_is_wanted():
    x, initial, a = draw(3)
    with pytest.raises(ValueError, match="exactly one of decay and log_decay; pass one"):
        decay_scan(x, initial)
    with pytest.raises(ValueError, match="exactly one of decay and log_decay; pass one"):
        decay_scan(x, initial, decay=a, log_decay=a.log())
