"""One honest layer with a memory, and faults that public layers really have, one per class.

The honest layer: causal convolution, window of two pairs, momentum, forgetting; token by token.
"""

import torch
from torch import Tensor, nn

WIDTH, KERNEL, CHUNK = 8, 3, 4
State = dict[str, Tensor]


class Honest(nn.Module):
    """S <- theta S - eta (slopes of the last two pairs); M <- alpha M + S; y = M q."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.conv = nn.Parameter(torch.randn(KERNEL, WIDTH) / KERNEL)
        self.start = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))

    def initial(self, x: Tensor) -> State:
        batch = x.shape[0]
        return {
            "memory": self.start.expand(batch, -1, -1),
            "momentum": x.new_zeros(batch, WIDTH, WIDTH),
            "k": x.new_zeros(batch, WIDTH),
            "v": x.new_zeros(batch, WIDTH),
            "tail": x.new_zeros(batch, KERNEL - 1, WIDTH),
        }

    def forward(
        self, x: Tensor, state: State | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, State]:
        state = self.initial(x) if state is None else self.reopen(dict(state))
        valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        outputs = []
        for t in range(x.shape[1]):
            y, after = self.step(x[:, t], state)
            outputs.append(y * valid[:, t, None])
            state = self.choose(valid[:, t], after, state)
        return torch.stack(outputs, dim=1), state

    def reopen(self, state: State) -> State:
        return state

    def choose(self, valid: Tensor, after: State, before: State) -> State:
        return {
            n: torch.where(valid.reshape(-1, *[1] * (new.dim() - 1)), new, before[n])
            for n, new in after.items()
        }

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        seen = torch.cat([state["tail"], x.unsqueeze(1)], dim=1)
        h = (seen * self.conv).sum(1)
        k, v = self.encode(h)
        memory = self.common(state["memory"])
        slope = self.slope(memory, k, v) + 0.5 * self.slope(memory, state["k"], state["v"])
        momentum = 0.6 * state["momentum"] - 0.3 * slope
        memory = 0.95 * memory + momentum
        y = (memory @ self.q(h).unsqueeze(-1)).squeeze(-1)
        after = {"memory": memory, "momentum": momentum, "k": k, "v": v, "tail": seen[:, 1:]}
        return y, after

    def encode(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.normalize(self.k(h), dim=-1), self.v(h)

    def common(self, memory: Tensor) -> Tensor:
        return memory

    def slope(self, memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
        error = (memory @ k.unsqueeze(-1)).squeeze(-1) - v
        return error.unsqueeze(-1) * k.unsqueeze(1)


class SymmetricConvolution(Honest):
    """Kernel 3 with padding on both sides: output t sees input t+1."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        padded = nn.functional.pad(x, (0, 0, 1, 1))
        mixed = sum(padded[:, i : i + x.shape[1]] * self.conv[i] for i in range(KERNEL))
        return super().forward(mixed)[0]


class ChunkEndReads(Honest):
    """All tokens of a chunk read the memory that was already updated with the whole chunk."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        state, outputs = self.initial(x), []
        for start in range(0, x.shape[1], CHUNK):
            piece = x[:, start : start + CHUNK]
            for t in range(piece.shape[1]):
                _, state = self.step(piece[:, t], state)
            outputs.append(self.q(piece) @ state["memory"].mT)
        return torch.cat(outputs, dim=1)


class SharedMemory(Honest):
    """One memory for the whole batch."""

    def common(self, memory: Tensor) -> Tensor:
        return memory.mean(0, keepdim=True).expand_as(memory)


class WindowCut(Honest):
    """The pairs of the window do not survive a border."""

    def reopen(self, state: State) -> State:
        return state | {"k": torch.zeros_like(state["k"]), "v": torch.zeros_like(state["v"])}


class MomentumLost(Honest):
    """The momentum is not part of what is handed on."""

    def reopen(self, state: State) -> State:
        return state | {"momentum": torch.zeros_like(state["momentum"])}


class PaddingDecays(Honest):
    """Values of padding are masked, its forgetting is not."""

    def choose(self, valid: Tensor, after: State, before: State) -> State:
        chosen = super().choose(valid, after, before)
        fade = torch.where(valid, 1.0, 0.95)[:, None, None]
        return chosen | {"memory": fade.to(chosen["memory"]) * chosen["memory"]}


class WritesOnlyInTraining(Honest):
    """The update is guarded by `self.training`: it never learns at test time."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = super().step(x, state)
        if self.training:
            return y, after
        h = (torch.cat([state["tail"], x.unsqueeze(1)], dim=1) * self.conv).sum(1)
        y = (state["memory"] @ self.q(h).unsqueeze(-1)).squeeze(-1)
        return y, after | {"memory": state["memory"]}


class DeadValues(Honest):
    """The prediction error is formed under no_grad, so the value projection gets no gradient."""

    def slope(self, memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            error = (memory @ k.unsqueeze(-1)).squeeze(-1) - v
        return error.unsqueeze(-1) * k.unsqueeze(1)


class NoEpsilon(Honest):
    """Unit norm without an epsilon: a zero key is 0/0."""

    def encode(self, h: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k(h)
        return k / k.norm(dim=-1, keepdim=True), self.v(h)


class NeverWrites(Honest):
    """Reads a memory that nothing is written into (and has no convolution to hide it)."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        k, v = self.encode(x * self.conv[0])
        write = 0.0 * self.slope(state["memory"], k, v)
        return (state["memory"] @ self.q(x).unsqueeze(-1)).squeeze(-1), state | {
            "memory": state["memory"] + write
        }


class HiddenState(Honest):
    """Keeps the momentum in the module instead of the state: a saved state is not the whole of it."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        hidden = getattr(self, "hidden", torch.zeros_like(state["momentum"]))
        if hidden.shape != state["momentum"].shape:
            hidden = torch.zeros_like(state["momentum"])
        y, after = super().step(x, state | {"momentum": hidden})
        self.hidden = after["momentum"].detach()
        return y, after


class BreaksOnShortPieces(Honest):
    """Gives NaN for a piece of one token that continues a stream, and is right elsewhere."""

    def forward(
        self, x: Tensor, state: State | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, State]:
        y, after = super().forward(x, state, valid)
        return (y * torch.nan, after) if state is not None and x.shape[1] == 1 else (y, after)
