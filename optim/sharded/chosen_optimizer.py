"""The optimizer of ours that a user gave a table, and what TorchRec is shown in its place.

TorchRec and its planner know a closed list of optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torchrec import optim as torchrec_optim

from stampede.optim.cowclip_optimizer import CowClipOptimizer
from stampede.optim.helen import Helen, HelenSettings
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam, Rule
from stampede.optim.settings import UpdateSettings
from stampede.optim.sharded.collections import GROUP_KEY


class ChosenOptimizer(NamedTuple):
    """The optimizer that a user named for a table."""

    settings: UpdateSettings
    lr: float
    helen: HelenSettings | None = None


def optimizer_of(parameter: nn.Parameter) -> ChosenOptimizer | None:
    """The optimizer of ours that `apply_optimizer_in_backward` gave a table, if it did.

    Raises:
        ValueError, TypeError: one of its settings is wrong.
    """
    classes = getattr(parameter, "_optimizer_classes", [])
    if not any(issubclass(kind, CowClipOptimizer | Helen) for kind in classes):
        return None
    if len(classes) > 1:
        names = ", ".join(kind.__name__ for kind in classes)
        raise ValueError(
            f"a table was given several optimizers ({names}); call apply_optimizer_in_backward "
            "once for each table"
        )
    (kind,), (arguments,) = classes, parameter._optimizer_kwargs
    if issubclass(kind, Helen):
        settings, lr = kind.table_settings(arguments)
        return ChosenOptimizer(settings.second_pass(), lr, settings)
    group = kind.defaults_with(arguments)
    if group["padding_idx"] is not None:
        raise ValueError(
            f"{kind.__name__}: padding_idx is {group['padding_idx']!r}, but TorchRec's tables have "
            "no padding row; leave padding_idx out, and leave padding ids out of the bags"
        )
    return ChosenOptimizer(kind.update_settings(group), float(group["lr"]))


def with_equal_state(rule: Rule) -> type[torch.optim.Optimizer]:
    """An optimizer of the planner's list that keeps as much state as a rule."""
    if isinstance(rule, RowWiseAdagrad):
        return torchrec_optim.RowWiseAdagrad
    if isinstance(rule, RowWiseAdam):
        return torchrec_optim.PartialRowWiseAdam
    if isinstance(rule, Adam):
        return torch.optim.Adam
    if isinstance(rule, Adagrad) or (isinstance(rule, SGD) and rule.momentum):
        return torch.optim.Adagrad
    return torch.optim.SGD


@contextmanager
def as_fbgemm_sgd(
    parameters: dict[str, nn.Parameter], chosen: dict[str, ChosenOptimizer]
) -> Iterator[None]:
    """Show TorchRec plain SGD, the fused optimizer without state, for tables with CowClip.

    TorchRec groups tables by what they are given, so the settings and the width go along and every
    TBE ends up with one of each.
    """
    saved = {
        name: (parameters[name]._optimizer_classes, parameters[name]._optimizer_kwargs)
        for name in chosen
    }
    try:
        for name, choice in chosen.items():
            parameter = parameters[name]
            parameter._optimizer_classes = [torch.optim.SGD]
            group = (choice.settings, parameter.shape[1], choice.helen)
            parameter._optimizer_kwargs = [{"lr": choice.lr, GROUP_KEY: group}]
        yield
    finally:
        for name, (classes, arguments) in saved.items():
            parameters[name]._optimizer_classes = classes
            parameters[name]._optimizer_kwargs = arguments
