"""How far results may be off: by a number, or by twice what plain PyTorch is off in the same dtype."""


def distance(got, wanted):
    """Relative Frobenius norm of the difference."""
    scale = wanted.double().norm().clamp_min(1e-30)
    return ((got.double() - wanted.double()).norm() / scale).item()


def distances(got, wanted):
    """By name; nothing may be missing, or not finite."""
    assert got.keys() == wanted.keys()
    unfit = [name for name, x in got.items() if not x.isfinite().all()]
    assert not unfit, f"not finite: {unfit}"
    return {name: distance(got[name], wanted[name]) for name in wanted}


def assert_near(got, wanted, tolerance):
    for name, error in distances(got, wanted).items():
        assert error <= tolerance, f"{name}: off by {error:.1e}, allowed {tolerance:.0e}"


def assert_within_twice(got, plain, truth, slack=0.0):
    """Results by name, each at most twice as far from the truth as the plain ones, and `slack`."""
    plain = {name: plain[name] for name in truth}
    errors, allowed = distances(got, truth), distances(plain, truth)
    for name, error in errors.items():
        most = 2 * allowed[name] + slack
        assert error <= most, f"{name}: off by {error:.1e}, plain {allowed[name]:.1e}"
