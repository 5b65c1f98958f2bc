"""The loss of a head over the vocabulary at the places that have a label."""

import torch
from torch import Tensor

from atlas_lm.ops.linear_cross_entropy import linear_cross_entropy


def labelled_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The summed loss and the count of labels. hidden: [R, W], weight: [V, W], labels: [R]

    Rows without a label are left out first: one look at the labels, which on a GPU waits for what is
    queued. It comes before the largest products of a step, behind which the next launches hide.
    """
    if not torch.compiler.is_compiling():
        places = (labels != ignore_index).nonzero()[:, 0]
        if len(places) < len(labels):
            hidden, labels = hidden.index_select(0, places), labels.index_select(0, places)
    return linear_cross_entropy(hidden, weight, labels, ignore_index=ignore_index)
