"""Random numbers by name: the same name gives the same numbers on every machine and in every version."""

import hashlib

import numpy as np


def draw(*name: int | str) -> np.random.RandomState:
    """A source of random numbers of its own for each name, e.g. `draw(seed, "babilong", "qa1", index)`.

    Names are hashed, so neighbouring ones are independent, and a sample never depends on how many were drawn
    before it. Philox is a published algorithm, and how RandomState makes numbers of its bits is what NumPy
    has promised never to change.

    >>> int(draw(0, "needle", 3).randint(1000, dtype=np.int64))
    93
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in name)
    digest = hashlib.sha256(text.encode()).digest()
    bits = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
    return np.random.RandomState(bits)
