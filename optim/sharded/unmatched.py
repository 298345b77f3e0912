"""A sentence where TorchRec's own sharders meet an optimizer that only ours know."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torchrec.distributed import utils
from torchrec.distributed.embeddingbag import EmbeddingBagSharder

from stampede.optim.cowclip_optimizer import CowClipOptimizer
from stampede.optim.helen import Helen


class _KnownOptimizers(dict[type[torch.optim.Optimizer], Any]):
    """TorchRec's table of fused optimizers, which explains itself about ours."""

    def __contains__(self, optimizer: object) -> bool:
        _refuse(optimizer)
        return super().__contains__(optimizer)


def explain_unmatched_optimizers() -> None:
    """Replace TorchRec's "Cannot cast ..." for optimizers with CowClip; done once, at import.

    Its sharder of single `nn.EmbeddingBag`s would not even say that: it drops every optimizer
    without a word.
    """
    known = utils._OPTIMIZER_CLASS_TO_EMB_OPT_TYPE
    if not isinstance(known, _KnownOptimizers):
        utils._OPTIMIZER_CLASS_TO_EMB_OPT_TYPE = _KnownOptimizers(known)
        EmbeddingBagSharder.shard = _checked(EmbeddingBagSharder.shard)


def _checked(shard: Any) -> Any:
    @functools.wraps(shard)
    def checked(self: EmbeddingBagSharder, module: nn.Module, *rest: Any, **named: Any) -> Any:
        for parameter in module.parameters():
            for optimizer in getattr(parameter, "_optimizer_classes", []):
                _refuse(optimizer)
        return shard(self, module, *rest, **named)

    return checked


def _refuse(optimizer: object) -> None:
    if isinstance(optimizer, type) and issubclass(optimizer, CowClipOptimizer | Helen):
        raise ValueError(
            f"tables with {optimizer.__name__} met one of TorchRec's own sharders, which does "
            "not know it; pass sharders=cowclip_sharders() (from stampede.optim) to "
            "DistributedModelParallel: it has all of TorchRec's default sharders, those of managed "
            "collision and feature processors included. Another sharder that takes one for the "
            "tables inside is given ours (ebc_sharder=cowclip_sharders()[0]); a single "
            "nn.EmbeddingBag must become an EmbeddingBagCollection"
        )
