"""The look of pictures: lines that are told apart, axes without ornament."""

from matplotlib.axes import Axes

# Okabe and Ito: told apart by colour-blind readers too; markers differ as well
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":")  # where there are more lines than colours


def plain(axes: Axes) -> None:
    """Two sides of the frame and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
