"""Monomials whose inner product is a polynomial of q.k."""

import math

import pytest
import torch

from atlas_lm.ops.poly_features import poly_features, poly_features_reference, poly_width
from tests.builders import assert_all_close, assert_close, gradients, leaf, seeded, wave

SIZES = [(1, 3), (2, 2), (3, 1), (4, 4), (5, 3), (8, 2)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_inner_product_is_a_polynomial_of_the_inner_product(size, degree):
    q, k, c = draw(6, size), draw(6, size, seed=1), draw(degree + 1, seed=2)
    got = (poly_features(q, c, degree) * poly_features(k, c, degree)).sum(-1)
    product = (q * k).sum(-1)
    assert_close("kernel", got, sum(c[i] ** 2 * product**i for i in range(degree + 1)), 1e-13)


@pytest.mark.parametrize(("size", "degree"), SIZES)
def test_matches_the_reference_in_order_and_gradient(size, degree):
    def run(function):
        inputs = dict(x=leaf(draw(2, 3, 5, size)), c=leaf(draw(3, 1, degree + 1, seed=1)))
        y = function(inputs["x"], inputs["c"], degree)
        return {"phi": y} | gradients(wave(y), inputs)

    assert_all_close(run(poly_features), run(poly_features_reference), 1e-12)


def test_order_is_that_of_sorted_index_tuples():
    """Two variables, degree 2: 1, x, y, xx, xy, yy."""
    x, c = torch.tensor([3.0, 5.0]), torch.tensor([7.0, 11.0, 13.0])
    wanted = torch.tensor([7, 33, 55, 13 * 9, 13 * math.sqrt(2) * 15, 13 * 25])
    assert_close("order", poly_features(x, c, 2), wanted, 1e-6)
    assert_close("order", poly_features_reference(x, c, 2), wanted, 1e-6)


@pytest.mark.parametrize(("size", "degree"), SIZES)
def test_width_is_the_number_of_features(size, degree):
    features = poly_features(draw(size), draw(degree + 1), degree)
    assert features.shape == (poly_width(size, degree),)
    assert poly_width(16, 2) == 153


@pytest.mark.parametrize(("size", "degree"), [(3, 1), (3, 2), (2, 4)])
def test_gradient_matches_finite_differences_at_zero_too(size, degree):
    x = torch.cat([draw(2, size), torch.zeros(1, size, dtype=torch.float64)])
    inputs = (leaf(x), leaf(draw(degree + 1, seed=1)))
    assert torch.autograd.gradcheck(lambda x, c: poly_features(x, c, degree), inputs)


def test_amplitudes_broadcast_over_heads():
    x, c = draw(2, 3, 5, 4), draw(3, 1, 3, seed=1)
    whole = poly_features(x, c, 2)
    for head in range(3):
        assert_close("head", whole[:, head], poly_features(x[:, head], c[head, 0], 2), 1e-15)


def test_a_first_call_in_inference_mode_does_not_spoil_training():
    """The cached tables must not be tensors that autograd refuses later."""
    x, c = draw(4, 7, seed=3), draw(6, seed=4)  # sizes that no other test uses
    with torch.inference_mode():
        poly_features(x, c, 5)
    x, c = leaf(x), leaf(c)
    poly_features(x, c, 5).sum().backward()
    assert bool(x.grad.isfinite().all())
