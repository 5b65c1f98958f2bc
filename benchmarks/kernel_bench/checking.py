"""Nothing of ours is timed before it is right: outputs and every gradient against fp64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernel_bench.cases import Call, Case, Tensors

TIMES = 2.0  # the error that a kernel may have, in errors of the plain form
LEAST = 1e-6  # below this an error is rounding in fp32
PEER = 0.02  # of a peer against its own loop in fp32, where there is no plain form


@dataclass(frozen=True)
class Verdict:
    """The worst of all outputs and gradients: its error, and the one that would have been allowed."""

    worst: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN does not pass

    def __str__(self) -> str:
        return f"{self.worst} is off by {self.error:.1e}, allowed {self.allowed:.1e}"


def check(case: Case, device: torch.device) -> Verdict:
    """Relative Frobenius errors at the small shape, each held against that of the plain form.

    Truth is computed from the same rounded inputs, in fp64.
    """
    assert case.small is not None and case.truth is not None, case.name
    inputs = case.draw(case.small, device)
    doubled = {n: _doubled(x) for n, x in inputs.items()}
    truth = results(case.truth, doubled, case)
    got = results(case.call, inputs, case)
    if set(got) != set(truth):
        raise ValueError(f"{case.name} gave {sorted(got)}, wanted {sorted(truth)}")
    allowed = dict.fromkeys(truth, PEER)
    if case.plain is not None:
        plain = results(case.plain, inputs, case)
        allowed = {n: TIMES * error(plain[n], truth[n]) + LEAST for n in truth}
    verdicts = [Verdict(n, error(got[n], truth[n]), allowed[n]) for n in truth]
    failed = [verdict for verdict in verdicts if not verdict.passed]
    return max(failed or verdicts, key=lambda verdict: verdict.error / verdict.allowed)


def results(call: Call, inputs: Tensors, case: Case) -> Tensors:
    """Outputs, and with a backward pass the gradients of all inputs for fixed slopes of all outputs."""
    outputs = call(inputs)
    found = {name: y.detach() for name, y in outputs.items()}
    if not case.backward:
        return found
    generator = torch.Generator().manual_seed(1)
    slopes = {n: torch.randn(y.shape, generator=generator) for n, y in outputs.items()}
    moving = [n for n, y in outputs.items() if y.requires_grad]
    gradients = torch.autograd.grad(
        [outputs[n] for n in moving],
        list(inputs.values()),
        [slopes[n].to(case.dtype).to(outputs[n]) for n in moving],
        allow_unused=True,
        materialize_grads=True,
    )
    return found | {f"slope of {n}": g for n, g in zip(inputs, gradients, strict=True)}


def _doubled(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def error(got: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference, relative to the truth unless that is zero."""
    apart = (got.to(truth) - truth).norm().item()
    return apart / (truth.norm().item() or 1.0)
