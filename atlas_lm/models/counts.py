"""What a model costs, from its configuration alone: parameters, products per token, bytes of state.

Everything is a closed formula in the numbers of the configuration and the shapes of its memory; no model
is built. `tests/models/test_counts.py` holds each formula to the model that it speaks of.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from atlas_lm.blocks.block import GROWS, WITHOUT_MEMORY
from atlas_lm.memory import MemorySpec, parallel
from atlas_lm.memory.architectures import GatedMLP
from atlas_lm.memory.features import Exponential, Sketch
from atlas_lm.memory.objectives import Dot
from atlas_lm.memory.online import tile_size
from atlas_lm.memory.optimizers import Muon
from atlas_lm.memory.state import state_shapes
from atlas_lm.models.config import AtlasConfig

TRAINING = 3  # a training step in forward passes: every product has two in the backward pass
WITHOUT_ATTENTION = ("lmm",)
PERSISTENT = ("mal", "mag", "mac")  # wirings with learned tokens before the stream
NORMS = {"mal": 1, "mag": 2, "mac": 2}  # norms of the model's width inside a wiring
POSITION = 8  # bytes: where a row stands, int64


def parameters(config: AtlasConfig) -> dict[str, int]:
    """Trained numbers by part, and their `total`.

    memory: its projections, convolution, initial fast weights and the weights of its parts.  head: zero
    where it shares the weights of the embedding.  Random constants that are saved but never trained (the
    tables of a sketch) are left out, as in `model.num_parameters()`.

    >>> from atlas_lm.models.sizes import configure
    >>> parameters(configure("titans", block="mag", size="tiny"))["mlp"] == 2 * 3 * 64 * 176
    True
    """
    width, table = config.hidden_size, config.vocab_size * config.hidden_size
    counts = Counter(embedding=table, head=0 if config.tie_word_embeddings else table, norms=width)
    for wiring, times in Counter(config.blocks).items():
        counts.update(_times(times, _block_parameters(config, wiring)))
    return _with_total(counts, PARTS)


PARTS = ("embedding", "head", "attention", "memory", "gates", "mlp", "norms", "persistent")


def _block_parameters(config: AtlasConfig, wiring: str) -> dict[str, int]:
    width = config.hidden_size
    found = {
        "mlp": 3 * width * config.intermediate_size,
        "norms": (2 + NORMS.get(wiring, 0)) * width,
        "persistent": config.persistent_tokens * width if wiring in PERSISTENT else 0,
    }
    if wiring not in WITHOUT_ATTENTION:
        found["attention"] = width * (2 * _queries(config) + 2 * _pairs(config))
    spec = _spec(config, wiring)
    if spec is not None:
        trained = [s for n, s in spec.weight_shapes.items() if n not in spec.frozen_weights]
        found["memory"] = _channels(spec) * (width + config.conv_size) + 2 * width * _values(spec)
        found["memory"] += sum(map(math.prod, trained))
        found["gates"] = sum(
            width * config.gate_rank + (config.gate_rank + 1) * outputs
            for outputs in _gate_outputs(spec)
        )
        found["norms"] += spec.value_dim
    return found


def state_bytes(config: AtlasConfig, tokens: int = 0, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that one stream keeps after `tokens` tokens: what `StreamState.bytes` says, a formula here.

    Without tokens: the part of fixed size. Full attention and memories of kept pairs add the same number of
    bytes with every token.  dtype: of the model's weights; memories are kept in fp32 even below it.
    """
    bytes_of = {"tails": dtype.itemsize, "memory": max(dtype.itemsize, torch.float32.itemsize)}
    numbers = Counter[str]()
    for wiring, times in Counter(config.blocks).items():
        numbers.update(_times(times, _block_state(config, wiring, tokens)))
    return POSITION * (1 + numbers.pop("positions")) + sum(
        bytes_of[kind] * count for kind, count in numbers.items()
    )


def _block_state(config: AtlasConfig, wiring: str, tokens: int) -> Counter[str]:
    """Numbers that a block keeps of one stream: of memories, of tails, and positions."""
    kept = Counter[str](positions=0 if wiring == "lmm" else 1)
    spec = _spec(config, wiring)
    if wiring == "mac":
        kept["tails"] += 4 * config.segment * _pairs(config)
    elif wiring not in WITHOUT_ATTENTION:
        slots = tokens if wiring in GROWS else config.sliding_window - 1
        kept["tails"] += 2 * slots * _pairs(config)
    if spec is None:
        return kept
    kept["positions"] += 1
    kept["tails"] += (config.conv_size - 1) * _channels(spec)
    groups = state_shapes(spec, 1)
    kept["memory"] += sum(math.prod(s) for group in groups.values() for s in group.values())
    if wiring == "mac":  # also the memory from before the segment, and the tail of its queries
        kept["tails"] += (config.conv_size - 1) * spec.heads * spec.key_dim
        kept["memory"] += sum(map(math.prod, groups["memory"].values()))
    if spec.keeps_pairs:
        read_first = config.persistent_tokens if wiring in PERSISTENT else 0
        of_pair = sum(shape[-1] for shape in groups["memory"].values())
        kept["memory"] += (tokens + read_first) * spec.heads * of_pair
    return kept


def flops_per_token(config: AtlasConfig, tokens: int) -> dict[str, float]:
    """Forward FLOPs per token by part, and their `total`, when a new stream is read `tokens` at a time.

    Counted: every matrix product that the model as it stands does, 2 per multiply-add, masked scores
    included (full attention over T tokens has T x T of them); the solution of triangular systems, n^2 per
    column. Memories are counted in the form that runs them: chunks or tiles where there is one, token by
    token otherwise, without a trace. Left out: norms, activations, softmax, short convolutions, rotary,
    Fourier transforms of a sketch, and all else that goes number by number.
    A training step costs TRAINING times as much, once more the forward pass with gradient checkpointing.

    >>> from atlas_lm.models.sizes import configure
    >>> flops_per_token(configure("titans", size="tiny"), 1024)["mlp"] == 2 * 2 * 3 * 64 * 176
    True
    """
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}, wanted 1 or more: the length that is read at once")
    counts = Counter(head=tokens * 2 * config.hidden_size * config.vocab_size)
    for wiring, times in Counter(config.blocks).items():
        counts.update(_times(times, _block_flops(config, wiring, tokens)))
    return {n: count / tokens for n, count in _with_total(counts, FLOP_PARTS).items()}


FLOP_PARTS = ("head", "attention", "memory", "gates", "mlp")


def _block_flops(config: AtlasConfig, wiring: str, tokens: int) -> Counter[str]:
    held = config.persistent_tokens
    counts = Counter(mlp=tokens * 6 * config.hidden_size * config.intermediate_size)
    if wiring == "mac":
        for first in range(0, tokens, config.segment):
            counts += _context(config, first, min(config.segment, tokens - first))
        return counts
    read = tokens + (held if wiring in PERSISTENT else 0)
    if wiring == "attention":
        counts["attention"] += _project(config, tokens) + _scores(config, tokens, tokens)
    elif wiring == "mag":
        beside = 4 * held * config.hidden_size * _pairs(config)
        counts["attention"] += _project(config, tokens) + beside + _slide(config, tokens, held)
    elif wiring in ("sliding", "mal"):
        counts["attention"] += _project(config, read) + _slide(config, read, 0)
    return counts if _spec(config, wiring) is None else counts + _mixer(config, 0, read)


def _project(config: AtlasConfig, tokens: int) -> int:
    """Queries, keys, values and output of attention."""
    return 4 * tokens * config.hidden_size * (_queries(config) + _pairs(config))


def _scores(config: AtlasConfig, queries: int, keys: int, twice: bool = False) -> int:
    """Scores and the values they weigh. twice: queries and keys have two forms side by side."""
    return (3 if twice else 2) * 2 * queries * keys * _queries(config)


def _slide(config: AtlasConfig, tokens: int, held: int) -> int:
    """Blocks of `window` queries, each with the keys of its block, of the one before, and held ones."""
    size = min(config.sliding_window, tokens)
    keys = held + config.sliding_window - 1 + size
    return _scores(config, -(-tokens // size) * size, keys, twice=held > 0)


def _context(config: AtlasConfig, first: int, tokens: int) -> Counter[str]:
    """One segment of `mac`: ask the memory, attend to [persistent, answers, text], write what came out."""
    spec, width, held = config.spec, config.hidden_size, config.persistent_tokens
    assert spec is not None
    ask = 2 * width * (spec.heads * spec.key_dim + 2 * _values(spec))
    ask += spec.heads * (_features(spec) + 2 * _weights(spec))
    attention = 4 * tokens * width * _queries(config)  # queries and output
    attention += 4 * width * _pairs(config) * (2 * tokens + held)  # pairs of answers, text, held
    attention += _scores(config, tokens, held + 2 * config.segment)
    return Counter(memory=tokens * ask, attention=attention) + _mixer(config, first, tokens)


def _mixer(config: AtlasConfig, first: int, tokens: int) -> Counter[str]:
    """Projections, gates and rule of a memory, for tokens first .. first + tokens of its stream."""
    spec, width, rank = config.spec, config.hidden_size, config.gate_rank
    assert spec is not None
    projections = 2 * width * (_channels(spec) + 2 * _values(spec))
    gates = sum(2 * rank * (width + outputs) for outputs in _gate_outputs(spec))
    rule = spec.heads * _rule(spec, first, tokens)
    return Counter(memory=tokens * projections + rule, gates=tokens * gates)


def _rule(spec: MemorySpec, first: int, tokens: int) -> int:
    """One head of the rule over a stretch of its stream."""
    if parallel.declines(spec):
        return tokens * _token_by_token(spec)
    encode = (2 * tokens + spec.window.size - 1) * _features(spec)
    if spec.keeps_pairs:
        slots = first + tokens
        return encode + sum(_tile_of_pairs(spec, t, slots) for _, t in _cut(spec, first, tokens))
    one = _tile if _exact(spec) else _chunk
    return encode + sum(one(spec, offset, t) for offset, t in _cut(spec, first, tokens))


def _exact(spec: MemorySpec) -> bool:
    """Errors inside a tile depend on each other and are solved for."""
    return spec.keeps_pairs or (spec.online and not parallel.slopes_are_free(spec))


def _cut(spec: MemorySpec, first: int, tokens: int) -> Iterator[tuple[int, int]]:
    """The chunks or tiles of a stretch: place of the first token in its chunk, and number of tokens."""
    size = spec.timing.chunk
    if spec.online:
        size = tile_size(spec) if _exact(spec) else parallel.LINEAR_TILE
    offset = 0 if spec.online else first % size
    while tokens > 0:
        now = min(size - offset, tokens)
        yield offset, now
        tokens, offset = tokens - now, 0


def _chunk(spec: MemorySpec, offset: int, tokens: int) -> int:
    """Slopes at the anchor, the rule on their coefficients, the read along the trajectory (`chunks.py`)."""
    pairs, weights = tokens + spec.window.size - 1, _weights(spec)
    slopes = 2 * pairs * (weights + _pulled(spec))
    scans = _scans(spec, tokens, pairs)
    if isinstance(spec.optimizer, Muon):
        return slopes + scans + _jumps(spec, offset, tokens, pairs)
    return slopes + scans + _trajectory(spec, tokens, pairs)


def _trajectory(spec: MemorySpec, tokens: int, terms: int) -> int:
    """Read a memory of `terms` rank-one terms at every token, and form it at the last (`trajectory.py`)."""
    sides, weights = sum(map(sum, spec.fast_shapes.values())), _weights(spec)
    ends = 2 if spec.optimizer.has_momentum else 1
    return 2 * (tokens * terms * sides + _bases(spec) * tokens * weights + ends * terms * weights)


def _jumps(spec: MemorySpec, offset: int, tokens: int, terms: int) -> int:
    """Momentum at the end of each period, Newton-Schulz on it, and the read between (`jumps.py`)."""
    assert isinstance(spec.optimizer, Muon)
    period, weights = spec.timing.period, _weights(spec)
    jumps = sum((offset + t + 1) % period == 0 for t in range(tokens))
    groups = jumps + bool((offset + 1) % period)
    reads = groups * period + tokens * ("log_alpha" in spec.gates and spec.retention.reads_start)
    orthogonalise = spec.optimizer.steps * sum(map(_newton_schulz, spec.fast_shapes.values()))
    return jumps * orthogonalise + 2 * weights * (jumps * terms + terms + reads)


def _newton_schulz(shape: tuple[int, int]) -> int:
    """X X^T, its square, and their product with X."""
    short, long = min(shape), max(shape)
    return 2 * short * short * (2 * long + short)


def _tile(spec: MemorySpec, _: int, tokens: int) -> int:
    """The exact online rule: errors of all windows of the tile in one triangular system (`online.py`)."""
    rows, weights = tokens * spec.window.size, _weights(spec)
    known = 2 * rows * _bases(spec) * weights
    system = rows * rows * (2 * spec.feature_dim + spec.value_dim)
    return known + system + _scans(spec, tokens, rows) + _trajectory(spec, tokens, rows)


def _tile_of_pairs(spec: MemorySpec, tokens: int, slots: int) -> int:
    """The same for kept pairs, read against every slot of the stream so far (`pairs.py`)."""
    assert isinstance(spec.features, Exponential)
    rows, pairs = tokens * spec.window.size, tokens + spec.window.size - 1
    width = spec.value_dim + spec.features.normalise
    reads = 2 * tokens * (slots + rows) * (spec.key_dim + width)
    if not isinstance(spec.objective, Dot):
        reads += 2 * pairs * slots * (spec.key_dim + width)
        reads += rows * rows * (2 * spec.key_dim + width)
    return reads + _scans(spec, tokens, rows)


def _scans(spec: MemorySpec, tokens: int, terms: int) -> int:
    """Retention on the coefficients of a chunk, and momentum before it: one masked product each."""
    dense = 3  # columns before those of the slopes: memory, momentum and start
    scans = 2 if spec.optimizer.has_momentum else 1
    return scans * 2 * tokens * (tokens + 1) * (dense + terms)


def _token_by_token(spec: MemorySpec) -> int:
    """One token of the definition: slopes of the window, their sum, the step, the read (`reference.py`)."""
    size, weights = spec.window.size, _weights(spec)
    products = 2 * (size * (weights + _pulled(spec)) + size * weights + weights)
    if isinstance(spec.optimizer, Muon):
        products += spec.optimizer.steps * sum(map(_newton_schulz, spec.fast_shapes.values()))
    return products + (size + 1) * _features(spec)


def _bases(spec: MemorySpec) -> int:
    """Dense matrices that a memory inside a chunk is made of: itself, momentum, start."""
    return 1 + spec.optimizer.has_momentum + spec.retention.reads_start


def _features(spec: MemorySpec) -> int:
    """Of one key or query of one head."""
    if isinstance(spec.features, Sketch):
        return 2 * math.prod(spec.weight_shapes["features.tables"][1:])
    return 2 * spec.key_dim * (getattr(spec.features, "project", None) or 0)


def _weights(spec: MemorySpec) -> int:
    """Fast weights of one head: multiply-adds of one read."""
    return sum(map(math.prod, spec.fast_shapes.values()))


def _pulled(spec: MemorySpec) -> int:
    """Fast weights through which an error travels back: all but those that read the features."""
    first = {"w0", "gate"} if isinstance(spec.architecture, GatedMLP) else {"w0"}
    return sum(math.prod(shape) for name, shape in spec.fast_shapes.items() if name not in first)


def _spec(config: AtlasConfig, wiring: str) -> MemorySpec | None:
    return None if wiring in WITHOUT_MEMORY else config.spec


def _channels(spec: MemorySpec) -> int:
    """Of queries, keys and values together."""
    return spec.heads * (2 * spec.key_dim + spec.value_dim)


def _values(spec: MemorySpec) -> int:
    return spec.heads * spec.value_dim


def _gate_outputs(spec: MemorySpec) -> list[int]:
    """Numbers per token that each gate's producer makes."""
    return [spec.heads * max(gate.offsets, 1) for gate in spec.gates.values()]


def summary(config: AtlasConfig, tokens: int = 4096) -> str:
    """Parameters, cost and state of a model in a few lines for people. tokens: read at once.

    >>> from atlas_lm.models.sizes import configure
    >>> print(summary(configure("titans", size="20M", vocab_size=32000)))
    parameters  35.8 M (embedding 12.3 M, memory 10.3 M, gates 206 k, mlp 13.0 M, norms 9.54 k)
    per token   102 MFLOP forward, 305 MFLOP in training, reading 4096 at once
    state       26.1 MB per stream in fp32, of fixed size
    """
    trained = parameters(config)
    parts = ", ".join(f"{n} {_short(c)}" for n, c in trained.items() if c and n != "total")
    forward, fixed = flops_per_token(config, tokens)["total"], state_bytes(config)
    training = _short(TRAINING * forward, "FLOP")
    growth = _short(state_bytes(config, 1) - fixed, "B")
    grows = f"and {growth} for every token ({config.grows})" if config.grows else "of fixed size"
    return (
        f"parameters  {_short(trained['total'])} ({parts})\n"
        f"per token   {_short(forward, 'FLOP')} forward, {training} in training, reading {tokens} at once\n"
        f"state       {_short(fixed, 'B')} per stream in fp32, {grows}"
    )


def _short(number: float, unit: str = "") -> str:
    """Three digits and a decimal prefix."""
    prefixes = iter("kMGT")
    digits, prefix = f"{number:.0f}", ""
    while number >= 999.5 and (prefix := next(prefixes, "")):
        number /= 1000
        digits = f"{number:#.3g}".removesuffix(".")
    return f"{digits} {prefix}{unit}".rstrip()


def _queries(config: AtlasConfig) -> int:
    return config.num_attention_heads * config.head_dim


def _pairs(config: AtlasConfig) -> int:
    """Width of the keys of attention over all heads, and of its values."""
    return config.num_key_value_heads * config.head_dim


def _times(times: int, counts: Mapping[str, int]) -> dict[str, int]:
    return {part: times * count for part, count in counts.items()}


def _with_total(counts: Counter[str], parts: tuple[str, ...]) -> dict[str, int]:
    return {part: counts[part] for part in parts} | {"total": counts.total()}
