"""X = R + N X against forward substitution."""

import pytest
import torch

from atlas_lm.ops.triangular_solve import triangular_solve, triangular_solve_reference
from tests.builders import assert_all_close, assert_close, gradients, leaf, seeded, wave


def draw(size, shape=(2, 3), width=4):
    g = seeded(size)
    coupling = torch.randn(*shape, size, size, generator=g, dtype=torch.float64)
    return coupling, torch.randn(*shape, size, width, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_matches_forward_substitution(size):
    def run(solve):
        coupling, right = draw(size)
        inputs = dict(coupling=leaf(0.3 * coupling), right=leaf(right))
        x = solve(**inputs)
        return {"X": x} | gradients(wave(x), inputs)

    assert_all_close(run(triangular_solve), run(triangular_solve_reference), 1e-11)


def test_solves_the_system():
    coupling, right = draw(9)
    x = triangular_solve(coupling, right)
    assert_close("X", right + coupling.tril(-1) @ x, x, 1e-12)


@pytest.mark.parametrize("solve", [triangular_solve, triangular_solve_reference])
@pytest.mark.parametrize("garbage", [5.0, torch.inf, torch.nan])
def test_diagonal_and_upper_part_are_ignored(solve, garbage):
    coupling, right = draw(6)
    above = torch.ones(6, 6, dtype=torch.bool).triu()
    dirty = leaf(torch.where(above, garbage, coupling))
    x = solve(dirty, right)
    assert torch.equal(x, solve(torch.where(above, 0.0, coupling), right))
    grad = torch.autograd.grad(wave(x), dirty)[0]
    assert bool((grad[..., above] == 0).all())
    assert bool((grad[..., ~above] != 0).all())


def test_gradient_matches_finite_differences():
    coupling, right = draw(5, shape=(2,), width=2)
    assert torch.autograd.gradcheck(triangular_solve, (leaf(coupling), leaf(right)))


def test_no_coupling_returns_the_right_side():
    _, right = draw(5)
    assert torch.equal(triangular_solve(torch.zeros(2, 3, 5, 5, dtype=torch.float64), right), right)
