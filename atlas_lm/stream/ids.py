"""Token ids as callers hand them over: lists, tensors, arrays, or many of them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Piece = Sequence[int] | Tensor | NDArray[Any]
Ids = Piece | Iterable[Piece]
BLOCK = 1 << 20  # ids looked at at once, so that checking a huge array needs little memory


def pieces(ids: Ids) -> Iterator[NDArray[Any]]:
    """Every piece as an array [n], not copied where it is an array already.

    A tensor, an array and a sequence of numbers are one piece; anything else is an iterable of pieces.
    """
    if _is_piece(ids):
        yield as_array(ids)  # type: ignore[arg-type]
    else:
        for piece in ids:
            yield as_array(piece)  # type: ignore[arg-type]


def as_array(piece: Piece) -> NDArray[Any]:
    """One piece as an array [n] of integers."""
    if isinstance(piece, Tensor):
        piece = piece.detach().cpu()
        array = piece.double().numpy() if piece.is_floating_point() else piece.numpy()
    else:
        array = np.asarray(piece)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"token ids are {getattr(piece, 'dtype', array.dtype)}, wanted integers")
    if array.ndim != 1:
        raise ValueError(
            f"ids have shape {list(array.shape)}, wanted one row [n]; each row is a stream of its own"
        )
    return array


def check_range(array: NDArray[Any], vocab_size: int, before: int) -> None:
    """Refuse ids that the model does not have, naming the first. before: tokens in the stream so far"""
    for start in range(0, len(array), BLOCK):
        block = array[start : start + BLOCK]
        bad = np.flatnonzero((block < 0) | (block >= vocab_size))
        if len(bad):
            place = start + int(bad[0])
            raise ValueError(
                f"token id {array[place]} at place {place} of this piece, {before + place} of the stream, is "
                f"out of range, wanted 0 to {vocab_size - 1}; is this the tokenizer of the model?"
            )


def as_ids(array: NDArray[Any]) -> Tensor:
    """A copy as the model wants it: int64 on the CPU."""
    return torch.from_numpy(array.astype(np.int64))


def _is_piece(ids: object) -> bool:
    if isinstance(ids, Tensor | np.ndarray):
        return True
    return isinstance(ids, Sequence) and (len(ids) == 0 or np.ndim(ids[0]) == 0)
