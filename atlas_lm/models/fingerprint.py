"""Which model this is: a hash of its configuration and of every weight."""

import hashlib
import inspect
import json
from typing import Any

import torch
from torch import nn

from atlas_lm.models.config import AtlasConfig

# fields that change nothing in the numbers that a model computes
OUTSIDE = ("self", "initializer_range", "use_cache", "tie_word_embeddings", "kwargs")
LATER = {
    "gate_margin": 0.0
}  # fields that came later, and at which value models are as they were before
FOREIGN_OUTSIDE = ("_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype")


def config_record(config: AtlasConfig) -> dict[str, Any]:
    """The fields of a configuration that change results, for comparison by name."""
    names = [n for n in inspect.signature(AtlasConfig.__init__).parameters if n not in OUTSIDE]
    record = {
        name: getattr(config, name)
        for name in names
        if not name.endswith("_token_id")
        and not (name in LATER and getattr(config, name) == LATER[name])
    }
    return dict(json.loads(json.dumps(record, sort_keys=True)))


def _foreign_record(model: Any) -> dict[str, Any]:
    """Of a model that is not ours: its class and all of its configuration but where it came from."""
    known = {k: v for k, v in model.config.to_dict().items() if k not in FOREIGN_OUTSIDE}
    record = {"class": type(model).__name__, **known}
    return dict(json.loads(json.dumps(record, sort_keys=True, default=str)))


def fingerprint(model: nn.Module) -> str:
    """A short hash over configuration, names, dtypes, shapes and values of all weights.

    It reads the whole model; the result is kept until a weight changes.
    """
    tensors = model.state_dict()
    key = tuple((name, t.data_ptr(), t._version, t.dtype) for name, t in tensors.items())
    known = getattr(model, "_atlas_fingerprint", None)
    if known is not None and known[0] == key:
        return str(known[1])
    ours = isinstance(model.config, AtlasConfig)
    record = config_record(model.config) if ours else _foreign_record(model)  # type: ignore[arg-type]
    digest = hashlib.sha256(json.dumps(record).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    found = digest.hexdigest()[:16]
    model._atlas_fingerprint = (key, found)  # type: ignore[assignment]
    return found
