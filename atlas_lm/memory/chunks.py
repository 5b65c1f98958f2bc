"""One chunk of a memory that takes its slopes at an anchor: descent, momentum and Muon."""

from collections.abc import Mapping

from torch import Tensor

from atlas_lm.memory.architectures import dense
from atlas_lm.memory.jumps import jump
from atlas_lm.memory.optimizers import Muon
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import initial_memory
from atlas_lm.memory.stretch import Fast, Passage, Stretch
from atlas_lm.memory.trajectory import Moving, Trajectory, norms, pad, unroll


def anchored(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    memory: Fast,
    anchor: Fast,
    momentum: Fast,
    stretch: Stretch,
    trace: bool,
) -> Passage:
    """Slopes of all pairs, halo included, at the anchor; then the rule on their coefficients."""
    architecture = spec.network
    prediction, tape = architecture.predict(dense(anchor), stretch.x, weights)
    error = spec.objective.slope(prediction, stretch.pairs["v"], stretch.pairs)
    slopes = architecture.slopes(anchor, tape, error, weights)
    writes, at = stretch.writes(spec), stretch.pace(spec)
    of_memory, of_momentum = unroll(spec, writes, at)
    start = initial_memory(spec, weights) if spec.retention.reads_start else {}

    def along(coefficients: Tensor, *bases: Fast) -> dict[str, Trajectory]:
        return {
            n: Trajectory([base.get(n) for base in bases], coefficients, *slopes[n]) for n in memory
        }

    momenta = along(of_momentum, {}, momentum, {})
    if isinstance(spec.optimizer, Muon):
        moving: Mapping[str, Moving] = {
            n: jump(spec, momenta[n], memory[n], start.get(n), stretch, at) for n in memory
        }
    else:
        moving = along(of_memory, memory, momentum, start)
    y, _ = architecture.predict(moving, stretch.q, weights)
    seen = {}
    if trace:
        seen = {"surprise": norms(along(pad(writes), {}, {}, {})), "memory_norm": norms(moving)}
        seen |= {"momentum_norm": norms(momenta)} if momentum else {}
    return Passage(
        y=y,
        memory={n: weight.end() for n, weight in moving.items()},
        momentum={n: momenta[n].end() for n in momentum},
        norms=seen,
    )
