"""The clipping rules: groups of gradients and their thresholds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    # A configuration checks these settings without importing torch.
    from torch import Tensor

Variant = Literal["reference", "paper"]
Granularity = Literal["none", "global", "field", "row", "field_adaptive", "cowclip"]

# Rules with a constant threshold, which the user gives.
_CONSTANT = ("global", "field", "row")


@dataclass(frozen=True)
class CowClip:
    """Settings of CowClip (adaptive column-wise clipping, arXiv 2204.06240) and of its ablation.

    The paper stores a table transposed: its *column* is a row, one id, of a TorchRec table. A
    field is a table.

    | granularity | what is scaled down together | largest norm |
    |---|---|---|
    | `none` | - | - |
    | `global` | the gradients of all tables with this granularity | threshold |
    | `field` | the gradient of a table | threshold |
    | `row` | the gradient of a row | threshold * max(count, 1) |
    | `field_adaptive` | the gradient of a table | ratio * norm of its weights |
    | `cowclip` | the gradient of a row | ratio * max(norm of its weights, bound) * max(count, 1) |

    Gradients include the L2 term. Norms run over the rows that take part in the step: all, or the
    batch's. The count is how often an id occurs in the global batch; a repeat within one bag
    counts, whatever the pooling and the weights of samples.

    Args:
        granularity: see the table.
        ratio: largest gradient norm relative to the norm of the weights (`r`).
        bound: lower bound of the weight norm in the threshold (`zeta`), so that small rows
            can still grow. 1e-5 on Criteo.
        threshold: the constant of `global`, `field` and `row`.
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
        if (value is None) == (self.granularity in _CONSTANT):
            has = "needs a threshold" if value is None else f"has no threshold, but it is {value!r}"
            raise ValueError(f"CowClip: granularity {self.granularity!r} {has}")
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"CowClip: threshold is {value!r}; write a number above 0")
        if self.variant not in get_args(Variant):
            raise ValueError(f"CowClip: variant is {self.variant!r}; write 'reference' or 'paper'")
        if self.columns is not None and self.columns < 1:
            raise ValueError(f"CowClip: columns is {self.columns!r}; write at least 1, or None")

    @property
    def by_row(self) -> bool:
        """Whether a row and its count alone give its threshold."""
        return self.granularity in ("row", "cowclip")

    @property
    def by_table(self) -> bool:
        """Whether all rows of a table are scaled alike."""
        return self.granularity in ("global", "field", "field_adaptive")

    @property
    def needs_counts(self) -> bool:
        """Whether a threshold depends on how often an id occurs."""
        return self.by_row

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


@dataclass
class TableSums:
    """Sums over a whole table, or over all tables; float64."""

    nonfinite: Tensor  # Above 0 where a non-finite gradient forbids the step.
    # By table, or None for all tables clipped together: `[2]`, squared norms of the gradient and of
    # the weights.
    parts: dict[str | None, Tensor] = field(default_factory=dict)


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
    return threshold_factor(
        grad_squares.sqrt(), row_threshold(weight_squares.sqrt(), counts, width, clip)
    )


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


def table_factor(grad_squares: Tensor, weight_squares: Tensor, clip: CowClip) -> Tensor:
    """The factor of a table's whole gradient under `global`, `field` and `field_adaptive`.

    Args:
        grad_squares, weight_squares: scalars or `[n]`, sums of squares of what is clipped together.
    """
    if clip.granularity == "field_adaptive":
        threshold = clip.ratio * weight_squares.sqrt()
    else:
        threshold = grad_squares.new_full(grad_squares.shape, clip.threshold)
    return threshold_factor(grad_squares.sqrt(), threshold)


def threshold_factor(norm: Tensor, threshold: Tensor) -> Tensor:
    """The factor that brings a norm down to a threshold, at most 1."""
    # A zero norm with a zero threshold would divide 0 by 0; that gradient stays zero.
    return (threshold / norm).where(norm > threshold, 1.0)
