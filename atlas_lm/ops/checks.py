"""Shape checks for public doors: one letter per axis, one clear error."""

from collections.abc import Mapping

from torch import Tensor


def check_shapes(tensors: Mapping[str, tuple[Tensor, str]], **sizes: int) -> dict[str, int]:
    """Bind the letters of each pattern to sizes and refuse the first axis that disagrees.

    tensors: name -> (tensor, pattern), e.g. {"q": (q, "B T H K")}; sizes: letters known beforehand.
    Returns the sizes of all letters. Raises ValueError naming tensor, axis, got and wanted.
    """
    known = dict(sizes)
    for name, (tensor, pattern) in tensors.items():
        letters = pattern.split()
        shape = list(tensor.shape)
        if len(shape) != len(letters):
            raise ValueError(
                f"{name} has shape {shape}, wanted {len(letters)} axes [{', '.join(letters)}]; "
                "public tensors are laid out batch, tokens, heads, features"
            )
        for letter, size in zip(letters, shape, strict=True):
            if known.setdefault(letter, size) != size:
                wanted = [known.get(item, item) for item in letters]
                raise ValueError(
                    f"{name} has shape {shape}, wanted {wanted} for [{', '.join(letters)}]: "
                    f"axis {letter} is {size} here and {known[letter]} elsewhere; "
                    "pass tensors, weights and state that were made for the same spec"
                )
    return known


def check_words(
    sizes: dict[str, int],
    inputs: tuple[Tensor, ...],
    theta: Tensor | None,
    momentum: object | None,
) -> None:
    """Refuse what would otherwise be passed over in silence."""
    if sizes["B"] == 0 or sizes["T"] == 0:
        raise ValueError(f"q has {sizes['B']} rows of {sizes['T']} tokens; pass at least one token")
    if len({x.dtype for x in inputs}) > 1:
        got = ", ".join(str(x.dtype) for x in inputs)
        raise ValueError(f"q, k, v are {got}, wanted one dtype; cast them first")
    if momentum is not None and theta is None:
        raise ValueError("momentum came without theta; pass both, or neither for descent")
