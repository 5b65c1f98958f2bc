"""Causal softmax attention, full or over a sliding window, with rotary positions."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from atlas_lm.layers.out import OutLinear
from atlas_lm.layers.rotary import rotate
from atlas_lm.layers.tail import advance, extend


class Attention(nn.Module):
    """Every token looks at itself and the tokens before it: at all of them, or at the last `window`.

    A stream leaves its last window - 1 keys and values behind (all of them without a window), and how
    many tokens it has read.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window, self.rope_theta = window, rope_theta
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = OutLinear(heads * head_dim, width)

    def start(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        slots = 0 if self.window is None else self.window - 1
        tail = like.new_zeros(batch, slots, self.kv_heads, self.head_dim)
        position = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return {"k": tail, "v": tail.clone(), "position": position}

    def forward(
        self,
        x: Tensor,
        state: dict[str, Tensor] | None,
        count: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x: [B, T, D].  prefix: [P, D] tokens without a place that every token sees."""
        state = self.start(x.shape[0], x) if state is None else state
        tokens, position = x.shape[1], state["position"]
        places = position.unsqueeze(1) + torch.arange(tokens, device=x.device)
        q, k, v = self.project(x)
        turned = rotate(q, places, self.rope_theta)
        k = rotate(k, places, self.rope_theta)
        keep = state["k"].shape[1] + tokens if self.window is None else self.window - 1
        keys, k_tail = extend(state["k"], k, count, keep)
        values, v_tail = extend(state["v"], v, count, keep)
        seen = _seen(position, keys.shape[1], tokens)
        if prefix is not None and len(prefix):
            turned, keys, values = self._beside(prefix, turned, q, keys, values)
        held = 0 if prefix is None else len(prefix)
        if self.window is None:
            y = attend(turned, keys, values, _causal(tokens, keys.shape[1], seen, held))
        else:
            y = _slide(turned, keys, values, seen, self.window, held)
        after = {"k": k_tail, "v": v_tail, "position": advance(position, tokens, count)}
        return self.merge(y), after

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, H_kv, D], without places."""
        return self.queries(x), *self.pairs(x)

    def queries(self, x: Tensor) -> Tensor:
        q: Tensor = self.q_proj(x)
        return q.unflatten(-1, (self.heads, self.head_dim))

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = (self.kv_heads, self.head_dim)
        return self.k_proj(x).unflatten(-1, shape), self.v_proj(x).unflatten(-1, shape)

    def merge(self, y: Tensor) -> Tensor:
        out: Tensor = self.o_proj(y.flatten(-2))
        return out

    def _beside(
        self, prefix: Tensor, turned: Tensor, q: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put the prefix before the keys, out of reach of the rotation.

        A key without a place must meet a query without one, however long the stream; so queries carry
        both forms side by side, [turned, plain], and each key is zero where the other form stands.
        """
        k, v = self.pairs(prefix.expand(keys.shape[0], -1, -1).to(keys.dtype))
        k, keys = pad(k, (self.head_dim, 0)), pad(keys, (0, self.head_dim))
        q = torch.cat([turned, q], dim=-1)
        return q, torch.cat([k, keys], dim=1), torch.cat([v, values], dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q: [B, T, H, E], k: [B, n, H_kv, E], v: [B, n, H_kv, D], mask: [B or 1, T, n] bool, True where
    the key is seen; None: causal. Scores are scaled by the width of a value. -> [B, T, H, D]"""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    y = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask.unsqueeze(1),
        is_causal=mask is None,
        scale=v.shape[-1] ** -0.5,
    )
    return y.transpose(1, 2)


def _seen(position: Tensor, columns: int, tokens: int) -> Tensor:
    """[B, columns] bool: False for slots of the tail from before the stream began."""
    first = position.unsqueeze(1) - (columns - tokens)
    return first + torch.arange(columns, device=position.device) >= 0


def _causal(tokens: int, columns: int, seen: Tensor, held: int) -> Tensor | None:
    """[B, T, held + columns]: the prefix always, tails that exist, tokens up to oneself."""
    slots = columns - held - tokens
    if slots == 0 and held == 0:
        return None
    mask = torch.ones(tokens, columns - held, dtype=torch.bool, device=seen.device).tril(slots)
    return pad(mask & seen.unsqueeze(1), (held, 0), value=True)


def _slide(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, window: int, held: int) -> Tensor:
    """Attention over the last `window` tokens, in blocks of so many queries: cost T x 2 window.

    q: [B, T, H, E].  k, v: [B, held + window-1 + T, ...], the prefix of `held` first.
    """
    batch, tokens = q.shape[:2]
    size = min(window, tokens)
    blocks = -(-tokens // size)
    rest = blocks * size - tokens
    fixed, k = k[:, :held], k[:, held:]
    fixed_v, v = v[:, :held], v[:, held:]
    q, k, v = (pad(x, (0, 0, 0, 0, 0, rest)) for x in (q, k, v))
    seen = pad(seen, (0, rest))
    span = window - 1 + size

    def overlap(x: Tensor, fixed: Tensor) -> Tensor:
        """[B, n, ...] -> [B * blocks, held + span, ...]"""
        x = x.unfold(1, span, size).movedim(-1, 2)  # [B, blocks, span, ...]
        fixed = fixed.unsqueeze(1).expand(-1, blocks, *fixed.shape[1:])
        return torch.cat([fixed, x], dim=2).flatten(0, 1)

    distance = window - 1 + torch.arange(size, device=q.device).unsqueeze(1)
    distance = distance - torch.arange(span, device=q.device)
    band = (distance >= 0) & (distance < window)  # [size, span]
    present = seen.unfold(1, span, size).flatten(0, 1).unsqueeze(1)  # [B * blocks, 1, span]
    mask = pad((band & present) | (distance == 0), (held, 0), value=True)
    y = attend(
        q.unflatten(1, (blocks, size)).flatten(0, 1), overlap(k, fixed), overlap(v, fixed_v), mask
    )
    return y.reshape(batch, blocks * size, *y.shape[2:])[:, :tokens]
