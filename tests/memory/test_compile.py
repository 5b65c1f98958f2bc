"""The parallel form is traced by torch.compile without a graph break, fresh and from a warm state."""

import pytest
import torch

from atlas_lm.memory import memorize
from tests.builders import assert_close, random_gates, random_inputs, random_weights, small_spec

# over a border of chunks of six; the warm call begins inside a chunk, and is over the next one
TOKENS = 8


@pytest.mark.parametrize("name", ["titans", "omeganet", "atlas", "lact", "deltanet", "swla"])
def test_one_graph_and_the_same_numbers(name: str) -> None:
    torch._dynamo.reset()
    spec = small_spec(name)
    weights, gates = random_weights(spec), random_gates(spec, 2, TOKENS)
    q, k, v = random_inputs(spec, 2, TOKENS)

    def stream(q, k, v, gates, state=None):
        return memorize(spec, weights, state, q, k, v, gates, form="parallel")

    traced = torch.compile(stream, backend="eager", fullgraph=True)
    y, state = traced(q, k, v, gates)
    wanted, after = stream(q, k, v, gates)
    assert_close("fresh", y, wanted, 1e-12)
    assert_close("warm", traced(q, k, v, gates, state)[0], stream(q, k, v, gates, after)[0], 1e-12)
