"""The optimizer of ours that a user gave a table, and what TorchRec is shown in its place.

TorchRec and its planner know a closed list of optimizers.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec import optim as torchrec_optim
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig

from stampede.optim.cowclip_optimizer import CowClipOptimizer
from stampede.optim.helen import Helen, HelenSettings
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam, Rule
from stampede.optim.settings import UpdateSettings
from stampede.optim.sharded.collections import GROUP_KEY

_LOG = logging.getLogger("stampede.optim")


class ChosenOptimizer(NamedTuple):
    """The optimizer that a user named for a table."""

    name: str
    settings: UpdateSettings
    lr: float
    helen: HelenSettings | None = None

    def __str__(self) -> str:
        settings = self.settings
        clip = f"clip {settings.clip.granularity}, " if self.helen is None else ""
        return f"{self.name} (lr {self.lr:g}, l2 {settings.l2:g}, {clip}rows {settings.rows})"


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
        return ChosenOptimizer(kind.__name__, settings.second_pass(), lr, settings)
    group = kind.defaults_with(arguments)
    if group["padding_idx"] is not None:
        raise ValueError(
            f"{kind.__name__}: padding_idx is {group['padding_idx']!r}, but TorchRec's tables have "
            "no padding row; leave padding_idx out, and leave padding ids out of the bags"
        )
    return ChosenOptimizer(kind.__name__, kind.update_settings(group), float(group["lr"]))


def say_optimizers(
    groups: Iterable[GroupedEmbeddingConfig],
    parameters: dict[str, nn.Parameter],
    chosen: dict[str, ChosenOptimizer],
    fused_params: dict[str, Any],
) -> None:
    """Log which optimizer each table of a collection has, and warn of what nobody chose.

    Args:
        groups: the tables as they were sharded, of all ranks.
        parameters: by table, before they were sharded.
        chosen: the optimizers of ours, by table.
        fused_params: of the sharder, which may name an optimizer for all other tables.
    """
    found: dict[tuple[int, str], set[str]] = defaultdict(set)
    for group in groups:
        for table in group.embedding_tables:
            name = table.name
            given = [kind.__name__ for kind in getattr(parameters[name], "_optimizer_classes", ())]
            if name in chosen:
                level, text = logging.INFO, f"are updated by {chosen[name]}"
            elif group.compute_kernel == EmbeddingComputeKernel.DENSE:
                text = "are left to the program's own optimizer, as TorchRec does for data_parallel"
                level = logging.WARNING if given else logging.INFO
                if given:
                    text += f"; the {given[0]} of apply_optimizer_in_backward does not update them"
            else:
                fused = group.fused_params or {}
                kind = getattr(fused.get("optimizer"), "name", _fbgemms_default("optimizer").name)
                lr = fused.get("learning_rate", _fbgemms_default("learning_rate"))
                text = f"are updated by TorchRec's {given[0] if given else kind} (lr {lr:g})"
                level = logging.INFO
                if not given and not {"optimizer", "learning_rate"} & set(fused_params):
                    level = logging.WARNING
                    text += ", a default: none was given; name one in apply_optimizer_in_backward"
            found[level, text].add(name)
    for (level, text), names in sorted(found.items()):
        _LOG.log(level, "tables %s %s", ", ".join(sorted(names)), text)


def _fbgemms_default(argument: str) -> Any:
    parameters = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    return parameters[argument].default


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
