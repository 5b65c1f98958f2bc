"""Further laws that need to see inside: they hold for rules of the space, given as specs."""

from collections.abc import Callable

import torch
from torch import Tensor

from atlas_lm.doctor.laws import ROUNDING, Finding, Law, NotApplicable
from atlas_lm.doctor.measure import as_leaves, distance, leaves, with_gradients
from atlas_lm.doctor.papers import PAPERS
from atlas_lm.doctor.subjects import RuleSubject
from atlas_lm.memory import MemoryState
from atlas_lm.memory.architectures import dense
from atlas_lm.memory.memorize import Form
from atlas_lm.memory.parallel import declines

DIFFERENCES = 1e-6  # what central differences in fp64 can tell


def forms(subject: RuleSubject) -> Finding | NotApplicable:
    """Parallel = token by token: outputs, state, and gradients of inputs, weights and initial state.

    Examined from a warm state whose rows stand at different places of a chunk.
    """
    reason = declines(subject.spec)
    if reason:
        return NotApplicable(f"no parallel form: {reason}")
    x = as_leaves(subject.inputs(2, subject.length, 1))
    state, start = _warm_state(subject)
    wanted = x | subject.weights() | start

    def compute(form: Form) -> dict[str, Tensor]:
        y, after = subject.run(x, state, form=form)
        return {"y": y} | leaves(after)

    reference = with_gradients(lambda: compute("reference"), wanted)
    parallel = with_gradients(lambda: compute("parallel"), wanted)
    return Finding(distance(parallel, reference), ROUNDING[subject.dtype])


def slopes(subject: RuleSubject) -> Finding | NotApplicable:
    """Explicit slopes = autograd = finite differences, for the objective and architecture of the rule."""
    spec = subject.spec
    if spec.keeps_pairs:
        return NotApplicable("kept pairs have no weight matrix; the paper law pins their rule")
    x = subject.inputs(2, 3, 1)
    z = spec.features(x["k"].transpose(1, 2), subject.outer).detach()  # [B, H, n, F]
    v = x["v"].transpose(1, 2)
    gates = {name: x[name].transpose(1, 2) for name in spec.pair_gates}
    memory = as_leaves(subject.initial(2).memory)

    def loss(memory: dict[str, Tensor]) -> Tensor:
        prediction, _ = spec.network.predict(dense(memory), z, subject.outer)
        return spec.objective.value(prediction, v, gates).sum()

    prediction, tape = spec.network.predict(dense(memory), z, subject.outer)
    error = spec.objective.slope(prediction, v, gates)
    factors = spec.network.slopes(memory, tape, error, subject.outer)
    explicit = {n: left.mT @ right for n, (left, right) in factors.items()}
    by_autograd = torch.autograd.grad(loss(memory), list(memory.values()))
    automatic = dict(zip(memory, by_autograd, strict=True))
    with torch.no_grad():
        numeric = _along_a_line(loss, memory, explicit)
    if numeric > DIFFERENCES:
        return Finding(numeric, DIFFERENCES, "explicit slopes differ from finite differences")
    return Finding(distance(explicit, automatic), ROUNDING[subject.dtype])


def paper(subject: RuleSubject) -> Finding | NotApplicable:
    """The preset equals its paper's equation, typed out independently: outputs and gradients."""
    if subject.name not in PAPERS:
        return NotApplicable("no paper gives this rule")
    x = as_leaves(subject.inputs(2, subject.length, 1))
    wanted = x | subject.weights()
    gates = {name: x[name] for name in subject.spec.gates}
    equation = PAPERS[subject.name]

    def typed_out() -> dict[str, Tensor]:
        return {"y": equation(subject.spec, subject.outer, x["q"], x["k"], x["v"], gates)}

    ours = with_gradients(lambda: {"y": subject.run(x)[0]}, wanted)
    return Finding(distance(ours, with_gradients(typed_out, wanted)), ROUNDING[subject.dtype])


RULE_LAWS: dict[str, Law] = {law.__name__: law for law in (forms, slopes, paper)}


def _warm_state(subject: RuleSubject) -> tuple[MemoryState, dict[str, Tensor]]:
    """A state as leaves, its rows at positions 4 and 9, and those leaves by name."""
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, 4:] = False
    with torch.no_grad():
        _, state = subject.run(subject.inputs(2, 9, 5), valid=valid)
    floating = as_leaves({n: t for n, t in state.leaves().items() if t.is_floating_point()})
    state = MemoryState.from_leaves(subject.spec, state.leaves() | floating)
    return state, {f"start.{n}": t for n, t in floating.items() if t.numel()}


def _along_a_line(
    loss: Callable[[dict[str, Tensor]], Tensor], memory: dict[str, Tensor], slope: dict[str, Tensor]
) -> float:
    """Relative error of the slope along a random direction, by central differences."""
    generator = torch.Generator().manual_seed(11)
    way = {n: torch.randn(m.shape, generator=generator, dtype=m.dtype) for n, m in memory.items()}
    h = 1e-5
    up, down = ({n: m + sign * h * way[n] for n, m in memory.items()} for sign in (1, -1))
    numeric = (loss(up) - loss(down)).item() / (2 * h)
    explicit = sum((slope[n] * way[n]).sum().item() for n in way)
    return abs(numeric - explicit) / max(abs(numeric), 1e-12)
