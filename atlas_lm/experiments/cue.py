"""A task that writing token by token cannot solve, and a window can: which pair to keep is told later.

The stream. K orthonormal keys, each paired with r different values: n = r K pairs in random order, in
blocks of b, each block followed by one cue token. The cue names those pairs of its block that are to be
kept; over the stream it is one pair per key, drawn uniformly among the r. A cue token brings no pair: its
key and value are zero. Afterwards every key is read, and the value nearest among all n must be the cued
one.

Window 1 cannot (matrix memory, descent, nothing forgotten). Let the gates of a pair be any function of
what its token shows (key, value, place), and those of a cue any function of the cue. A pair is written
before its cue is known, so its own write does not depend on the cues; and the write of the cue token is
    eta_t gamma_{t,0} (M k_t - v_t) k_t^T = 0,   since k_t = 0.
So the memory after the stream is the same whatever the cues were. Its read of a key is then one vector,
and the value nearest to it is right for at most one of the r pairs of that key; the cue falls on that
pair with probability 1/r. Hence, for any steps at all,
    expected recall <= 1/r = K/n.

Window c = b + 1 can. At the cue token the window still holds the whole block, and gamma_{t,j} is set to 1
for the cued offsets and 0 elsewhere, with eta_t = 1 there and 0 at pairs. Only cued pairs are written;
their keys are orthonormal, so M = sum v_i k_i^T over the cued pairs, and M k_i = v_i exactly, for any n.

A smaller window reaches the last c - 1 pairs of a block: (c - 1)/b of the cued ones. What the proof
excludes is the rule alone: a short convolution or attention in front of the memory could carry a pair
to its cue too, and then it is they that hold the window.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from atlas_lm.experiments.pairs import Pairs, recalled
from atlas_lm.memory import MemorySpec, MemoryState, memorize, recall
from atlas_lm.memory.windows import Window


@dataclass(frozen=True, kw_only=True)
class CueSettings:
    key_dim: int = 16  # K
    value_dim: int = 16
    block: int = 8  # b, pairs between two cues
    repeats: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # r; the stream has n = r K pairs
    windows: tuple[int, ...] = (1, 3, 5, 9)  # c; b + 1 reaches a whole block
    steps: tuple[float, ...] = (0.03125, 0.125, 0.25, 0.5, 1.0)  # constant steps tried for window 1
    tuning_draws: int = 32  # draws on which that step is chosen
    draws: int = 192  # fresh draws that are reported

    @property
    def ticks(self) -> int:
        """How often `advance` is called: once per length."""
        return len(self.repeats)


QUICK = CueSettings(repeats=(1, 8), windows=(1, 9), steps=(0.25, 1.0), tuning_draws=16, draws=48)


@dataclass(frozen=True, kw_only=True)
class CueStream:
    """Pairs in order, and which of them a later cue names."""

    pairs: Pairs  # [D, n, .]
    cued: Tensor  # [D, n] bool, one pair per key
    block: int

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Keys [D, T, 1, K] and values [D, T, 1, V], an empty cue token after every block."""
        return self._lay_out(self.pairs.keys), self._lay_out(self.pairs.values)

    def is_cue(self) -> Tensor:
        """[D, T, 1], 1 at cue tokens and 0 at pairs."""
        pairs = torch.ones(*self.cued.shape, 1)
        return 1 - self._lay_out(pairs).squeeze(-1)

    def gamma(self, window: int) -> Tensor:
        """[D, T, 1, c]: gamma_{t,j} = 1 where token t is a cue and names the pair j tokens back."""
        named = (
            self.cued.float().unflatten(1, (-1, self.block)).flip(-1)
        )  # [D, blocks, b], by j - 1
        at_cue = pad(named, (1, 0))[..., :window]  # the cue itself, j = 0, is never written
        gamma = pad(at_cue.unsqueeze(2), (0, 0, self.block, 0))  # [D, blocks, b + 1, c]
        return gamma.flatten(1, 2).unsqueeze(2)

    def _lay_out(self, x: Tensor) -> Tensor:
        """[D, n, .] -> [D, T, 1, .], T = n (b + 1) / b"""
        blocks = x.unflatten(1, (-1, self.block))
        return pad(blocks, (0, 0, 0, 1)).flatten(1, 2).unsqueeze(2)


@dataclass(frozen=True, kw_only=True)
class CueCurve:
    """One window: the share of cued pairs recalled, by stream length."""

    window: int
    step: tuple[float, ...]  # the constant step of window 1; 1 at cues for the others
    recall: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Cue:
    settings: CueSettings
    lengths: tuple[int, ...]  # n, pairs in the stream
    bound: tuple[float, ...]  # K/n, what no window-1 memory can pass on average
    curves: tuple[CueCurve, ...]

    @property
    def finding(self) -> str:
        one, wide = self.curves[0], self.curves[-1]
        return (
            f"What to keep is told up to {self.settings.block} tokens later, in a stream of "
            f"{self.lengths[-1]} pairs: window {wide.window} recalls {wide.recall[-1]:.0%} of the cued "
            f"ones, window 1 {one.recall[-1]:.1%} (it can expect {self.bound[-1]:.1%} at most)."
        )


def measure_cue(
    settings: CueSettings, seed: int, advance: Callable[[], None] = lambda: None
) -> Cue:
    """Every window on the same streams."""
    generator = torch.Generator().manual_seed(seed)
    points: dict[int, list[tuple[float, float]]] = {window: [] for window in settings.windows}
    for repeats in settings.repeats:
        stream = draw_stream(settings, repeats, generator)
        for window in settings.windows:
            points[window].append(_measure(settings, stream, window))
        advance()
    curves = []
    for window, pairs in points.items():
        step, share = zip(*pairs, strict=True)
        curves.append(CueCurve(window=window, step=step, recall=share))
    return Cue(
        settings=settings,
        lengths=tuple(settings.key_dim * r for r in settings.repeats),
        bound=tuple(1 / r for r in settings.repeats),
        curves=tuple(curves),
    )


def draw_stream(settings: CueSettings, repeats: int, generator: torch.Generator) -> CueStream:
    """n = repeats * K pairs in random order, one cued pair per key."""
    K, draws = settings.key_dim, settings.tuning_draws + settings.draws
    count = repeats * K
    which = torch.rand(draws, count, generator=generator).argsort(-1) % K  # key of each pair
    basis = torch.linalg.qr(torch.randn(draws, K, K, generator=generator)).Q
    keys = basis.gather(1, which.unsqueeze(-1).expand(-1, -1, K))
    values = torch.randn(draws, count, settings.value_dim, generator=generator)
    lot = torch.rand(draws, 1, count, generator=generator)
    own = which.unsqueeze(1) == torch.arange(K).unsqueeze(-1)  # [D, K, n]
    chosen = torch.where(own, lot, -1.0).argmax(-1)  # [D, K]
    cued = torch.zeros(draws, count, dtype=torch.bool).scatter(1, chosen, True)
    return CueStream(
        pairs=Pairs(keys=keys, values=normalize(values, dim=-1)), cued=cued, block=settings.block
    )


def write_at_cues(settings: CueSettings, stream: CueStream, window: int) -> MemoryState:
    """The Omega rule: nothing is written until a cue names it, and then that pair alone."""
    keys, values = stream.tokens()
    gates = {"eta": stream.is_cue(), "gamma": stream.gamma(window)}
    spec = _spec(settings, window)
    return memorize(spec, spec.init_weights(), None, keys, keys, values, gates)[1]


def write_each_token(
    settings: CueSettings, stream: CueStream, step: float, cue_step: Tensor | None = None
) -> MemoryState:
    """Window 1: every pair is written when it comes.

    cue_step: [D, T, 1], the step at cue tokens, whatever a layer may make of the cue; it changes nothing
    """
    keys, values = stream.tokens()
    is_cue = stream.is_cue()
    eta = step * (1 - is_cue) + (0.0 if cue_step is None else cue_step * is_cue)
    gates = {"eta": eta, "gamma": torch.ones(*eta.shape, 1)}
    spec = _spec(settings, 1)
    return memorize(spec, spec.init_weights(), None, keys, keys, values, gates)[1]


def _measure(settings: CueSettings, stream: CueStream, window: int) -> tuple[float, float]:
    """The step and the share of cued pairs recalled."""
    tuning = settings.tuning_draws
    if window > 1:
        share = _share(stream, write_at_cues(settings, stream, window))
        return 1.0, share[tuning:].mean().item()
    shares = torch.stack(
        [_share(stream, write_each_token(settings, stream, step)) for step in settings.steps]
    )  # [E, D]
    best = int(shares[:, :tuning].mean(1).argmax())
    return settings.steps[best], shares[best, tuning:].mean().item()


def _share(stream: CueStream, state: MemoryState) -> Tensor:
    """Share of the cued pairs whose value is the nearest of all n to the read of their key, [D]."""
    queries = stream.pairs.keys.unsqueeze(2)
    reads = recall(state.spec, state.spec.init_weights(), state, queries).squeeze(2)  # [D, n, V]
    right = recalled(reads, stream.pairs.values)
    return (right * stream.cued).sum(-1) / stream.cued.sum(-1)


def _spec(settings: CueSettings, window: int) -> MemorySpec:
    return MemorySpec(
        heads=1,
        key_dim=settings.key_dim,
        value_dim=settings.value_dim,
        window=Window(size=window, gate="offset"),
    )
