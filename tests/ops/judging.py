"""How far results may be off: by a number, or by twice what plain PyTorch is off in the same dtype."""


def distance(got, wanted):
    """Relative Frobenius norm of the difference."""
    scale = wanted.double().norm().clamp_min(1e-30)
    return ((got.double() - wanted.double()).norm() / scale).item()


def assert_near(got, wanted, tolerance):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert got[name].isfinite().all(), f"{name} is not finite"
        error = distance(got[name], wanted[name])
        assert error <= tolerance, f"{name}: off by {error:.1e}, allowed {tolerance:.0e}"


def assert_within_twice(got, plain, truth, slack=0.0):
    """Results by name, each at most twice as far from the truth as the plain ones, and `slack`."""
    assert got.keys() == truth.keys()
    for name in truth:
        error, allowed = (distance(x[name], truth[name]) for x in (got, plain))
        assert error <= 2 * allowed + slack, f"{name}: off by {error:.1e}, plain {allowed:.1e}"
