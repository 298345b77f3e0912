"""FBGEMM's fused tables with CowClipAdam's update in their backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from stampede.optim.rows import sum_by_row
from stampede.optim.update import TableState, UpdateSettings, update_


class CowClipTables(SplitTableBatchedEmbeddingBagsCodegen):
    """A TBE (table-batched embedding) of tables of one width, updated by CowClipAdam.

    The lookup is FBGEMM's own; backward receives the pooled gradient of the global batch,
    `[batch, features * dim]`, already the mean over it, and updates the tables at once.

    Attributes:
        table: all tables of the TBE as one array, with moments.
        step_count: int64 scalar on the CPU, steps taken so far.
        clip_counts: int64 `[2]`, touched rows and clipped rows since the start of the run.
    """

    table: TableState
    settings: UpdateSettings
    step_count: Tensor
    clip_counts: Tensor

    @classmethod
    def adopt(
        cls, tbe: SplitTableBatchedEmbeddingBagsCodegen, settings: UpdateSettings
    ) -> CowClipTables:
        """Turn a freshly built TBE into this class, without a second copy of its weights."""
        tbe.__class__ = cls
        dims = {dim for _, dim, _, _ in tbe.embedding_specs}
        if len(dims) != 1:
            raise AssertionError(f"tables of one TBE have one width, found {sorted(dims)}")
        weights = tbe._weights().detach().view(-1, dims.pop())
        tbe.table = TableState(weights, torch.zeros_like(weights), torch.zeros_like(weights))
        tbe.settings = settings
        tbe.step_count = torch.zeros((), dtype=torch.int64)
        tbe.clip_counts = torch.zeros(2, dtype=torch.int64, device=weights.device)
        return tbe

    def _weights(self) -> Tensor:
        return self.weights_host if self.weights_host.numel() else self.weights_dev

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        **_: Any,
    ) -> Tensor:
        """Pooled embeddings `[batch, features * dim]`; see FBGEMM's class for the arguments."""
        if batch_size_per_feature_per_rank is not None:
            raise ValueError(
                "CowClipAdam: variable batch size per feature is not supported; "
                "give every feature the same batch size"
            )
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ValueError(
                "CowClipAdam: per-sample weights get no gradient; detach() them before the lookup"
            )
        return _Lookup.apply(self._weights(), self, indices, offsets, per_sample_weights)

    def lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """FBGEMM's own lookup, without its backward."""
        with torch.no_grad():
            return super().forward(indices, offsets, per_sample_weights)

    @torch.no_grad()
    def apply_gradient(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> None:
        """Update the tables from the gradient of one lookup's output.

        Args:
            grad: `[batch, features * dim]` gradient of the mean loss of the global batch.
            indices, offsets, per_sample_weights: the lookup's input.
        """
        features = len(self.feature_table_map)
        batch = grad.shape[0]
        lengths = offsets.diff()
        bags = torch.arange(features * batch, device=grad.device)
        bags = torch.repeat_interleave(bags, lengths, output_size=indices.numel())
        feature = bags // batch
        sample = bags - feature * batch
        coefficients = None if per_sample_weights is None else per_sample_weights.float()
        if self.pooling_mode == PoolingMode.MEAN:
            share = lengths.float().reciprocal()[bags]
            coefficients = share if coefficients is None else share * coefficients
        rows = sum_by_row(
            indices.to(torch.int64) + self.hash_size_cumsum[feature],
            grad.reshape(batch * features, -1),
            sample * features + feature,
            coefficients,
        )
        self.step_count += 1
        clipped = update_(
            self.table,
            rows,
            self.settings,
            lr=self.get_learning_rate(),
            step=int(self.step_count),
        )
        self.clip_counts[0] += rows.rows.numel()
        self.clip_counts[1] += clipped

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Both moments of each table, `[rows, dim]` views; the keys are FBGEMM Adam's."""
        rows = [rows for rows, _, _, _ in self.embedding_specs]
        return [
            {"momentum1": exp_avg, "exp_avg_sq": exp_avg_sq}
            for exp_avg, exp_avg_sq in zip(
                self.table.exp_avg.split(rows), self.table.exp_avg_sq.split(rows), strict=True
            )
        ]


class _Lookup(torch.autograd.Function):
    """The lookup, with the update of the tables as its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tbe: CowClipTables,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
    ) -> Tensor:
        # `anchor` requires a gradient, so that autograd calls backward; it is given none.
        ctx.tbe = tbe
        ctx.save_for_backward(indices, offsets, per_sample_weights)
        return tbe.lookup(indices, offsets, per_sample_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.tbe.apply_gradient(grad, *ctx.saved_tensors)
        return None, None, None, None, None


class CowClipFusedOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's view of the tables' optimizer: learning rate, sharded moments, step counter.

    The moments are sharded like their table. The step counter, `<table>.step`, is one number,
    the same for every shard, so that it survives another sharding plan.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tables: CowClipTables,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, tables, pg)
        for name, weight in self.params.items():
            self.state[weight][f"{name.removesuffix('.weight')}.step"] = tables.step_count
