"""Named sizes, and a configuration from the names of a preset, a block and a size."""

from dataclasses import dataclass
from typing import Any

from atlas_lm.memory import MemorySpec, presets
from atlas_lm.memory.architectures import KeptPairs, Matrix
from atlas_lm.memory.features import Polynomial, Taylor
from atlas_lm.memory.retention import Decay, DecayToStart
from atlas_lm.models.config import AtlasConfig
from atlas_lm.models.counts import parameters

TRANSFORMER = "transformer"  # beside the presets of the memory: attention alone
PERSISTENT = 4  # learned tokens before the stream, where a block has them


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    hidden: int  # of SwiGLU
    window: int  # of sliding attention, and of a segment of mac
    rank: int  # inside the gates' producers
    small: bool = False  # chunks, windows and features of memories are small too


SIZES = {
    "tiny": Size(64, 2, 2, 176, 32, 8, small=True),
    "1M": Size(128, 4, 2, 256, 32, 8),
    "20M": Size(384, 11, 6, 1024, 256, 16),
    "60M": Size(640, 12, 10, 1728, 256, 16),
    # the papers' rows: layers, width and heads of their table of models
    "170M": Size(768, 12, 16, 2048, 512, 16),
    "340M": Size(1024, 24, 16, 2752, 512, 16),
    "760M": Size(1536, 24, 16, 4096, 512, 32),
    "1.3B": Size(2048, 18, 8, 5504, 512, 32),
}


def configure(
    preset: str = "atlas",
    *,
    block: str | list[str] | None = None,
    size: str | Size = "tiny",
    memory: dict[str, Any] | None = None,
    **changes: Any,
) -> AtlasConfig:
    """The configuration of a model by names.

    Args:
        preset: a rule of the memory (`atlas_lm.presets`), or "transformer" for attention alone.
        block: attention, sliding, lmm, mal, mag, mac, or one for each layer; by default lmm, the memory
            alone (attention for the transformer).
        size: one of SIZES by name, or a size of one's own.
        memory: changes to the rule, as `MemorySpec.replace` takes them, e.g. {"chunk": 32}.
        changes: any field of AtlasConfig, e.g. vocab_size=50257.

    >>> configure("titans", block="mag", size="tiny").blocks
    ['mag', 'mag']
    """
    if isinstance(size, str) and size not in SIZES:
        raise ValueError(f"size is {size!r}, wanted one of {', '.join(SIZES)}")
    if preset != TRANSFORMER and preset not in presets.PRESETS:
        wanted = ", ".join([TRANSFORMER, *presets.PRESETS])
        raise ValueError(f"preset is {preset!r}, wanted one of {wanted}")
    if preset == TRANSFORMER and memory:
        raise ValueError(f"a transformer has no memory to change, got {memory}")
    chosen = SIZES[size] if isinstance(size, str) else size
    spec = None if preset == TRANSFORMER else _spec(preset, chosen, memory or {})
    block = block or ("attention" if spec is None else "lmm")
    wired = {block} if isinstance(block, str) else set(block)
    fields = {
        "hidden_size": chosen.width,
        "num_hidden_layers": chosen.layers,
        "num_attention_heads": chosen.heads,
        "intermediate_size": chosen.hidden,
        "sliding_window": chosen.window,
        "segment": chosen.window,
        "gate_rank": chosen.rank,
        "persistent_tokens": PERSISTENT if wired & {"mal", "mag", "mac"} else 0,
        "blocks": block,
        "memory": spec,
    }
    return AtlasConfig(**(fields | changes))


def configure_equal(
    preset: str = "atlas",
    *,
    block: str | list[str] | None = None,
    size: str | Size = "tiny",
    **changes: Any,
) -> AtlasConfig:
    """As `configure`, with as many weights as every other preset and block of this size.

    The measure is `atlas` with its memory alone; in all others the hidden layer of the MLPs is as wide as it
    takes, to within half a unit of it in every layer.

    >>> from atlas_lm.models.counts import parameters
    >>> counts = [parameters(configure_equal(name, size="20M"))["total"] for name in ("titans", "atlas")]
    >>> abs(counts[0] - counts[1]) <= 11 * 3 * 384 / 2
    True
    """
    config = configure(preset, block=block, size=size, **changes)
    wanted = parameters(configure("atlas", size=size, **changes))["total"]
    count = parameters(config)
    unit = 3 * config.hidden_size * config.num_hidden_layers
    hidden = round((wanted - count["total"] + count["mlp"]) / unit)
    if hidden < config.hidden_size // 4:
        beside = count["total"] - count["mlp"]
        raise ValueError(
            f"{preset} with {block or 'its usual block'} has {beside:,} weights beside its MLPs, and "
            f"{wanted:,} are wanted in all: too few are left; take another block or a larger size"
        )
    return configure(preset, block=block, size=size, **(changes | {"intermediate_size": hidden}))


def _spec(name: str, size: Size, changes: dict[str, Any]) -> MemorySpec:
    """The preset at the model's heads. Deep memories are pulled to their learned start, not to zero,
    where they would die (docs/mathematics.md, section 4); everything small in a tiny model."""
    tiny = size.small
    dim = size.width // size.heads
    spec = presets.build(name, heads=size.heads, key_dim=dim, value_dim=dim)
    small: dict[str, Any] = {}
    deep = not isinstance(spec.architecture, Matrix | KeptPairs)
    if deep and isinstance(spec.retention, Decay):
        small["retention"] = DecayToStart()
    if tiny and spec.timing.chunk > 1:
        small["chunk"] = 16
    if tiny and 1 < spec.timing.period < spec.timing.chunk:
        small["period"] = 8
    if tiny and spec.window.size > 1:
        small["window"] = type(spec.window)(size=4, gate=spec.window.gate)
    if tiny and isinstance(spec.features, Polynomial | Taylor):
        small["features"] = type(spec.features)(degree=spec.features.degree, project=8)
    return spec.replace(**(small | changes))
