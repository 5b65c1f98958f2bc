"""The configuration of a model: sizes, wirings, and the resolved rule of its memory."""

from typing import Any

from transformers import PreTrainedConfig

from atlas_lm.blocks.block import GROWS, WIRINGS, WITHOUT_MEMORY
from atlas_lm.blocks.mixer import Parts
from atlas_lm.memory import MemorySpec

COMBINE = ("product", "sum")


class AtlasConfig(PreTrainedConfig):
    """Every model of the family is a value of this class.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
        num_key_value_heads, head_dim, rope_theta, rms_norm_eps, initializer_range: as in Llama.
        blocks: one of attention, sliding, lmm, mal, mag, mac; or a list with one for each layer.
        memory: the memory's rule as `MemorySpec.to_dict()` gives it; a MemorySpec is taken too.
        sliding_window: tokens that sliding attention sees, its own among them.
        segment: tokens per segment of `mac`.
        persistent_tokens: learned tokens before the stream, in `mal`, `mag` and `mac`.
        combine: how `mag` joins attention and memory: product (Titans) or sum (drawn in Atlas).
        conv_size: tokens that the short convolution of the memory mixer sees.
        gate_rank: width inside the producers of the gates.
        gate_margin: steps and decays of memories that are below it are exactly none, so that a gate can close
            for good; 0: they only come near to it.

    `atlas_lm.models.sizes.configure` makes one from the name of a preset, a block and a size.
    """

    model_type = "atlas"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, transformers wants a list here

    def __init__(
        self,
        vocab_size: int = 259,
        hidden_size: int = 64,
        intermediate_size: int = 176,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        blocks: str | list[str] = "attention",
        memory: dict[str, Any] | MemorySpec | None = None,
        sliding_window: int = 64,
        segment: int = 64,
        persistent_tokens: int = 0,
        combine: str = "product",
        conv_size: int = 4,
        gate_rank: int = 16,
        gate_margin: float = 0.0,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.blocks = [blocks] * num_hidden_layers if isinstance(blocks, str) else list(blocks)
        self.memory = memory.to_dict() if isinstance(memory, MemorySpec) else memory
        self.sliding_window = sliding_window
        self.segment = segment
        self.persistent_tokens = persistent_tokens
        self.combine = combine
        self.conv_size = conv_size
        self.gate_rank = gate_rank
        self.gate_margin = gate_margin
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(  # type: ignore[call-arg]
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        self._check()

    @property
    def spec(self) -> MemorySpec | None:
        """The rule of the memory; None for a model without one."""
        return None if self.memory is None else MemorySpec.from_dict(self.memory)

    @property
    def layer_specs(self) -> list[MemorySpec | None]:
        """Of each block its rule; None for blocks of attention alone."""
        spec = self.spec
        return [None if wiring in WITHOUT_MEMORY else spec for wiring in self.blocks]

    @property
    def grows(self) -> str | None:
        """What in this model keeps every token, so that its state grows with the stream; None: nothing."""
        if any(wiring in GROWS for wiring in self.blocks):
            return "full attention"
        spec = self.spec
        return "a memory of kept pairs" if spec is not None and spec.keeps_pairs else None

    @property
    def parts(self) -> Parts:
        return Parts(
            width=self.hidden_size,
            spec=self.spec,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            window=self.sliding_window,
            segment=self.segment,
            persistent=self.persistent_tokens,
            combine=self.combine,
            conv_size=self.conv_size,
            gate_rank=self.gate_rank,
            gate_margin=self.gate_margin,
            rope_theta=self.rope_theta,
            eps=self.rms_norm_eps,
        )

    def _check(self) -> None:
        for name in LEAST:
            if getattr(self, name) < LEAST[name]:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {LEAST[name]} or more")
        if len(self.blocks) != self.num_hidden_layers:
            raise ValueError(
                f"blocks has {len(self.blocks)} entries for {self.num_hidden_layers} layers; give one per "
                "layer, or one name for all"
            )
        unknown = sorted(set(self.blocks) - WIRINGS.keys())
        if unknown:
            raise ValueError(f"blocks has {unknown}, wanted some of {', '.join(WIRINGS)}")
        with_memory = [wiring for wiring in self.blocks if wiring not in WITHOUT_MEMORY]
        spec = self.spec
        if with_memory and spec is None:
            raise ValueError(
                f"blocks {sorted(set(with_memory))} have a memory, but memory is None; pass a spec, e.g. "
                "presets.build('titans', heads=2, key_dim=32, value_dim=32)"
            )
        if spec is not None and spec.keeps_pairs and "mac" in with_memory:
            raise ValueError(
                "a mac block keeps the memory from before its segment beside the present one, which kept "
                "pairs do not offer; use mag, mal or lmm, or a memory of fixed size"
            )
        if self.combine not in COMBINE:
            raise ValueError(f"combine is {self.combine!r}, wanted one of {', '.join(COMBINE)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if not 0 <= self.gate_margin < 0.5:
            raise ValueError(
                f"gate_margin is {self.gate_margin}, wanted 0 or more and less than 0.5, where gates start"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}, wanted an even number: rotary turns pairs"
            )


LEAST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "sliding_window": 1,
    "segment": 1,
    "persistent_tokens": 0,
    "conv_size": 1,
    "gate_rank": 1,
}
