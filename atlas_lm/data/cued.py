"""Context against token: which pair to keep is told after it, so writing token by token cannot do it.

The row. Keys 0 .. K - 1, values 0 .. V - 1; a pair (k, v) is one token. Each key has a block, in random
order: b pairs (k, v_1) ... (k, v_b) with the block's key and different values, then a cue token j, which
names the pair that stands j tokens before it, j = 1 .. b. After all blocks every key is asked once, in
random order, by a token of its own; the answer is the token of the pair that was named.

Window 1 cannot. Take a model of one memory block whose keys, values and gates are functions of the token
alone (a convolution of size 1, no positions), a matrix memory with the dot objective, nothing forgotten:
    M_t = M_{t-1} + eta_t v_t phi(k_t)^T,
for any weights, width, heads and features. At a query, M_t is the start plus one term for each token up to
there, and a term depends on its token alone. So M_t does not change when pairs of a block change places,
and neither do the logits, as all else in the model acts on one token at a time. But the named pair does
change. The values of a block are drawn in random order: given which they are and given the cues, each of
the b is the named one with probability 1/b. Whatever the model says at this query is the same for all
orders of the block, and right in 1/b of them at most. Hence, for any training at all,
    expected accuracy <= 1/b.

Window c = b + 1 can. Let a pair (k, v) have the key e_k, one of K orthonormal vectors, and a value u_kv of
its own, and let the query of k read with e_k. All steps are eta = 1. Only a cue opens a gate: token t that
says j sets gamma_{t,j} = 1, all other gamma are 0. The window still holds the whole block, so
    M = sum_k u_k,named e_k^T   and   M e_k = u_k,named, exactly, whatever K, V and b.
All of this is a function of the token at hand. (A layer's gates are sigmoids over c: they come as near to
this as one likes, up to a factor 1/c, which the norm of what is read takes out.) A window c <= b obeys the
cues j < c, (c - 1)/b of them.

What the proof leaves open is every other way for order to enter the memory or to reach the query:
- a convolution of size 2 or more: key, value and gates of a pair then see its neighbours; of size b + 1,
  the cue sees its whole block, and it is the convolution that holds the window;
- a second layer: what the first one reads at a pair depends on the pairs before it;
- positions, and attention that has them: they see places;
- an error-correcting rule: M k - v depends on what was written before (with steps of 1 the last pair of a
  block replaces the others: the cue 1). Where slopes are taken at an anchor, only pairs on both sides of a
  chunk's border are ordered by it: a block inside one chunk falls under the proof;
- a deep memory, whose gradient depends on the memory even under the dot objective;
- forgetting and momentum: a pair weighs by its age, so the order can be read off the sizes.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from atlas_lm.data.rows import NOTHING, Rows, Tokens, draw_rows


@dataclass(frozen=True, kw_only=True)
class Cued:
    """K blocks of b pairs and a cue, then K queries; see the head of this module for what it proves.

    Tokens: the pair (k, v) is k V + v, the cue j is K V + j - 1, the query of k is K V + b + k.

    >>> task = Cued(keys=2, values=4, block=3)  # pairs 0-7, cues 8-10, queries 11 and 12
    >>> row = task.rows("train", 0, 1)
    >>> print(np.concatenate([row.inputs, row.labels]))
    [[   2    0    1    8    7    6    4   10   12   11]
     [-100 -100 -100 -100 -100 -100 -100 -100    7    1]]
    """

    name: ClassVar[str] = "cued"
    keys: int = 8  # K, each with a block and a query
    values: int = 16  # V, for each key
    block: int = 4  # b, pairs before a cue; writing token by token is right in 1/b at most

    def __post_init__(self) -> None:
        if self.keys < 1:
            raise ValueError(f"keys is {self.keys}, wanted 1 or more")
        if self.block < 2:
            raise ValueError(
                f"block is {self.block}, wanted 2 pairs or more: a cue has to choose among them"
            )
        if self.values < self.block:
            raise ValueError(
                f"values is {self.values} for blocks of {self.block} different ones; "
                f"wanted {self.block} values or more, or shorter blocks"
            )

    @property
    def vocab_size(self) -> int:
        return self.keys * self.values + self.block + self.keys

    @property
    def length(self) -> int:
        """Tokens of a row: b + 1 in each block, and the queries."""
        return self.keys * (self.block + 2)

    def rows(self, split: str, first: int, count: int, seed: int = 0) -> Rows:
        """Rows number first .. first + count - 1 of "train" or "test"."""
        return draw_rows(self._row, self.name, split, first, count, seed)

    def _row(self, random: np.random.RandomState, training: bool) -> tuple[Tokens, Tokens]:
        key = random.permutation(self.keys)  # of each block
        lots = random.random_sample((self.keys, self.values))
        values = lots.argsort(axis=1)[:, : self.block]  # a random order of different ones
        cues = random.randint(1, self.block + 1, self.keys, dtype=np.int64)
        asked = random.permutation(self.keys)  # blocks, in the order of their queries
        pairs = key[:, None] * self.values + values
        named = pairs[np.arange(self.keys), self.block - cues]
        first_cue = self.keys * self.values
        blocks = np.column_stack([pairs, first_cue + cues - 1])
        queries = first_cue + self.block + key
        inputs = np.concatenate([blocks.ravel(), queries[asked]])
        labels = np.full_like(inputs, NOTHING)
        labels[-self.keys :] = named[asked]
        return inputs, labels
