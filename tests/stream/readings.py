"""Streams that have read something, for the tests of files, and one way to compare them."""

import torch
from torch import Tensor

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.stream.engine import Stream
from atlas_lm.stream.reading import Reading
from tests.models.builders import random_ids

STRIDE, TOKENS = 8, 43
KINDS = [  # every wiring, fixed and growing states
    ("mag", "titans"),
    ("mac", "atlas"),
    ("mal", "omeganet"),
    ("lmm", "gated_deltanet"),
    ("lmm", "softmax_attention"),
    ("mag", "dot_pairs"),
    ("sliding", "attention"),
    (["lmm", "attention"], "titans"),
]


def read(model: AtlasForCausalLM, tokens: int = TOKENS, seed: int = 1) -> Reading:
    stream = Stream(model, stride=STRIDE)
    stream.absorb(random_ids(1, tokens, seed)[0])
    return stream.reading


def tensors(reading: Reading) -> dict[str, Tensor]:
    return reading.state.leaves() | {"pending": reading.pending}


def assert_equal(got: Reading, wanted: Reading) -> None:
    """To the last bit, NaN and the sign of zero included."""
    ours, theirs = tensors(got), tensors(wanted)
    assert list(ours) == list(theirs) and got.stride == wanted.stride
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape
        assert raw_bytes(ours[name]) == raw_bytes(theirs[name]), name


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
