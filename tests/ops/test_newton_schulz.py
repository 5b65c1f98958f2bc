"""Newton-Schulz by matrix products against the same polynomials on singular values."""

import math
import subprocess
import sys

import pytest
import torch

from atlas_lm.ops.newton_schulz import (
    SCHEDULES,
    newton_schulz,
    newton_schulz_reference,
    schedule,
)
from tests.builders import assert_close, leaf, seeded

SHAPES = {
    "square": (2, 5, 5),
    "wide": (2, 3, 7),
    "tall": (2, 7, 3),
    "row": (1, 4),
    "column": (4, 1),
}


def draw(shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def spread(lowest=1e-2, count=400):
    """Rotated 2 x 2 matrices of Frobenius norm one: singular values s and sqrt(1 - s^2)."""
    s = torch.logspace(math.log10(lowest), math.log10(0.5**0.5), count, dtype=torch.float64)
    sigma = torch.stack([s, (1 - s * s).sqrt()], dim=-1)
    u, v = (torch.linalg.qr(draw((count, 2, 2), seed)).Q for seed in (1, 2))
    return (u * sigma.unsqueeze(-2)) @ v.mT


def deviation(matrix):
    """The largest distance of a singular value from one."""
    return (torch.linalg.svdvals(matrix) - 1).abs().max().item()


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", SHAPES)
def test_matches_the_singular_values(kind, name, steps):
    matrix = draw(SHAPES[kind])
    got = newton_schulz(matrix, steps, name=name, eps=1e-3)
    assert_close(kind, got, newton_schulz_reference(matrix, steps, name=name, eps=1e-3), 1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_large_eps_is_part_of_the_result(name):
    """eps of the size of the matrix must show, in both forms alike."""
    matrix = draw((4, 6))
    near, far = (newton_schulz(matrix, 3, name=name, eps=eps) for eps in (1e-7, 50.0))
    assert (near - far).abs().max() > 1e-2
    assert_close("far", far, newton_schulz_reference(matrix, 3, name=name, eps=50.0), 1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", ["square", "wide", "tall"])
def test_gradient_matches_finite_differences(kind, name):
    matrix = leaf(draw(SHAPES[kind])[0])
    assert torch.autograd.gradcheck(lambda m: newton_schulz(m, 3, name=name, eps=1e-2), (matrix,))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", ["square", "wide", "tall"])
def test_zero_gives_zero_and_the_gradient_of_its_linear_part(kind, name):
    matrix = torch.zeros(SHAPES[kind], dtype=torch.float64, requires_grad=True)
    y = newton_schulz(matrix, 4, name=name, eps=1e-2)
    assert bool((y == 0).all())
    weight = draw(SHAPES[kind])
    (grad,) = torch.autograd.grad((weight * y).sum(), matrix)
    slope = math.prod(a for a, _, _ in schedule(name, 4)) / 1e-2
    assert_close("gradient", grad, slope * weight, 1e-12)


def test_zero_matrix_beside_others_has_finite_gradients():
    matrix = leaf(torch.stack([torch.zeros(3, 4), torch.randn(3, 4, generator=seeded(0))]))
    newton_schulz(matrix, 5).square().sum().backward()
    assert bool(matrix.grad.isfinite().all())
    assert bool((matrix.grad[0] == 0).all())  # the square is flat at zero


def test_muon_lands_near_one_and_stays_away_from_it():
    matrices = spread()
    for steps in range(5, 30):
        sigma = torch.linalg.svdvals(newton_schulz(matrices, steps, eps=1e-12))
        assert sigma.min() >= 0.68 and sigma.max() <= 1.14, steps
        assert (sigma - 1).abs().max() > 0.1, "muon's coefficients do not converge"


@pytest.mark.parametrize(("name", "steps"), [("cubic", 24), ("polar_express", 12)])
def test_the_other_schedules_converge(name, steps):
    """Every further step brings the worst singular value nearer to one."""
    matrices, before = spread(), 1.0
    for k in range(1, steps + 1):
        now = deviation(newton_schulz(matrices, k, name=name, eps=1e-12))
        assert now <= before + 1e-5, k
        before = now
    assert before < 1e-9


@pytest.mark.parametrize("name", SCHEDULES)
def test_scale_of_the_matrix_does_not_matter(name):
    matrix = draw((4, 6))
    got, wanted = (newton_schulz(c * matrix, 5, name=name, eps=1e-15) for c in (1e-4, 1e4))
    assert_close("scale", got, wanted, 1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_steps_is_the_identity(name):
    matrix = draw((2, 7, 3))
    assert torch.equal(newton_schulz(matrix, 0, name=name), matrix)
    assert torch.equal(newton_schulz_reference(matrix, 0, name=name), matrix)


def test_transposed_in_transposed_out():
    matrix = draw((2, 7, 3))
    assert_close("transpose", newton_schulz(matrix.mT, 5), newton_schulz(matrix, 5).mT, 1e-13)


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [("fast", 5, "schedule is 'fast', wanted one of muon"), ("muon", -1, "steps is -1, wanted 0")],
)
def test_unknown_schedules_are_refused(name, steps, words):
    with pytest.raises(ValueError, match=words):
        newton_schulz(torch.eye(2), steps, name=name)


def test_forms_are_refused_where_they_cannot_run():
    with pytest.raises(ValueError, match="form is 'fast', wanted 'auto' or one of parallel, fused"):
        newton_schulz(torch.eye(2), 5, form="fast")
    with pytest.raises(ValueError, match=r"no fused form here: .*fp64; use form='parallel'"):
        newton_schulz(draw((3, 4)), 5, form="fused")


def test_auto_is_the_parallel_form_on_the_cpu():
    matrix = draw((2, 4, 6)).float()
    got = newton_schulz(matrix, 5)
    assert torch.equal(got, newton_schulz(matrix, 5, form="parallel"))


def test_the_cpu_needs_no_triton():
    """Neither the import nor a call loads Triton: kernels are loaded where they run."""
    lines = (
        "import sys, torch",
        "from atlas_lm.ops.newton_schulz import newton_schulz",
        "newton_schulz(torch.eye(2), 5)",
        "sys.exit('triton' in sys.modules)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)]).returncode == 0
