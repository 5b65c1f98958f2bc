"""Coefficients (a, b, c) of X <- aX + (bA + cA^2)X, A = X X^T, one triple per step.

`muon` is steep at zero and never converges: singular values end in about [0.70, 1.13]. The other
two converge to one, so that the number of steps is a dial of test-time compute.
"""

MUON = (3.4445, -4.7750, 2.0315)
CUBIC = (1.5, -0.5, 0.0)
# Amsel et al. 2025 (arXiv 2505.16932), minimax quintics for singular values in [1e-3, 1]; the
# published figures, the first seven divided by a 1.01 margin where they are used, the last repeated.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
MARGIN = 1.01
SCHEDULES = ("muon", "cubic", "polar_express")


def schedule(name: str, steps: int) -> list[tuple[float, float, float]]:
    """The coefficients of `steps` iterations of the named schedule."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule is {name!r}, wanted one of {', '.join(SCHEDULES)}")
    if steps < 0:
        raise ValueError(f"Newton-Schulz steps is {steps}, wanted 0 (off) or more")
    if name == "polar_express":
        last = len(POLAR_EXPRESS) - 1
        return [
            _with_margin(POLAR_EXPRESS[i]) if i < last else POLAR_EXPRESS[last]
            for i in range(steps)
        ]
    return [MUON if name == "muon" else CUBIC] * steps


def _with_margin(coefficients: tuple[float, float, float]) -> tuple[float, float, float]:
    """p(x / margin): rounding may push a singular value above one, where the quintic would grow."""
    a, b, c = coefficients
    return a / MARGIN, b / MARGIN**3, c / MARGIN**5
