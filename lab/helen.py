"""Helen: sharpness-aware training of CTR models, each id perturbed by how frequent it is.

Source: "Helen: Optimizing CTR Prediction Models with Frequency-wise Hessian Eigenvalue
Regularization" (arXiv 2403.00798) and the authors' code, NUS-HPC-AI-Lab/Helen, called the
repository. Every step takes two gradients of one batch: the first moves the tables towards a higher
loss; the second, taken there, updates the original weights. Plain PyTorch on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

# Avoids 0/0 for a table without gradient; the constant of the repository.
_NORM_FLOOR = 1e-12


class Helen(torch.optim.Optimizer):
    """Adam with Helen's perturbation; all rows take a step in each batch.

    Every param group has a `kind`:

    - `embedding`: tables of `nn.Embedding(sparse=True)` or `nn.EmbeddingBag(sparse=True)`, looked
      up once a batch, whose uncoalesced gradient has one entry per occurrence of an id and so
      carries the counts `c`. Row `i` moves by `rho * g_i / ||g|| * max(c_i / max c, bound)` and
      takes the second gradient.
    - `dense`: everything else, with the first-order (dim 1) tables, which the repository treats
      so; these may be sparse. With `net_pert=False` they stay in place and are updated with the
      *first* gradient; with True they move by `rho * g / norm` and take the second.

    Args:
        params: groups, each with `params` and `kind`; any setting below may be given per group.
        lr: learning rate.
        rho: length of the perturbation of a table whose rows all get the full factor.
        bound: smallest factor of a row, whatever its count; 1 perturbs all rows alike.
        betas, eps: of Adam; the epsilon is added after the bias correction.
        weight_decay: adds `weight_decay * w` to the gradient of the update only, with `w` before
            the perturbation.
        l2: coefficient of `||w||^2` in the loss, so that both gradients, the norm and the
            perturbation contain `2*l2*w`. Half of the repository's `embedding_regularizer`.
        net_pert: whether dense parameters are perturbed. The repository's configuration says
            False, its README and the default of its class True.
        dense_norm: the norm that `net_pert` divides by. `all`: of all gradients together, tables
            included. `last_table`: of the last table's gradient, which is what the repository
            does, because its loop over the tables reuses the variable.

    Example::

        optimizer = Helen([
            {"params": table.parameters(), "kind": "embedding"},
            {"params": top.parameters(), "kind": "dense"},
        ])
        optimizer.step(closure)  # of the loss, with its backward
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        rho: float = 0.05,
        bound: float = 0.3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        l2: float = 0.0,
        net_pert: bool = False,
        dense_norm: Literal["all", "last_table"] = "all",
    ) -> None:
        defaults = {
            **{"lr": lr, "rho": rho, "bound": bound, "betas": betas, "eps": eps, "l2": l2},
            **{"weight_decay": weight_decay, "net_pert": net_pert, "dense_norm": dense_norm},
        }
        super().__init__(params, {**defaults, "kind": "embedding"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """One step; unlike the repository's, it computes both gradients.

        Args:
            closure: computes the loss of the batch and its gradients; called twice. Gradients are
                cleared before each call.

        Returns:
            The loss of the first call: of the weights before this step.

        Raises:
            ValueError: a table's gradient does not tell how often each id occurred.
        """
        loss, first, counts = self._gradients(closure)
        before = {param: param.clone() for param in first}
        norms = {param: torch.linalg.vector_norm(grad) for param, grad in first.items()}
        together = self._dense_norms(norms)
        try:
            for param, group in self._groups().items():
                if param not in first or not (group["kind"] == "embedding" or group["net_pert"]):
                    continue
                if group["kind"] == "embedding":
                    times = counts[param].to(param.dtype)
                    factor = (times / times.max().clamp_min(1)).clamp_min(group["bound"])[:, None]
                    scale = group["rho"] / (norms[param] + _NORM_FLOOR) * factor
                else:
                    scale = group["rho"] / (together[group["dense_norm"]] + _NORM_FLOOR)
                param.add_(first[param] * scale)
            _, second, _ = self._gradients(closure)
        finally:
            for param, weights in before.items():
                param.copy_(weights)
        for param, group in self._groups().items():
            if param in first:
                takes_second = group["kind"] == "embedding" or group["net_pert"]
                self._adam(param, second[param] if takes_second else first[param], group)
        return loss

    def _groups(self) -> dict[Tensor, dict[str, Any]]:
        return {param: group for group in self.param_groups for param in group["params"]}

    def _gradients(
        self, closure: Callable[[], Tensor]
    ) -> tuple[Tensor, dict[Tensor, Tensor], dict[Tensor, Tensor]]:
        """The loss; dense gradients with the L2 term; `[rows]` counts of tables."""
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        grads, counts = {}, {}
        for param, group in self._groups().items():
            grad = param.grad
            if grad is None:
                continue
            if group["kind"] == "embedding":
                # torch flags a single entry as coalesced in any case.
                if not grad.is_sparse or (grad.is_coalesced() and grad._nnz() > 1):
                    raise ValueError(
                        f"Helen: the gradient of a table of shape {tuple(param.shape)} is dense or "
                        "coalesced and does not tell how often each id occurred; build the table "
                        "with sparse=True, or put it into a group of kind 'dense'"
                    )
                counts[param] = torch.bincount(grad._indices()[0], minlength=len(param))
            grad = grad.to_dense() if grad.is_sparse else grad.clone()
            grads[param] = grad.add(param, alpha=2.0 * group["l2"])
        return loss, grads, counts

    def _dense_norms(self, norms: dict[Tensor, Tensor]) -> dict[str, Tensor]:
        """The norms that a dense parameter's perturbation may be divided by."""
        total = torch.linalg.vector_norm(torch.stack([*norms.values()]))
        groups = self._groups()
        tables = [norms[param] for param in norms if groups[param]["kind"] == "embedding"]
        return {"all": total, "last_table": tables[-1] if tables else total}

    def _adam(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] += 1
        grad = grad.add(param, alpha=group["weight_decay"])
        mean = state["exp_avg"].lerp_(grad, 1.0 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        size = (square / (1.0 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        param.addcdiv_(mean, size, value=-group["lr"] / (1.0 - beta1 ** state["step"]))
