"""How much shared memory the reads of two-layer memories take, by formula and as Triton compiled them."""

import pytest

from atlas_lm.ops.mlp_memory import why_not_sizes
from atlas_lm.ops.mlp_memory.room import SHARED, Room, edge_of

# features, values, weights, states, window, units at a time, bytes of a number: bytes of both kernels
SEEN = {
    (64, 64, 2, 1, 1, 64, 2): (57344, 65536),
    (64, 64, 3, 3, 16, 64, 2): (122880, 131072),
    (160, 64, 3, 2, 16, 64, 2): (175104, 183296),
    (160, 64, 3, 3, 16, 64, 2): (224256, 232448),
    (128, 128, 2, 1, 1, 64, 2): (98304, 114688),
    (128, 128, 3, 1, 16, 64, 2): (126976, 143360),
    (256, 64, 2, 1, 1, 64, 2): (131072, 139264),
    (256, 128, 2, 2, 16, 64, 2): (212992, 229376),
    (128, 128, 3, 3, 65, 32, 2): (196608, 149504),
    (64, 64, 3, 3, 16, 32, 4): (165888, 188416),
    (160, 64, 2, 3, 16, 32, 4): (219136, 256000),
    (256, 128, 2, 1, 1, 32, 4): (229376, 278528),
}


@pytest.mark.parametrize("shape", SEEN, ids=str)
def test_formula_is_an_upper_bound_and_close(shape):
    features, values, weights, states, window, units, element = shape
    room = Room(64, edge_of(window), features, values, weights, states, element)
    assert 0 <= room.shared(units) - max(SEEN[shape]) <= 10 * 1024


def test_programs_get_smaller_before_shapes_are_declined():
    widest = dict(chunk=64, edge=16, features=256, values=128, weights=3, states=3)
    assert Room(**widest | dict(features=64, values=64), element=2).units(64) == 64
    assert Room(**widest, element=2).units(64) == 16
    assert Room(**widest, element=4).units(64) is None


def test_what_has_no_room_is_declined_with_a_way_out():
    sizes = (64, 16, 256, 512, 128)
    assert why_not_sizes(*sizes, gated=True, states=3, element=2) is None
    reason = why_not_sizes(*sizes, gated=True, states=3, element=4)
    assert f"{SHARED} bytes" in reason and "take bf16" in reason
