"""One model, and one causal language model, for every rule and wiring."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from atlas_lm.blocks.block import Block
from atlas_lm.layers.loss import labelled_loss
from atlas_lm.layers.state import LayerState
from atlas_lm.layers.tail import advance
from atlas_lm.memory import Trace
from atlas_lm.models.cache import AtlasCache
from atlas_lm.models.config import AtlasConfig
from atlas_lm.models.initialize import initialize
from atlas_lm.models.rows import arrange
from atlas_lm.models.state import StreamState

# what callers of the Hugging Face world may pass besides; anything else is a mistake worth an error
LOSS_OPTIONS = ("num_items_in_batch", "ignore_index")
IGNORED = -100  # the label of a place without loss, where no other is said
IMPLIED = ("cu_seq_lens_k", "max_length_q", "max_length_k")


class AtlasPreTrainedModel(PreTrainedModel):
    config: AtlasConfig
    config_class = AtlasConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True  # a memory cannot be cropped, so no assisted decoding
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As everywhere in transformers. Every weight gets memory of its own: where it lies in a mapped
        file can move the rounding, and a stream must go on the same to the last bit in every process."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
        return loaded

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant is True, wanted False: reentrant checkpointing loses the gradients of "
                "carried states"
            )
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, *args, **kwargs)


class AtlasModel(AtlasPreTrainedModel):
    """Embedding, blocks, norm. State in, state out; the cache of transformers is a face of it."""

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(wiring, config.parts, config.intermediate_size) for wiring in config.blocks
        )
        self.norm = config.parts.norm()
        self.gradient_checkpointing = False
        self.post_init()

    def initial_state(self, batch: int = 1) -> StreamState:
        """The state before the first token, in every row: learned memories, persistent tokens read."""
        like = self.norm.weight
        layers = tuple(cast(Block, block).mixer.start(batch, like) for block in self.layers)
        position = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return StreamState(layers=layers, position=position)

    def read(
        self,
        x: Tensor,
        state: StreamState | None,
        count: Tensor | None = None,
        watch: list[list[Trace]] | None = None,
        hidden: list[Tensor] | None = None,
        fresh: Tensor | None = None,
    ) -> tuple[Tensor, StreamState]:
        """Run the blocks over embeddings [B, T, D] whose first `count` tokens count in each row.

        watch: receives for each block the traces of its memory.  hidden: receives the input of each block.
        fresh: [B] bool, rows that begin a new stream, whatever the state holds.
        """
        layers: list[LayerState] = []
        for i, block in enumerate(self.layers):
            if hidden is not None:
                hidden.append(x)
            seen = None if watch is None else watch[i]
            before = None if state is None else state.layers[i]
            if self.gradient_checkpointing and self.training and watch is None:
                x, after = self._gradient_checkpointing_func(
                    block.__call__, x, before, count, None, fresh
                )
            else:
                x, after = block(x, before, count, seen, fresh)
            layers.append(after)
        position = x.new_zeros(x.shape[0], dtype=torch.int64) if state is None else state.position
        if fresh is not None:
            position = torch.where(fresh, 0, position)
        after = StreamState(layers=tuple(layers), position=advance(position, x.shape[1], count))
        return self.norm(x), after

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: AtlasCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hugging Face's way in.

        Args:
            input_ids [B, T], or inputs_embeds [B, T, D].
            attention_mask: [B, >= T], 0 for padding, wherever it stands; its last T columns are these
                tokens. Padding changes nothing: not memories, not positions, not other tokens.
            past_key_values: an AtlasCache; it is moved forward, and handed back.
            cu_seq_lens_q: [N+1] borders of N sequences packed into one row (B = 1); a cache then has N rows.
        """
        cu_seq_lens_q = _check_options(kwargs, cu_seq_lens_q)
        x = self._embed(input_ids, inputs_embeds)
        batch, tokens = x.shape[:2]
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = _check_cache(past_key_values)
        if cache is None and use_cache:
            cache = AtlasCache()
        rows = arrange(batch, tokens, _check_mask(attention_mask, batch, tokens), cu_seq_lens_q)
        x = rows.spread(x)
        state = None if cache is None else cache.state
        if state is not None and state.batch != x.shape[0]:
            raise ValueError(
                f"the cache holds {state.batch} streams and the input has {x.shape[0]} rows; pass the cache "
                "that belongs to these rows, or select them with batch_select_indices"
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden: list[Tensor] | None = [] if output_hidden_states else None
        y, state = self.read(x, state, rows.count, hidden=hidden)
        if cache is not None:
            cache.replace(state, tokens)
        states = None if hidden is None else tuple(rows.join(h) for h in [*hidden, y])
        return BaseModelOutputWithPast(
            last_hidden_state=rows.join(y),  # type: ignore[arg-type]
            past_key_values=cache,
            hidden_states=states,  # type: ignore[arg-type]
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, one of the two")
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        if given.shape[0] == 0 or given.shape[1] == 0:
            raise ValueError(
                f"the input has shape {list(given.shape)}: no tokens; pass at least one, e.g. the bos token"
            )
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None
        # on a GPU looking costs a wait; there the embedding kernel itself stops on a bad id
        if not torch.compiler.is_compiling() and not input_ids.is_cuda:
            check_ids(input_ids, self.config.vocab_size)
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded


class AtlasForCausalLM(AtlasPreTrainedModel, GenerationMixin):
    """The model with a head over the vocabulary: train it, `generate` with it, save it."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__(config)
        self.model = AtlasModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def initial_state(self, batch: int = 1) -> StreamState:
        return self.model.initial_state(batch)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: AtlasCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As AtlasModel.forward, and:

        Args:
            labels: [B, T], -100 where no loss is wanted; shifted here, never across packed sequences.
            shift_labels: [B, T] labels that are already shifted, e.g. over the border of two segments.
            logits_to_keep: compute only the last so many logits (0: all), or those at these places.
            skip_logits: the loss alone, same as without it up to rounding, and logits None: those of all
                tokens never exist at once.
        """
        loss_options = {name: kwargs.pop(name) for name in LOSS_OPTIONS if name in kwargs}
        if skip_logits:
            self._check_skip(labels is not None or shift_labels is not None, logits_to_keep)
        cu_seq_lens_q = _check_options(kwargs, cu_seq_lens_q)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seq_lens_q=cu_seq_lens_q,
        )
        ignored = loss_options.get("ignore_index", IGNORED)
        if labels is not None and cu_seq_lens_q is not None:
            labels = labels.index_fill(1, cu_seq_lens_q[:-1].long(), ignored)
        logits, loss = None, None
        if skip_logits:
            loss = self._loss(outputs.last_hidden_state, labels, shift_labels, **loss_options)
        else:
            logits = self.lm_head(outputs.last_hidden_state[:, _places(logits_to_keep)])
        if logits is not None and (labels is not None or shift_labels is not None):
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                shift_labels=None if shift_labels is None else shift_labels.contiguous(),
                vocab_size=self.config.vocab_size,
                **loss_options,
            )
        return CausalLMOutputWithPast(
            loss=cast(Any, loss),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _loss(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
    ) -> Tensor:
        """What the loss of transformers is, from hidden states [B, T, D]."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = pad(labels, (0, 1), value=ignore_index)[:, 1:]
        flat = shift_labels.flatten().to(hidden.device)
        total, count = labelled_loss(hidden.flatten(0, 1), self.lm_head.weight, flat, ignore_index)
        if num_items_in_batch is None:
            return total / count
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def _check_skip(self, labelled: bool, logits_to_keep: int | Tensor) -> None:
        if not labelled:
            raise ValueError(
                "skip_logits is True and there are no labels; pass labels or shift_labels"
            )
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            raise ValueError(
                "skip_logits is True, so there are no logits_to_keep; pass one of the two"
            )
        if type(self.lm_head) is not nn.Linear:
            raise ValueError(
                f"lm_head is {type(self.lm_head).__name__}, and skip_logits reads the weight of a plain "
                "Linear; leave skip_logits out"
            )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` makes its cache here; ours is of one kind."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}, wanted None: an atlas "
                "model carries its own AtlasCache"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = AtlasCache()


def _places(logits_to_keep: int | Tensor) -> slice | Tensor:
    """The tokens of which logits are wanted."""
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep
    return slice(-logits_to_keep, None) if logits_to_keep else slice(None)


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse token ids that the model does not have, naming the first."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"token ids are {ids.dtype}, wanted integers")
    bad = (ids < 0) | (ids >= vocab_size)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"token id {ids[where].item()} at {list(where)} is out of range, wanted 0 to {vocab_size - 1}; "
            "is this the tokenizer of the model?"
        )


def _check_cache(cache: Any) -> AtlasCache | None:
    if cache is not None and not isinstance(cache, AtlasCache):
        raise TypeError(
            f"past_key_values is {type(cache).__name__}, wanted AtlasCache: memories are no keys and values; "
            "pass None, or the cache that the model returned"
        )
    return cache


def _check_mask(mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, wanted [{batch}, {tokens}] or, with a cache, more "
            "columns: 1 for tokens, 0 for padding"
        )
    mask = mask[:, mask.shape[1] - tokens :].bool()
    # one look, before any work is queued, spares every layer the detour for padding
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


def _check_options(options: dict[str, Any], borders: Tensor | None) -> Tensor | None:
    """Refuse what would be ignored in silence; returns the borders of packed sequences, if there are any."""
    position_ids = options.get("position_ids")
    for name in (*IMPLIED, "position_ids"):
        options.pop(name, None)
    if options.pop("output_attentions", None):
        raise ValueError(
            "output_attentions is True, but attention weights are never formed; leave it out"
        )
    unknown = [name for name, value in options.items() if value is not None]
    if unknown:
        raise TypeError(f"forward got {unknown}, which an atlas model does not take")
    if position_ids is None or borders is not None:
        return borders
    # positions are counted by the state; given ones can only say where packed sequences begin
    flat = position_ids.reshape(-1)
    starts = (flat == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([flat.numel()])])
    places = torch.arange(flat.numel(), device=flat.device)
    counted = places - starts.repeat_interleave(ends.diff()) if len(starts) else places - 1
    if position_ids.shape[0] != 1 or not torch.equal(counted, flat.long()):
        raise ValueError(
            "position_ids are given, but an atlas model counts positions itself, padding left out; "
            "drop them, or for packed sequences pass one row with cu_seq_lens_q"
        )
    return ends
