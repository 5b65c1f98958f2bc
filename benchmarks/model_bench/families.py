"""The models that are measured, each of one size: how it is made, and how its loss is asked for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from atlas_lm.models import AtlasForCausalLM, configure
from atlas_lm.models.sizes import SIZES, TRANSFORMER
from benchmarks.kernel_bench.decode import VOCABULARY
from benchmarks.kernel_bench.peers import found, lift_refusal, refused_by_fla

LONGEST = 2**20  # tokens that peers must reach

Model = Any  # of this project, of transformers, or of flash-linear-attention: they are called alike


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model by name. ours: it has streams, and steps of `atlas_lm.models.decoding`."""

    name: str
    draw: Callable[[str], Model]  # of a size, one of atlas_lm.models.sizes.SIZES
    ours: bool = True
    with_labels: dict[str, Any] = field(default_factory=dict)  # what its loss is asked for with
    caution: Callable[[], str | None] = lambda: None  # why what it trains is not to be trusted

    def build(self, size: str, device: torch.device) -> Model:
        """On the device, all weights in bf16; the same ones every time."""
        torch.manual_seed(0)
        with device:
            model = self.draw(size)
        for weight in model.parameters():
            weight.data = weight.data.bfloat16()
        return model


def count(model: Model) -> int:
    """Weights, tied ones once."""
    return sum(weight.numel() for weight in model.parameters())


def atlas(preset: str, size: str, *, by_chunk: bool = False) -> Model:
    """Ours. by_chunk: Newton-Schulz once per chunk, 64 tokens in all but the smallest models."""
    config = configure(preset, size=size, vocab_size=VOCABULARY)
    if by_chunk:
        assert config.spec is not None, preset
        memory = {"period": config.spec.timing.chunk}
        config = configure(preset, size=size, memory=memory, vocab_size=VOCABULARY)
    return AtlasForCausalLM(config)


def llama(size: str) -> Model:
    """As wide and deep as ours with attention, weight for weight."""
    chosen = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=chosen.width,
        intermediate_size=chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def fla_gated_deltanet(size: str) -> Model:
    """Heads, widths and layers of our gated_deltanet. Its loss is the fused one that its configuration has by
    default: the other, which makes no logits at once, multiplies in fp32 and would hold it up."""
    lift_refusal()
    chosen = SIZES[size]
    config = found("fla.models", "GatedDeltaNetConfig")(
        vocab_size=VOCABULARY,
        hidden_size=chosen.width,
        intermediate_size=chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_heads=chosen.heads,
        head_dim=chosen.width // chosen.heads,
        expand_v=1.0,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    return found("fla.models", "GatedDeltaNetForCausalLM")(config)


def our(name: str, preset: str, **options: Any) -> Family:
    draw = partial(atlas, preset, **options)
    return Family(name=name, draw=draw, with_labels={"skip_logits": True})


# those that take longest at the end, where a budget may cut them off
FAMILIES: tuple[Family, ...] = (
    our("gated_deltanet", "gated_deltanet"),
    Family(name="fla_gated_deltanet", draw=fla_gated_deltanet, ours=False, caution=refused_by_fla),
    our("titans", "titans"),
    our("omeganet", "omeganet"),
    our("atlas", "atlas", by_chunk=True),
    our("atlas_pp", "atlas_pp", by_chunk=True),
    our("attention", TRANSFORMER),
    Family(name="llama", draw=llama, ours=False),
)


def pick(families: Iterable[Family], names: list[str] | None) -> list[Family]:
    """Those of these names, in the order of the registry; None: all."""
    known = {family.name: family for family in families}
    for name in names or ():
        if name not in known:
            raise ValueError(f"no model {name!r}, wanted some of {', '.join(known)}")
    return [family for name, family in known.items() if names is None or name in names]
