"""One letter per axis, one clear error."""

import pytest
import torch

from atlas_lm.ops.checks import check_shapes


def test_letters_are_bound_and_returned():
    q, v = torch.zeros(2, 7, 3, 5), torch.zeros(2, 7, 3, 4)
    sizes = check_shapes({"q": (q, "B T H K"), "v": (v, "B T H V")}, H=3)
    assert sizes == dict(B=2, T=7, H=3, K=5, V=4)


def test_wrong_rank_names_tensor_shape_and_axes():
    with pytest.raises(ValueError, match=r"q has shape \[2, 3\], wanted 4 axes \[B, T, H, K\]"):
        check_shapes({"q": (torch.zeros(2, 3), "B T H K")})


def test_two_tensors_that_disagree_name_the_axis_and_both_sizes():
    q, k = torch.zeros(2, 7, 3, 5), torch.zeros(2, 8, 3, 5)
    with pytest.raises(ValueError, match=r"k has shape .*axis T is 8 here and 7 elsewhere; pass"):
        check_shapes({"q": (q, "B T H K"), "k": (k, "B T H K")})


def test_a_size_known_beforehand_is_kept():
    q = torch.zeros(2, 7, 3, 5)
    with pytest.raises(ValueError, match=r"wanted \[2, 7, 4, 'K'\].*axis H is 3 here and 4"):
        check_shapes({"q": (q, "B T H K")}, H=4)


def test_a_letter_twice_in_one_pattern_means_a_square():
    assert check_shapes({"m": (torch.zeros(3, 3), "N N")}) == dict(N=3)
    with pytest.raises(ValueError, match="axis N is 4 here and 3"):
        check_shapes({"m": (torch.zeros(3, 4), "N N")})
