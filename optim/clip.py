# pyright: basic
"""The clipping rules: the largest gradient norm of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    # A configuration checks these settings without importing torch.
    from torch import Tensor

Variant = Literal["reference", "paper"]
Granularity = Literal["none", "row", "cowclip"]


@dataclass(frozen=True)
class Clip:
    """How the gradient of each row, L2 term included, is scaled down. Hashable.

    Settings are the fields of a frozen dataclass, see `Rule`.

    Args:
        columns: only the first `columns` columns of a row are clipped and give its norms; the
            others take the plain update. `None`: all columns.
    """

    columns: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.columns is not None and self.columns < 1:
            name = type(self).__name__
            raise ValueError(f"{name}: columns is {self.columns!r}; write at least 1, or None")

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__

    @property
    def clips(self) -> bool:
        """Whether there is a threshold, for which the counts of ids are needed."""
        return True

    def largest_norm(self, weight_norm: Tensor, counts: Tensor, width: int) -> Tensor:
        """The largest gradient norm of each row: `[n]`.

        Args:
            weight_norm: `[n]` L2 norms of the clipped columns of the weights.
            counts: `[n]` occurrences of each id in the global batch; 1 for rows outside of it.
            width: number of clipped columns of the whole table, never a padded one.
        """
        raise NotImplementedError

    def factor(
        self, grad_squares: Tensor, weight_squares: Tensor, counts: Tensor, width: int
    ) -> Tensor:
        """The factor of each row's gradient: `[n]`, at most 1.

        Args:
            grad_squares, weight_squares: `[n]` sums of squares over the clipped columns.
            counts, width: see `largest_norm`.
        """
        norm = grad_squares.sqrt()
        threshold = self.largest_norm(weight_squares.sqrt(), counts, width)
        if getattr(threshold, "shape", norm.shape) != norm.shape:
            raise ValueError(
                f"{type(self).__name__}.largest_norm returned the shape {tuple(threshold.shape)}; "
                f"return one value for each row, {tuple(norm.shape)}"
            )
        # A zero norm with a zero threshold would divide 0 by 0; that gradient stays zero.
        return (threshold / norm).where(norm > threshold, 1.0)

    def may_clip_decay(self, l2: float) -> bool:
        """Whether the L2 term of a row without other gradient, `2*l2*w`, can be clipped.

        Where it can, a step with `rows="all"` needs the norms of all rows.
        """
        return self.clips and l2 > 0


@dataclass(frozen=True)
class CowClip(Clip):
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
        granularity: how the gradient of each row is clipped. none: not at all; row: with a
            constant threshold; cowclip: with a threshold from the weights of the row.
        ratio: cowclip: gradient norm allowed per weight norm (the paper's r), above 0.
        bound: cowclip: lower bound of the weight norm (the paper's zeta), so that small rows can
            still grow; at least 0. 1e-5 on Criteo.
        threshold: row: gradient norm allowed, above 0; required by this clip.
        variant: form of the lower bound: as in the authors' code, where it is scaled by
            `ratio * sqrt(columns)` (reference), or bare, as in the paper.
        columns: see `Clip`.

    Raises:
        ValueError: a value is out of range, or a threshold is missing or has no meaning.
    """

    granularity: Granularity = "cowclip"
    ratio: float = 1.0
    bound: float = 1e-5
    threshold: float | None = None
    variant: Variant = "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @property
    def name(self) -> str:
        """See `Clip.name`."""
        return self.granularity

    @property
    def clips(self) -> bool:
        """See `Clip.clips`."""
        return self.granularity != "none"

    def row_bounds(self, width: int) -> tuple[float, float]:
        """`relative` and `least` of the threshold `max(relative * ||w||, least) * max(count, 1)`.

        Only for `row` and `cowclip`; `width` is the number of clipped columns of the whole table.
        """
        if self.threshold is not None:
            return 0.0, self.threshold
        if self.variant == "reference":
            return self.ratio, self.ratio * (self.ratio * math.sqrt(width) * self.bound)
        return self.ratio, self.bound

    def largest_norm(self, weight_norm: Tensor, counts: Tensor, width: int) -> Tensor:
        """See `Clip.largest_norm`; only for `row` and `cowclip`."""
        relative, least = self.row_bounds(width)
        # An infinite norm times 0 would be NaN.
        of_weights = relative * weight_norm if relative else weight_norm.new_zeros(len(weight_norm))
        threshold = of_weights.clamp_min(least)
        return threshold * counts.clamp_min(1).to(threshold.dtype)

    def may_clip_decay(self, l2: float) -> bool:
        """See `Clip.may_clip_decay`."""
        # ||2*l2*w|| <= ratio * ||w||.
        is_within = self.granularity == "cowclip" and 2.0 * l2 <= self.ratio
        return super().may_clip_decay(l2) and not is_within
