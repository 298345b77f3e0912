"""The optimizers with CowClip: one for each base optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from stampede.optim.clip import CowClip
from stampede.optim.cowclip_optimizer import CowClipOptimizer
from stampede.optim.rules import SGD, Adagrad, Adam, EpsPlacement, RowWiseAdagrad, RowWiseAdam
from stampede.optim.settings import OnNonfinite, Rows

_Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class CowClipAdam(CowClipOptimizer):
    """Adam with CowClip for embedding tables; see `CowClipOptimizer` for where it can be used.

    Args:
        params: tables, `[rows, dim]`.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: Adam's epsilon.
        l2: coefficient of `||w||^2` in the loss: adds `2*l2*w` to the gradient, inside the clip.
        clip: the clipping rule; `None` for plain Adam.
        rows: `all`, every row takes a step each time (the authors' code), or `touched`, only the
            rows of the batch (TorchRec's and SparseAdam's convention).
        eps_placement: `keras` adds eps to `sqrt(v)` before the bias correction (the authors'
            code), `torch` after it.
        weight_decay: decoupled decay, `w = w * (1 - lr*weight_decay)`, outside the clip (AdamW).
        on_nonfinite: what a NaN or an infinity in a row's gradient does: `error` refuses the
            step, `skip_row` leaves the row out of the batch.
        padding_idx: plain PyTorch: a row that is never changed; found by itself where the table
            belongs to an `nn.Embedding` or `nn.EmbeddingBag`.
        seed: of the stochastic rounding of fp16 and bf16 tables.

    Raises:
        ValueError: a setting is out of range.

    Example::

        table = torch.nn.Embedding(1000, 16, sparse=True)
        optimizer = CowClipAdam(table.parameters(), lr=1e-4, l2=1e-5, clip=CowClip())
        table(ids).sum().backward()
        optimizer.step()
    """

    rule_type = Adam

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        l2: float = 0.0,
        clip: CowClip | None = CowClip(),
        rows: Rows = "all",
        eps_placement: EpsPlacement = "keras",
        *,
        weight_decay: float = 0.0,
        on_nonfinite: OnNonfinite = "error",
        padding_idx: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, _given(locals()))


class CowClipRowWiseAdam(CowClipAdam):
    """`CowClipAdam` with one second moment per row: a third of its memory is saved.

    The moment follows the mean of the squared gradient over the row (FBGEMM's
    PARTIAL_ROWWISE_ADAM).
    """

    rule_type = RowWiseAdam


class CowClipAdagrad(CowClipOptimizer):
    """Adagrad with CowClip: `s = s + g*g; w = w - lr * g / (sqrt(s) + eps)`.

    Args:
        eps: added to the denominator.
        params, lr, l2, clip, rows, weight_decay, on_nonfinite, padding_idx, seed: see
            `CowClipAdam`.
    """

    rule_type = Adagrad

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-2,
        eps: float = 1e-8,
        l2: float = 0.0,
        clip: CowClip | None = CowClip(),
        rows: Rows = "all",
        *,
        weight_decay: float = 0.0,
        on_nonfinite: OnNonfinite = "error",
        padding_idx: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, _given(locals()))


class CowClipRowWiseAdagrad(CowClipAdagrad):
    """`CowClipAdagrad` with one sum per row, of the mean of its squared gradient.

    The state is one number per row (FBGEMM's EXACT_ROWWISE_ADAGRAD).
    """

    rule_type = RowWiseAdagrad


class CowClipSGD(CowClipOptimizer):
    """SGD with CowClip: `b = momentum*b + g; w = w - lr*b`; no state without momentum.

    Args:
        momentum: from 0 up to below 1.
        params, lr, l2, clip, rows, weight_decay, on_nonfinite, padding_idx, seed: see
            `CowClipAdam`.
    """

    rule_type = SGD

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-2,
        momentum: float = 0.0,
        l2: float = 0.0,
        clip: CowClip | None = CowClip(),
        rows: Rows = "all",
        *,
        weight_decay: float = 0.0,
        on_nonfinite: OnNonfinite = "error",
        padding_idx: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, _given(locals()))


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """A constructor's settings, without its machinery."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("self", "params", "lr", "__class__")
    }
