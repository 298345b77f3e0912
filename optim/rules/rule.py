"""What every base optimizer offers to the update of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass
class RowGradientSquares:
    """Squared gradient norms of rows, over all columns of the table, also those of other shards.

    A row has two parts: the clipped columns, which are the embedding, and the rest (see
    `CowClip.columns`). Row-wise optimizers keep one value per row and part.

    Attributes:
        embedding: `[n]` sum of squares over the clipped columns.
        rest: `[n]` sum of squares over the other columns.
        width: number of clipped columns of the whole table.
        local_width: how many of this shard's first columns are clipped ones.
    """

    embedding: Tensor
    rest: Tensor
    width: int
    local_width: int


@dataclass(frozen=True)
class Rule:
    """A base optimizer: its settings, the state it keeps and its step. Hashable.

    Class attributes:
        element_states: names of the states shaped like the weights, `[rows, dim]` float32.
        row_states: names of the states with one value a row, `[rows]` float32. Each has a twin
            `<name>_rest` for the columns that are not clipped, where there are such columns.
        moves_without_gradient: whether a row with a zero gradient moves (momentum).
    """

    element_states: ClassVar[tuple[str, ...]] = ()
    row_states: ClassVar[tuple[str, ...]] = ()
    moves_without_gradient: ClassVar[bool] = False

    def step_(
        self,
        weights: Tensor,
        grads: Tensor,
        states: dict[str, Tensor],
        squares: RowGradientSquares | None,
        *,
        lr: float,
        step: int,
    ) -> None:
        """Move rows, in place.

        Args:
            weights: `[n, dim]` float.
            grads: `[n, dim]` gradients after L2 and clip; may be overwritten.
            states: the rows' states by name, changed in place.
            squares: of `grads`; given if the rule has row states.
            lr: learning rate of this step.
            step: number of this step, counted from 1.
        """
        raise NotImplementedError

    def state_shapes(self, rows: int, dim: int, has_rest: bool) -> dict[str, tuple[int, ...]]:
        """Shape of every state of a table, by name.

        Args:
            has_rest: whether some columns are not clipped.
        """
        shapes: dict[str, tuple[int, ...]] = {name: (rows, dim) for name in self.element_states}
        for name in self.row_states:
            shapes[name] = (rows,)
            if has_rest:
                shapes[rest(name)] = (rows,)
        return shapes


def rest(row_state: str) -> str:
    """Name of a row state's twin for the columns that are not clipped."""
    return f"{row_state}_rest"


def spread(embedding: Tensor, rest_values: Tensor | None, local_width: int, dim: int) -> Tensor:
    """One value a row and part, as columns: broadcastable to `[n, dim]`.

    Args:
        embedding: `[n]` values of the clipped columns.
        rest_values: `[n]` values of the other columns, or None where there are none.
        local_width: how many of the `dim` columns are clipped ones.
    """
    if rest_values is None or local_width == dim:
        return embedding[:, None]
    if local_width == 0:
        return rest_values[:, None]
    return torch.cat(
        [
            embedding[:, None].expand(-1, local_width),
            rest_values[:, None].expand(-1, dim - local_width),
        ],
        dim=1,
    )
