"""Feature maps phi: what a key or a query looks like to the memory.

Every map takes x: [B, H, n, K] and the outer weights, and returns [B, H, n, F].
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from atlas_lm.memory.gates import Gate
from atlas_lm.ops.backend import say_once
from atlas_lm.ops.poly_features import poly_features, poly_width, why_not_fused

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """phi(x) = x."""

    kind: ClassVar[str] = "identity"

    def width(self, key_dim: int) -> int:
        return key_dim

    def init(self, heads: int, key_dim: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def frozen(self) -> tuple[str, ...]:
        """Names of outer weights that are random constants, saved but never trained."""
        return ()

    def gates(self) -> tuple[Gate, ...]:
        return ()

    def __call__(self, x: Tensor, weights: Weights) -> Tensor:
        return x

    def fused(self, x: Tensor, weights: Weights, width: int | None = None) -> Tensor:
        """What kernels of memories read: phi of x [B, H, n, K] in fp32, rounded to x's dtype, [B, n, H, F].

        width: zeros beyond the features up to so many, so that rows begin at even places; None: none
        """
        phi = self(x.float(), weights).to(x.dtype).transpose(1, 2)
        more = 0 if width is None else width - phi.shape[-1]
        if more < 0:
            raise ValueError(f"width is {width}, which does not hold the {phi.shape[-1]} features")
        return pad(phi, (0, more)) if more else phi


@dataclass(frozen=True, kw_only=True)
class Unit(Identity):
    """phi(x) = x / |x|."""

    kind: ClassVar[str] = "unit"

    def __call__(self, x: Tensor, weights: Weights) -> Tensor:
        return unit(x)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Identity):
    """All monomials of degree <= p of a unit key, so that phi(q).phi(k) = sum_i a_i (q.k)^i / sum_i a_i.

    a_i = c_i^2 >= 0 with learned amplitudes c_i, at first sqrt(1/i!). With `project` the key is first
    mapped to that many dimensions by a learned matrix per head, and brought back to unit length.
    """

    kind: ClassVar[str] = "polynomial"
    degree: int = 2
    project: int | None = None

    def __post_init__(self) -> None:
        _check_degree(self.degree, self.project)

    def width(self, key_dim: int) -> int:
        return poly_width(self.project or key_dim, self.degree)

    def init(self, heads: int, key_dim: int, generator: torch.Generator) -> dict[str, Tensor]:
        amplitudes = taylor_amplitudes(self.degree).float().expand(heads, -1).clone()
        return {"amplitudes": amplitudes} | _init_project(self.project, heads, key_dim, generator)

    def __call__(self, x: Tensor, weights: Weights) -> Tensor:
        x, amplitudes = _project(x, self.project, weights), _parts_of_one(weights).unsqueeze(1)
        return poly_features(x, amplitudes, self.degree, unit=True, form="parallel")

    def fused(self, x: Tensor, weights: Weights, width: int | None = None) -> Tensor:
        projected = _project(x, self.project, weights)
        return _monomials(projected, _parts_of_one(weights), self.degree, width, x.dtype)


@dataclass(frozen=True, kw_only=True)
class Taylor(Identity):
    """The exponential kernel cut at degree p: phi(q).phi(k) = sum_{i<=p} (q.k)^i / i!, unit keys."""

    kind: ClassVar[str] = "taylor"
    degree: int = 2
    project: int | None = None

    def __post_init__(self) -> None:
        _check_degree(self.degree, self.project)

    def width(self, key_dim: int) -> int:
        return poly_width(self.project or key_dim, self.degree)

    def init(self, heads: int, key_dim: int, generator: torch.Generator) -> dict[str, Tensor]:
        return _init_project(self.project, heads, key_dim, generator)

    def __call__(self, x: Tensor, weights: Weights) -> Tensor:
        x, amplitudes = _project(x, self.project, weights), taylor_amplitudes(self.degree).to(x)
        return poly_features(x, amplitudes, self.degree, unit=True, form="parallel")

    def fused(self, x: Tensor, weights: Weights, width: int | None = None) -> Tensor:
        projected = _project(x, self.project, weights)
        return _monomials(projected, _taylor_on(self.degree, x.device), self.degree, width, x.dtype)


@dataclass(frozen=True, kw_only=True)
class Elementwise(Identity):
    """phi(x) = sum_i c_i x^i, power by coordinate, c_i learned: for comparison, adds no capacity."""

    kind: ClassVar[str] = "elementwise"
    degree: int = 2

    def __post_init__(self) -> None:
        _check_degree(self.degree, None)

    def init(self, heads: int, key_dim: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"amplitudes": taylor_amplitudes(self.degree)[1:].float().expand(heads, -1).clone()}

    def __call__(self, x: Tensor, weights: Weights) -> Tensor:
        x = unit(x)
        amplitudes = weights["features.amplitudes"]  # [H, p]
        powers = torch.stack([x**i for i in range(1, self.degree + 1)], dim=-1)
        return (powers * amplitudes[:, None, None, :]).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Sketch(Identity):
    """Random tensor sketch: `sketch` numbers per degree >= 2, phi(q).phi(k) right on average.

    Degree i is the circular convolution of i independent count sketches (Pham & Pagh 2013). The random
    signs and places are outer weights like any other, so they are saved, and never trained.
    """

    kind: ClassVar[str] = "sketch"
    degree: int = 2
    sketch: int = 64

    def __post_init__(self) -> None:
        _check_degree(self.degree, None)
        if self.degree < 2 or self.sketch < 1:
            raise ValueError(
                f"sketch has degree {self.degree} and width {self.sketch}, wanted degree 2 or more and a "
                "positive width; use unit features for degree 1"
            )

    def width(self, key_dim: int) -> int:
        return 1 + key_dim + (self.degree - 1) * self.sketch

    def init(self, heads: int, key_dim: int, generator: torch.Generator) -> dict[str, Tensor]:
        count = self.degree * (self.degree + 1) // 2 - 1  # 2 + 3 + ... + degree sketches
        places = torch.randint(self.sketch, (heads, count, key_dim), generator=generator)
        signs = torch.randint(2, (heads, count, key_dim), generator=generator) * 2.0 - 1.0
        tables = torch.zeros(heads, count, self.sketch, key_dim)
        tables.scatter_(2, places.unsqueeze(2), signs.unsqueeze(2))
        return {
            "amplitudes": taylor_amplitudes(self.degree).float().expand(heads, -1).clone(),
            "tables": tables,
        }

    def frozen(self) -> tuple[str, ...]:
        return ("features.tables",)

    def __call__(self, x: Tensor, weights: Weights) -> Tensor:
        x = unit(x)
        counts = torch.einsum("bhnk,hcsk->bhcns", x, weights["features.tables"])
        spectra = torch.fft.rfft(counts, dim=-1)
        amplitudes = normalize(weights["features.amplitudes"], dim=-1)
        blocks, first = [torch.ones_like(x[..., :1]), x], 0
        for i in range(2, self.degree + 1):
            product = spectra[:, :, first : first + i].prod(dim=2)
            blocks.append(torch.fft.irfft(product, n=self.sketch, dim=-1))
            first += i
        return torch.cat(
            [block * amplitudes[:, i, None, None] for i, block in enumerate(blocks)], dim=-1
        )


@dataclass(frozen=True, kw_only=True)
class Exponential(Identity):
    """phi(q).phi(k) = exp(scale q.k). No finite image: it lives in a memory of kept pairs.

    `normalise` divides a read by the summed weights, which turns attention into softmax attention.
    """

    kind: ClassVar[str] = "exponential"
    scale: float | None = None  # None: 1/sqrt(key_dim)
    normalise: bool = False
    unit: bool = False  # bring q and k to unit length first

    def width(self, key_dim: int) -> int:
        return key_dim

    def logits(self, x: Tensor, keys: Tensor) -> Tensor:
        """scale x.k. x: [B, H, n, K]   keys: [B, H, m, K]   returns [B, H, n, m]"""
        scale = 1 / math.sqrt(x.shape[-1]) if self.scale is None else self.scale
        return scale * (x @ keys.mT)

    def __call__(self, x: Tensor, weights: Weights) -> Tensor:
        return unit(x) if self.unit else x


Features = Identity | Unit | Polynomial | Taylor | Elementwise | Sketch | Exponential


def unit(x: Tensor) -> Tensor:
    """x / |x|, zero (with finite gradients) where x is zero."""
    return normalize(x, dim=-1, eps=1e-6)


def taylor_amplitudes(degree: int) -> Tensor:
    """sqrt(1 / i!) for i = 0..degree, in fp64."""
    return torch.tensor([math.factorial(i) ** -0.5 for i in range(degree + 1)], dtype=torch.float64)


@functools.lru_cache(maxsize=64)
def _taylor_on(degree: int, device: torch.device) -> Tensor:
    """In fp32, copied to the device once: copies cannot be captured in a graph."""
    with torch.inference_mode(False):  # kept for later calls, which may want gradients
        return taylor_amplitudes(degree).to(device, torch.float32)


def _check_degree(degree: int, project: int | None) -> None:
    if degree < 1:
        raise ValueError(f"degree is {degree}, wanted 1 or more")
    if project is not None and project < 1:
        raise ValueError(f"project is {project}, wanted a number of dimensions or None")


def _init_project(
    project: int | None, heads: int, key_dim: int, generator: torch.Generator
) -> dict[str, Tensor]:
    if project is None:
        return {}
    gaussian = torch.randn(heads, key_dim, key_dim, generator=generator)
    return {"project": torch.linalg.qr(gaussian).Q[:, :project].contiguous()}


def _project(x: Tensor, project: int | None, weights: Weights) -> Tensor:
    """[B, H, n, K] -> [B, H, n, K'] in the wider dtype of x and the weights"""
    if project is None:
        return x
    matrix = weights["features.project"]
    return torch.einsum("bhnk,hpk->bhnp", x.to(torch.promote_types(x.dtype, matrix.dtype)), matrix)


def _parts_of_one(weights: Weights) -> Tensor:
    """Learned amplitudes whose squares sum to one, [H, p+1]"""
    return normalize(weights["features.amplitudes"], dim=-1)


def _monomials(
    x: Tensor, amplitudes: Tensor, degree: int, width: int | None, dtype: torch.dtype
) -> Tensor:
    """Monomials of x [B, H, n, K] at unit length, [B, n, H, F]; in plain PyTorch where kernels decline."""
    x = x.transpose(1, 2)
    reason = why_not_fused(x, amplitudes, degree)
    if reason is not None:
        say_once(f"poly_features runs its parallel form: {reason}")
        x = x.float()
    return poly_features(
        x, amplitudes, degree, unit=True, width=width, dtype=dtype,
        form="fused" if reason is None else "parallel",
    )  # fmt: skip
