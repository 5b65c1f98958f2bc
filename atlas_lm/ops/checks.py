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
