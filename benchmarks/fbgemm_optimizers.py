"""FBGEMM's own fused optimizers for TorchRec tables, as baselines to compare with.

All update only the rows of the batch. `grad` is the gradient of a row, summed over its occurrences.
`D`, `||w||` and `||g||` are of the stored row, padding included.

`fbgemm_rowwise_adagrad`, one accumulator `a` a row (`rowwise_adagrad` in FBGEMM's
`codegen/genscript/optimizers.py`)::

    g = grad + 2*l2*w
    a = a + ||g||^2 / D
    w = (1 - lr*weight_decay) * w - lr / (sqrt(a) + eps) * g

`fbgemm_adam`, two moments a weight (`adam`, same file; CUDA only)::

    m = b1*m + (1-b1)*grad ;  v = b2*v + (1-b2)*grad*grad
    w = w - lr * (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + weight_decay * w)

where `t` counts lookups of the table, evaluation included. TorchRec's checkpoints lose it:
after loading one, call `fused_optimizer.set_optimizer_step(steps)` before the first lookup.

`fbgemm_cowclip`, FBGEMM's `WeightDecayMode.COWCLIP` (`rowwise_adagrad_with_counter`, same
file)::

    n = n + 1                                 # with counter_halflife=0: n = 1
    g = grad + 2*l2*w
    a = a + ||g||^2 / D
    t = n * max(ratio * ||w||, bound)
    w = (1 - lr*weight_decay) * w - lr / (sqrt(a) + eps) * min(1, t / ||g||) * g

It is not the CowClip of the paper: `n` is the number of steps in which the row was seen, not the
occurrences of the id in the batch, so its clip fades during training; and only the step is clipped,
the accumulator takes the whole gradient.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterWeightDecayMode,
    CowClipDefinition,
    WeightDecayMode,
)
from torchrec.optim.optimizers import Adam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

Baseline = Literal["fbgemm_rowwise_adagrad", "fbgemm_adam", "fbgemm_cowclip"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


def baseline_optimizer(
    name: Baseline,
    *,
    device_type: str,
    lr: float,
    l2: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    ratio: float = 1.0,
    bound: float = 1e-5,
    counter_halflife: Literal[-1, 0] = -1,
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and keyword arguments of a baseline, for `apply_optimizer_in_backward`.

    What each computes is at the top of this file. Keep first-order weights out of a table whose
    rule has one accumulator a row: they would be part of `||w||` and `||g||`. Plan the tables as
    `table_wise`, `row_wise` or `table_row_wise`. If columns were split, each part of a row would
    have its own norm and accumulator; TorchRec silently drops the optimizer of data-parallel
    tables.

    Args:
        device_type: `cpu` or `cuda`, where the tables are.
        l2: coefficient of `||w||^2` in the loss, as in CowClipAdam; not for `fbgemm_adam`.
        weight_decay: decoupled decay. Not together with `l2`.
        eps: added to the denominator, above 0.
        betas: decay rates of the moments; read by `fbgemm_adam` only.
        ratio, bound: threshold of `fbgemm_cowclip`, read by it only. FBGEMM's own defaults, both
            0, freeze every weight; with `bound` 0 a zero row stays zero.
        counter_halflife: -1 counts every step in which a row was seen (FBGEMM's default), 0 only
            the current one; read by `fbgemm_cowclip` only. A half-life could not be continued from
            a checkpoint: FBGEMM counts evaluation as steps.

    Returns:
        The class, and a new dictionary (TorchRec changes it when it shards the tables).

    Raises:
        ValueError: FBGEMM has no such optimizer on this device, or cannot combine the settings.
    """
    if l2 and weight_decay:
        raise ValueError(
            f"{name}: l2 is {l2!r} and weight_decay {weight_decay!r}, but FBGEMM has one decay "
            "at a time; write 0 for one of them"
        )
    arguments: dict[str, Any] = {"lr": float(lr), "eps": float(eps)}
    if name == "fbgemm_adam":
        if device_type == "cpu":
            raise ValueError(
                "fbgemm_adam: FBGEMM has no Adam on CPU; choose CowClipAdam with clip=None and "
                "rows='touched', fbgemm_rowwise_adagrad or fbgemm_cowclip, or run on a GPU"
            )
        # TorchRec does not translate torch's `betas`.
        moments = {"beta1": float(betas[0]), "beta2": float(betas[1])}
        return Adam, {**arguments, **moments, "weight_decay": float(weight_decay)}
    arguments["weight_decay"] = 2.0 * l2 or weight_decay
    mode = "L2" if l2 else "DECOUPLE" if weight_decay else "NONE"
    if name == "fbgemm_rowwise_adagrad":
        # FBGEMM's CPU kernel always passes on weight_decay=0, except for tables shared by several
        # features (embedding_backward_split_cpu_template.cpp).
        if device_type == "cpu" and mode != "NONE":
            raise ValueError(
                f"fbgemm_rowwise_adagrad: l2 is {l2!r} and weight_decay {weight_decay!r}, but on "
                "CPU FBGEMM silently ignores both; write 0 for both, choose fbgemm_cowclip, or run "
                "on a GPU"
            )
        # Without a mode FBGEMM ignores the decay on a GPU too.
        return RowWiseAdagrad, {**arguments, "weight_decay_mode": WeightDecayMode[mode]}
    if ratio == 0 and bound == 0:
        raise ValueError(
            "fbgemm_cowclip: ratio and bound are both 0, which freezes every weight; "
            "write a number above 0 for one of them, such as ratio=1"
        )
    clip = CowClipDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode[mode],
        counter_halflife=counter_halflife,
        weight_norm_coefficient=float(ratio),
        lower_bound=float(bound),
    )
    cowclip = {"weight_decay_mode": WeightDecayMode.COWCLIP, "cowclip_regularization": clip}
    return RowWiseAdagrad, {**arguments, **cowclip}
