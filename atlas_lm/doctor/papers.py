"""Each preset's equation, typed out directly from its paper; nothing here shares code with the memory."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from math import factorial, prod, sqrt

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

from atlas_lm.memory.features import Taylor
from atlas_lm.memory.optimizers import Muon
from atlas_lm.memory.spec import MemorySpec

Weights = Mapping[str, Tensor]
Paper = Callable[[MemorySpec, Weights, Tensor, Tensor, Tensor, Weights], Tensor]
Memory = dict[str, Tensor]  # fast weights [B, H, O, I]


@dataclass(frozen=True)
class Stream:
    """What a paper is given, heads first: q, k, v and gates are [B, H, T, ...]."""

    spec: MemorySpec
    weights: Weights
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Weights

    def start(self) -> Memory:
        """The initial memory in every row of the batch."""
        fast = {n: w for n, w in self.weights.items() if n.startswith("memory.")}
        return {n.removeprefix("memory."): w.expand(len(self.q), *w.shape) for n, w in fast.items()}

    def gates_at(self, t: int) -> Memory:
        """The numbers of token t, [B, H, 1, 1]."""
        return {n: gate[:, :, t, None, None] for n, gate in self.gates.items() if gate.dim() == 3}


Rule = Callable[[Stream], Tensor]
Features = Callable[[Stream, Tensor], Tensor]
Network = Callable[[Stream, Memory, Tensor], Tensor]
Loss = Callable[[Stream, Tensor, slice], Tensor]
Moved = tuple[Memory, Memory]  # M and S
Step = Callable[[Stream, int, Memory, Memory, Memory, Memory], Moved]
Move = Callable[[Tensor, Tensor, Tensor, Memory], Tensor]


def plain(s: Stream, x: Tensor) -> Tensor:
    return x


def unit(s: Stream, x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def shrink(s: Stream, x: Tensor) -> Tensor:
    """The key in few dimensions, at unit length. x: [B, H, T, K] -> [B, H, T, K']"""
    project = s.weights.get("features.project")  # [H, K', K]
    return unit(s, x if project is None else x @ project.mT)


def monomials(x: Tensor, c: Tensor) -> Tensor:
    """c_i sqrt(multinomial) x^m for all m of degree i <= p, so phi(q).phi(k) = sum_i c_i^2 (q.k)^i.

    x: [B, H, T, K']   c: [H, p+1] or [p+1]   returns [B, H, T, C(K'+p, p)]
    """
    padded = torch.cat([torch.ones_like(x[..., :1]), x], -1)  # index 0 stands for the number 1
    columns = []
    for m in combinations_with_replacement(range(padded.shape[-1]), c.shape[-1] - 1):
        powers = Counter(index for index in m if index > 0)
        degree = powers.total()
        ways = factorial(degree) // prod(factorial(power) for power in powers.values())
        columns.append(c[..., degree, None] * sqrt(ways) * padded[..., m].prod(-1))
    return torch.stack(columns, -1)


def polynomial(s: Stream, x: Tensor) -> Tensor:
    """c_i from their weights [H, p+1], sum_i c_i^2 brought to 1: unit keys have unit features."""
    return monomials(shrink(s, x), unit(s, s.weights["features.amplitudes"]))


def taylor(s: Stream, x: Tensor) -> Tensor:
    """exp(q.k) up to a degree: c_i = sqrt(1 / i!), not normalised."""
    assert isinstance(s.spec.features, Taylor)
    c = [sqrt(1 / factorial(i)) for i in range(s.spec.features.degree + 1)]
    return monomials(shrink(s, x), torch.tensor(c, dtype=x.dtype, device=x.device))


def skip(core: Tensor, z: Tensor) -> Tensor:
    return z + core if z.shape[-1] == core.shape[-1] else core


def mlp(s: Stream, M: Memory, z: Tensor) -> Tensor:
    """skip(z) + W1 GELU(W0 z). z: [B, H, n, F] -> [B, H, n, V]"""
    return skip(gelu(z @ M["w0"].mT) @ M["w1"].mT, z)


def gated_mlp(s: Stream, M: Memory, z: Tensor) -> Tensor:
    """skip(z) + W1 (GELU(W0 z) * Wg z), Atlas++."""
    return skip((gelu(z @ M["w0"].mT) * (z @ M["gate"].mT)) @ M["w1"].mT, z)


def swiglu(s: Stream, M: Memory, z: Tensor) -> Tensor:
    """W1 (SiLU(W0 z) * Wg z), LaCT."""
    return (silu(z @ M["w0"].mT) * (z @ M["gate"].mT)) @ M["w1"].mT


def ttt_linear(s: Stream, M: Memory, z: Tensor) -> Tensor:
    """z + LN(W0 z)"""
    return z + scaled_norm(s, z @ M["w0"].mT)


def ttt_mlp(s: Stream, M: Memory, z: Tensor) -> Tensor:
    """z + LN(W1 GELU(W0 z))"""
    return z + scaled_norm(s, gelu(z @ M["w0"].mT) @ M["w1"].mT)


def scaled_norm(s: Stream, x: Tensor) -> Tensor:
    scale, bias = s.weights["architecture.norm_weight"], s.weights["architecture.norm_bias"]
    return layer_norm(x, x.shape[-1:], eps=1e-6) * scale[:, None] + bias[:, None]  # both [H, V]


def squared(s: Stream, p: Tensor, i: slice) -> Tensor:
    """1/2 |p - v|^2 of the pairs i. p: [B, H, n, V] -> [B, H, n]"""
    return (p - s.v[:, :, i]).square().sum(-1) / 2


def inner(s: Stream, p: Tensor, i: slice) -> Tensor:
    """-<p, v>"""
    return -(p * s.v[:, :, i]).sum(-1)


def huber(s: Stream, p: Tensor, i: slice) -> Tensor:
    """1/2 |p - v|^2 up to |p - v| = delta, delta (|p - v| - delta / 2) beyond (Miras)."""
    e, delta = (p - s.v[:, :, i]).norm(dim=-1), s.gates["delta"][:, :, i]
    return torch.where(e <= delta, e.square() / 2, delta * (e - delta / 2))


def alone(s: Stream) -> Tensor:
    """gamma of the present pair alone, [B, H, T, 1]."""
    return torch.ones_like(s.v[..., :1])


def window(s: Stream) -> Tensor:
    """gamma_{t,j}, [B, H, T, c]."""
    return s.gates["gamma"]


def descend(s: Stream, t: int, g: Memory, M: Memory, S: Memory, G: Memory) -> Moved:
    """M_t = M_{t-1} - eta_t G_t"""
    return {n: M[n] - g["eta"] * G[n] for n in M}, S


def forget(s: Stream, t: int, g: Memory, M: Memory, S: Memory, G: Memory) -> Moved:
    """M_t = alpha_t M_{t-1} - eta_t G_t"""
    return {n: g["log_alpha"].exp() * M[n] - g["eta"] * G[n] for n in M}, S


def surprise(s: Stream, t: int, g: Memory, M: Memory, S: Memory, G: Memory) -> Moved:
    """S_t = theta_t S_{t-1} - eta_t G_t; M_t = alpha_t M_{t-1} + S_t (Titans)"""
    S = {n: g["theta"] * S[n] - g["eta"] * G[n] for n in M}
    return {n: g["log_alpha"].exp() * M[n] + S[n] for n in M}, S


def newton_schulz(s: Stream, S: Tensor) -> Tensor:
    """X <- aX + (bA + cA^2)X with A = X X^T, from X = S / (|S|_F + eps) (Jordan et al. 2024)."""
    assert isinstance(s.spec.optimizer, Muon)
    a, b, c = 3.4445, -4.7750, 2.0315
    X = S / (S.square().sum((-2, -1), keepdim=True).sqrt() + s.spec.optimizer.eps)
    for _ in range(s.spec.optimizer.steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def muon(s: Stream, t: int, g: Memory, M: Memory, S: Memory, G: Memory) -> Moved:
    """S_t = theta_t S_{t-1} + G_t; M_t = alpha_t M_{t-1} - eta_t NS_5(S_t), NS when a period ends (Atlas)"""
    S = {n: g["theta"] * S[n] + G[n] for n in M}
    M = {n: g["log_alpha"].exp() * M[n] for n in M}
    if (t + 1) % s.spec.timing.period == 0:
        M = {n: M[n] - g["eta"] * newton_schulz(s, S[n]) for n in M}
    return M, S


def per_chunk(s: Stream, t: int, g: Memory, M: Memory, S: Memory, G: Memory) -> Moved:
    """S <- theta S + sum of a chunk's G; M <- M - eta NS(S), rows back to their first length (LaCT)"""
    start, period = s.start(), s.spec.timing.period
    S = {n: (g["theta"] * S[n] if t % period == 0 else S[n]) + G[n] for n in M}
    if (t + 1) % period == 0:
        M = {n: M[n] - g["eta"] * newton_schulz(s, S[n]) for n in M}
        M = {n: unit(s, M[n]) * start[n].norm(dim=-1, keepdim=True) for n in M}
    return M, S


def omega(net: Network, phi: Features, loss: Loss, weigh: Rule, step: Step, s: Stream) -> Tensor:
    """G_t = d/dM sum_j gamma_{t,j} l(A(M; phi(k_{t-j})), v_{t-j}) at the last chunk border, a step, a read"""
    x, z, gamma = phi(s, s.q), phi(s, s.k), weigh(s)

    def bias(W: Memory, t: int) -> Tensor:
        pairs = slice(max(0, t + 1 - gamma.shape[-1]), t + 1)
        near = gamma[:, :, t].flip(-1)[..., -t - 1 :]  # oldest pair first
        return (near * loss(s, net(s, W, z[:, :, pairs]), pairs)).sum()  # rows and heads never meet

    M, y = s.start(), []
    S = {name: torch.zeros_like(weight) for name, weight in M.items()}
    for t in range(x.shape[2]):
        if t % s.spec.timing.chunk == 0:
            anchor = M
        M, S = step(s, t, s.gates_at(t), M, S, torch.func.grad(bias)(anchor, t))
        y.append(net(s, M, x[:, :, t : t + 1]))
    return torch.cat(y, 2)


def gla(M: Tensor, k: Tensor, v: Tensor, g: Memory) -> Tensor:
    """M_t = alpha_t M_{t-1} + v_t k_t^T (Yang et al. 2023, its gate one number per head)"""
    return g["log_alpha"].exp() * M + v @ k.mT


def deltanet(M: Tensor, k: Tensor, v: Tensor, g: Memory) -> Tensor:
    """M_t = M_{t-1} (I - eta_t k_t k_t^T) + eta_t v_t k_t^T (Schlag et al. 2021)"""
    I = torch.eye(k.shape[-2]).to(k)
    return M @ (I - g["eta"] * k @ k.mT) + g["eta"] * v @ k.mT


def gated_deltanet(M: Tensor, k: Tensor, v: Tensor, g: Memory) -> Tensor:
    """M_t = M_{t-1} alpha_t (I - eta_t k_t k_t^T) + eta_t v_t k_t^T (Yang et al. 2024)"""
    I = torch.eye(k.shape[-2]).to(k)
    return M @ (g["log_alpha"].exp() * (I - g["eta"] * k @ k.mT)) + g["eta"] * v @ k.mT


def longhorn(M: Tensor, k: Tensor, v: Tensor, g: Memory) -> Tensor:
    """M_t = argmin_M |M - M_{t-1}|^2 + eta_t |M k_t - v_t|^2 (Liu et al. 2024), its normal equation"""
    I = torch.eye(k.shape[-2]).to(k)
    return torch.linalg.solve(I + g["eta"] * k @ k.mT, M + g["eta"] * v @ k.mT, left=False)


def recurrence(phi: Features, move: Move, s: Stream) -> Tensor:
    """M_t = move(M_{t-1}), y_t = M_t q_t, with columns k_t [B, H, K, 1] and v_t [B, H, V, 1]."""
    q, k, v = phi(s, s.q)[..., None], phi(s, s.k)[..., None], s.v[..., None]
    M, y = s.start()["w0"], []
    for t in range(q.shape[2]):
        M = move(M, k[:, :, t], v[:, :, t], s.gates_at(t))
        y.append(M @ q[:, :, t])
    return torch.stack(y, 2).squeeze(-1)


def decays(log_alpha: Tensor) -> Tensor:
    """D[t, i] = prod_{i < j <= t} alpha_j for i <= t, else 0. log_alpha: [B, H, T] -> [B, H, T, T]"""
    total = log_alpha.cumsum(-1)
    return causal(total[..., :, None] - total[..., None, :]).exp()


def causal(logits: Tensor) -> Tensor:
    return logits + torch.full_like(logits, -torch.inf).triu(1)


def steps(s: Stream) -> Tensor:
    """eta_t gamma_{t,t-i}, the weight of pair i at token t, 0 outside the window. [B, H, T, T]"""
    gamma, T = window(s), s.v.shape[2]
    bands = [gamma[..., j:, j].diag_embed(-j) for j in range(min(T, gamma.shape[-1]))]
    return s.gates["eta"][..., None] * torch.stack(bands).sum(0)


def linear_attention(s: Stream) -> Tensor:
    """Y = tril(Q K^T) V, and what the initial memory answers (Katharopoulos et al. 2020)."""
    return s.q @ s.start()["w0"].mT + (s.q @ s.k.mT).tril() @ s.v


def retnet(s: Stream) -> Tensor:
    """Y = (Q K^T * D) V with D[t, i] = prod_{i<j<=t} alpha_j (Sun et al. 2023)."""
    past = s.gates["log_alpha"].cumsum(-1).exp()[..., None] * s.q
    return past @ s.start()["w0"].mT + (s.q @ s.k.mT * decays(s.gates["log_alpha"])) @ s.v


def softmax_attention(s: Stream) -> Tensor:
    """Y = softmax(Q K^T / sqrt K) V, causal (Vaswani et al. 2017)."""
    return torch.softmax(causal(s.q @ s.k.mT / sqrt(s.q.shape[-1])), -1) @ s.v


def swla(s: Stream) -> Tensor:
    """M_t = alpha_t M_{t-1} + eta_t sum_j gamma_{t,j} v_{t-j} phi(k_{t-j})^T (Atlas), unrolled."""
    cosine = shrink(s, s.q) @ shrink(s, s.k).mT  # [B, H, T, T]
    c = unit(s, s.weights["features.amplitudes"])[..., None, None]  # [H, p+1, 1, 1]
    kernel = torch.stack([c[:, i] ** 2 * cosine**i for i in range(c.shape[1])]).sum(0)
    past = s.gates["log_alpha"].cumsum(-1).exp()[..., None] * polynomial(s, s.q)
    return past @ s.start()["w0"].mT + (decays(s.gates["log_alpha"]) @ steps(s) * kernel) @ s.v


def deep_transformer_pairs(s: Stream) -> Tensor:
    """y_t = sum_{i<=t} eta_i v_i exp(k_i.q_t): attention without its denominator (Atlas)."""
    return (unit(s, s.q) @ unit(s, s.k).mT).exp().tril() @ (s.gates["eta"][..., None] * s.v)


def swdt_pairs(s: Stream) -> Tensor:
    """y_t = sum_i v_i exp(k_i.q_t) sum_{i<=n<=t} eta_n gamma_{n,n-i} (Atlas)."""
    return (steps(s).cumsum(-2) * (unit(s, s.q) @ unit(s, s.k).mT).exp()) @ s.v


def dot_pairs(s: Stream) -> Tensor:
    """M_t = M_{t-1} - eta_t sum_j gamma_{t,j} (M_{t-1} phi(k_{t-j}) - v_{t-j}) phi(k_{t-j})^T (Atlas)"""
    q, k, step = unit(s, s.q), unit(s, s.k), steps(s)[..., None]
    w, y = torch.zeros_like(s.v), []  # M_t = sum_i w_i phi(k_i)^T, phi(q).phi(k) = exp(q.k)
    for t in range(q.shape[2]):
        w = w - step[:, :, t] * ((k @ k.mT).exp() @ w - s.v)
        y.append((q[:, :, t, None] @ k.mT).exp() @ w)
    return torch.cat(y, 2)


def run(
    rule: Rule, spec: MemorySpec, weights: Weights, q: Tensor, k: Tensor, v: Tensor, gates: Weights
) -> Tensor:
    """The door: q, k [B, T, H, K], v [B, T, H, V], gates [B, T, H, ...] -> y [B, T, H, V]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    gates = {name: gate.transpose(1, 2) for name, gate in gates.items()}
    return rule(Stream(spec, weights, q, k, v, gates)).transpose(1, 2)


RULES: dict[str, Rule] = {
    "linear_attention": linear_attention,
    "retnet": retnet,
    "gla": partial(recurrence, plain, gla),
    "softmax_attention": softmax_attention,
    "deltanet": partial(recurrence, unit, deltanet),
    "gated_deltanet": partial(recurrence, unit, gated_deltanet),
    "longhorn": partial(recurrence, unit, longhorn),
    "ttt_linear": partial(omega, ttt_linear, plain, squared, alone, descend),
    "ttt_mlp": partial(omega, ttt_mlp, plain, squared, alone, descend),
    "titans": partial(omega, mlp, unit, squared, alone, surprise),
    "yaad": partial(omega, mlp, unit, huber, alone, forget),
    "lact": partial(omega, swiglu, unit, inner, window, per_chunk),
    "dla": partial(omega, mlp, polynomial, inner, alone, forget),
    "swla": swla,
    "omeganet": partial(omega, mlp, polynomial, squared, window, forget),
    "atlas": partial(omega, mlp, polynomial, squared, window, muon),
    "atlas_pp": partial(omega, gated_mlp, polynomial, squared, window, muon),
    "titans_atlas": partial(omega, mlp, polynomial, squared, window, surprise),
    "deep_transformer": partial(omega, mlp, taylor, inner, alone, descend),
    "swdt": partial(omega, mlp, taylor, inner, window, descend),
    "dot": partial(omega, mlp, taylor, squared, window, descend),
    "deep_transformer_pairs": deep_transformer_pairs,
    "swdt_pairs": swdt_pairs,
    "dot_pairs": dot_pairs,
}
PAPERS: dict[str, Paper] = {name: partial(run, rule) for name, rule in RULES.items()}
