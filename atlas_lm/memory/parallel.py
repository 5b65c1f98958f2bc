"""Chunk-parallel PyTorch: the same rule as `reference`, a chunk or tile of tokens at a time."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from atlas_lm.memory import pairs
from atlas_lm.memory.architectures import Matrix
from atlas_lm.memory.chunks import anchored
from atlas_lm.memory.layout import Chunk, Grid, lay_out, split, split_with_halo
from atlas_lm.memory.objectives import L2, Dot
from atlas_lm.memory.online import online, tile_size
from atlas_lm.memory.optimizers import Muon
from atlas_lm.memory.retention import Renormalise
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState
from atlas_lm.memory.stretch import Passage, Stretch
from atlas_lm.memory.tokens import Tokens

LINEAR_TILE = 64  # tokens per tile where slopes do not depend on the memory at all


def declines(spec: MemorySpec) -> str | None:
    """Why this spec has no parallel form; None where it has one."""
    if spec.keeps_pairs:
        return None
    if isinstance(spec.optimizer, Muon):
        return "Newton-Schulz with chunk 1 depends on every earlier step" if spec.online else None
    if isinstance(spec.retention, Renormalise):
        return "renormalising after every token needs one weight matrix per token"
    if not spec.online or slopes_are_free(spec):
        return None
    if not isinstance(spec.architecture, Matrix) or spec.architecture.norm:
        return "the online rule (chunk 1) of a memory that is not a plain matrix is not linear"
    if not isinstance(spec.objective, L2):
        return "the online rule (chunk 1) with the Huber objective is not linear"
    return None


def run(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState,
    tokens: Tokens,
    trace: bool,
    fresh: bool = False,
) -> tuple[Tensor, MemoryState, dict[str, Tensor]]:
    """Like `reference.run`: y [B, H, T, V], the next state, norms [B, H, T]."""
    if spec.keeps_pairs:
        return _run_pairs(spec, weights, state, tokens, trace)
    exact = spec.online and not slopes_are_free(spec)
    size = tile_size(spec) if exact else LINEAR_TILE if spec.online else spec.timing.chunk
    step: Callable[..., Passage] = online if exact else anchored
    grid = lay_out(spec, state, tokens, size, fresh)
    stretches = _stretches(spec, weights, grid)
    memory, anchor, momentum = state.memory, state.anchor, state.momentum
    outputs, seen = [], []
    for chunk, stretch in stretches:
        if not spec.online:
            anchor, momentum = _cross(spec, grid, chunk, state.position, memory, anchor, momentum)
        passage = step(
            spec, weights, memory, memory if spec.online else anchor, momentum, stretch, trace
        )
        memory, momentum = passage.memory, passage.momentum
        outputs.append(passage.y)
        seen.append(passage.norms)
    after = replace(
        state,
        memory=memory,
        anchor=anchor,
        momentum=momentum,
        window=grid.window,
        position=state.position + grid.count,
    )
    return _collect(grid, tokens, outputs, seen, after)


def head_chunk(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, grid: Grid
) -> tuple[Tensor, MemoryState]:
    """The first chunk of a grid alone, in the precision of the state: y [B, H, columns, V], and memory,
    anchor and momentum after it."""
    first, like = (
        grid.chunks[0],
        state.position.new_empty(0, dtype=next(iter(state.memory.values())).dtype),
    )
    pairs = {
        n: x[:, :, : first.stop + spec.window.size - 1].to(like) for n, x in grid.pairs.items()
    }
    gates = {n: x[:, :, : first.stop] for n, x in grid.gates.items()}
    head = replace(
        grid, q=grid.q[:, :, : first.stop].to(like), pairs=pairs, gates=gates, chunks=[first]
    )
    [(chunk, stretch)] = _stretches(spec, weights, head)
    anchor, momentum = _cross(
        spec, grid, chunk, state.position, state.memory, state.anchor, state.momentum
    )
    passage = anchored(spec, weights, state.memory, anchor, momentum, stretch, trace=False)
    after = replace(state, memory=passage.memory, anchor=anchor, momentum=passage.momentum)
    return passage.y.to(grid.q.dtype), after


def _cross(
    spec: MemorySpec,
    grid: Grid,
    chunk: Chunk,
    position: Tensor,
    memory: dict[str, Tensor],
    anchor: dict[str, Tensor],
    momentum: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Anchor and momentum as a chunk finds them: at a border the memory becomes the anchor."""
    border = _border(spec, grid, chunk, position)
    cut = {n: spec.optimizer.at_border(s) for n, s in momentum.items()}
    return _select(border, memory, anchor), _select(border, cut, momentum)


def _run_pairs(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, tokens: Tokens, trace: bool
) -> tuple[Tensor, MemoryState, dict[str, Tensor]]:
    grid = lay_out(spec, state, tokens, tile_size(spec), fresh=False)
    state = pairs.make_room(state, tokens.count)
    halo = spec.window.size - 1
    columns = torch.arange(tokens.count + halo, device=tokens.q.device)
    slots = state.position.unsqueeze(1) + columns - halo  # [B, c-1 + T]
    stretches = _stretches(spec, weights, grid)
    new = torch.cat([stretch.x[:, :, halo:] for _, stretch in stretches], dim=2)
    index = slots[:, None, halo:, None].expand_as(new)
    memory = state.memory | {"keys": state.memory["keys"].scatter(2, index, new)}
    outputs, seen = [], []
    for chunk, stretch in stretches:
        here = slots[:, chunk.start : chunk.stop + halo]
        y, memory, norms = pairs.tile(spec, memory, here, stretch, trace)
        outputs.append(y)
        seen.append(norms)
    after = replace(state, memory=memory, window=grid.window, position=state.position + grid.count)
    return _collect(grid, tokens, outputs, seen, pairs.trim(after))


def slopes_are_free(spec: MemorySpec) -> bool:
    """A plain matrix with the dot objective: the slope -v phi^T reads no memory, so no anchor matters."""
    return (
        isinstance(spec.architecture, Matrix)
        and not spec.architecture.norm
        and isinstance(spec.objective, Dot)
    )


def _stretches(
    spec: MemorySpec, weights: Mapping[str, Tensor], grid: Grid
) -> list[tuple[Chunk, Stretch]]:
    halo, chunks = spec.window.size - 1, grid.chunks
    q = split(spec.features(grid.q, weights), chunks)
    x = split_with_halo(spec.features(grid.pairs["k"], weights), chunks, halo)
    pairs = {n: split_with_halo(field, chunks, halo) for n, field in grid.pairs.items()}
    gates = {n: split(gate, chunks) for n, gate in grid.gates.items()}
    stretches = [
        Stretch(
            q=q[i],
            x=x[i],
            pairs={n: pieces[i] for n, pieces in pairs.items()},
            gates={n: pieces[i] for n, pieces in gates.items()},
            valid=grid.valid[:, chunk.start : chunk.stop],
            present=grid.present[:, chunk.start : chunk.stop + halo],
            offset=chunk.offset,
        )
        for i, chunk in enumerate(chunks)
    ]
    return list(zip(chunks, stretches, strict=True))


def _border(spec: MemorySpec, grid: Grid, chunk: Chunk, position: Tensor) -> Tensor | bool:
    """The rows that cross a border with the first token of this chunk: all, none, or [B] bool."""
    if grid.full:
        return chunk.offset == 0
    active = grid.valid[:, chunk.start : chunk.stop].any(1)
    return active & (position % spec.timing.chunk == 0) if chunk.start == 0 else active


def _select(
    rows: Tensor | bool, new: dict[str, Tensor], old: dict[str, Tensor]
) -> dict[str, Tensor]:
    if isinstance(rows, bool):
        return new if rows else old
    return {n: torch.where(rows[:, None, None, None], new[n], old[n]) for n in old}


def _collect(
    grid: Grid,
    tokens: Tokens,
    outputs: list[Tensor],
    seen: list[dict[str, Tensor]],
    after: MemoryState,
) -> tuple[Tensor, MemoryState, dict[str, Tensor]]:
    y = grid.collect(torch.cat(outputs, dim=2), tokens.valid)
    norms = {n: torch.cat([one[n].detach() for one in seen], dim=2) for n in seen[0]}
    return y, after, {n: grid.collect(norm, tokens.valid) for n, norm in norms.items()}
