"""The clipping rules: the largest gradient norm of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    # A configuration checks these settings without importing torch.
    from torch import Tensor

Variant = Literal["reference", "paper"]
Granularity = Literal["none", "row", "cowclip"]


@dataclass(frozen=True)
class CowClip:
    """Settings of CowClip (adaptive column-wise clipping, arXiv 2204.06240).

    The paper stores a table transposed: its *column* is a row, one id, of a TorchRec table. The
    paper's other clips, of whole tables, are in `lab/ablation.py`.

    | granularity | largest norm of a row's gradient |
    |---|---|
    | `none` | - |
    | `row` | threshold * max(count, 1) |
    | `cowclip` | ratio * max(norm of its weights, bound) * max(count, 1) |

    Gradients include the L2 term. The count is how often an id occurs in the global batch; a repeat
    within one bag counts, whatever the pooling and the weights of samples.

    Args:
        granularity: see the table.
        ratio: largest gradient norm relative to the norm of the weights (`r`).
        bound: lower bound of the weight norm in the threshold (`zeta`), so that small rows
            can still grow. 1e-5 on Criteo.
        threshold: the constant of `row`.
        variant: `reference` is the authors' code, where the bound is scaled by
            `ratio * sqrt(columns)`; `paper` compares with the bare bound.
        columns: only the first `columns` columns of a row are clipped and give its norms; the
            others take the plain update. `None`: all columns.

    Raises:
        ValueError: a value is out of range, or a threshold is missing or has no meaning.
    """

    granularity: Granularity = "cowclip"
    ratio: float = 1.0
    bound: float = 1e-5
    threshold: float | None = None
    variant: Variant = "reference"
    columns: int | None = None

    def __post_init__(self) -> None:
        if self.granularity not in get_args(Granularity):
            raise ValueError(
                f"CowClip: granularity is {self.granularity!r}; write one of "
                f"{', '.join(get_args(Granularity))}"
            )
        for name in ("ratio", "bound", "threshold"):
            # YAML reads `1e-5`, which has no point, as text.
            if isinstance(value := getattr(self, name), str):
                raise ValueError(f"CowClip: {name} is {value!r}; write a number")
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise ValueError(f"CowClip: ratio is {self.ratio!r}; write a number above 0")
        if not (math.isfinite(self.bound) and self.bound >= 0):
            raise ValueError(f"CowClip: bound is {self.bound!r}; write a number of at least 0")
        value = self.threshold
        if (value is None) == (self.granularity == "row"):
            has = "needs a threshold" if value is None else f"has no threshold, but it is {value!r}"
            raise ValueError(f"CowClip: granularity {self.granularity!r} {has}")
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"CowClip: threshold is {value!r}; write a number above 0")
        if self.variant not in get_args(Variant):
            raise ValueError(f"CowClip: variant is {self.variant!r}; write 'reference' or 'paper'")
        if self.columns is not None and self.columns < 1:
            raise ValueError(f"CowClip: columns is {self.columns!r}; write at least 1, or None")

    @property
    def clips(self) -> bool:
        """Whether there is a threshold, for which the counts of ids are needed."""
        return self.granularity != "none"

    def row_bounds(self, width: int) -> tuple[float, float]:
        """`relative` and `least` of the threshold `max(relative * ||w||, least) * max(count, 1)`.

        Only for `row` and `cowclip`; `width` is the number of clipped columns of the whole table.
        """
        if self.granularity == "row":
            return 0.0, self.threshold
        if self.variant == "reference":
            return self.ratio, self.ratio * (self.ratio * math.sqrt(width) * self.bound)
        return self.ratio, self.bound

    def may_clip_decay(self, l2: float) -> bool:
        """Whether the L2 term of a row without other gradient, `2*l2*w`, can exceed a threshold."""
        if self.granularity == "none" or l2 == 0:
            return False
        if self.granularity == "cowclip":
            return 2.0 * l2 > self.ratio
        return True


def row_factor(
    grad_squares: Tensor, weight_squares: Tensor, counts: Tensor, width: int, clip: CowClip
) -> Tensor:
    """The factor of each row's gradient under `row` and `cowclip`: `[n]`, at most 1.

    Args:
        grad_squares, weight_squares: `[n]` sums of squares over the clipped columns; the gradient's
            with the L2 term.
        counts: `[n]` occurrences of each id in the global batch.
        width: number of clipped columns of the whole table, never a padded one.
    """
    norm = grad_squares.sqrt()
    threshold = row_threshold(weight_squares.sqrt(), counts, width, clip)
    # A zero norm with a zero threshold would divide 0 by 0; that gradient stays zero.
    return (threshold / norm).where(norm > threshold, 1.0)


def row_threshold(weight_norm: Tensor, counts: Tensor, width: int, clip: CowClip) -> Tensor:
    """The largest gradient norm of each row under `row` and `cowclip`: `[n]`.

    Args:
        weight_norm: `[n]` L2 norms of the clipped columns of the weights.
        counts, width: see `row_factor`.
    """
    relative, least = clip.row_bounds(width)
    # An infinite norm times 0 would be NaN.
    of_weights = relative * weight_norm if relative else weight_norm.new_zeros(weight_norm.shape)
    threshold = of_weights.clamp_min(least)
    return threshold * counts.clamp_min(1).to(threshold.dtype)
