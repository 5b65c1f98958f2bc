"""All monomials up to degree p, weighted so that their inner product is a polynomial of q.k."""

from atlas_lm.ops.poly_features.parallel import poly_features, poly_width
from atlas_lm.ops.poly_features.reference import poly_features_reference

__all__ = ["poly_features", "poly_features_reference", "poly_width"]
