# pyright: basic
"""The embedding front shared by all networks: one lookup for embeddings and first-order weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from stampede.models import cpu


@dataclass(frozen=True)
class StoredColumns:
    """The columns of a stored row: `dim` of the embedding, one first-order weight, padding.

    On a GPU the fast kernels need a width that is a multiple of 4. The padding is always zero.

    Attributes:
        dim: width of the embedding.
    """

    dim: int

    @property
    def stored(self) -> int:
        """Width of a stored row."""
        return -(-(self.dim + 1) // 4) * 4

    @property
    def names(self) -> dict[str, tuple[int, int]]:
        """First and one past the last column of each part."""
        return {
            "embedding": (0, self.dim),
            "first_order": (self.dim, self.dim + 1),
            "padding": (self.dim + 1, self.stored),
        }

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding `[..., dim]` and first-order weight `[..., 1]` of stored rows."""
        return _split(rows, self.dim)


class _Split(torch.autograd.Function):
    """Splits rows on a CPU; writes the gradient in one pass."""

    @staticmethod
    def forward(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return rows[..., :dim], rows[..., dim : dim + 1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.stored = inputs[0].shape[-1]

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, of_embedding: Tensor, of_first_order: Tensor) -> tuple[Tensor, None]:
        if of_embedding.stride(-1) != 1:
            of_embedding = of_embedding.contiguous()
        operator = torch.ops.stampede_dense.stored_backward
        return operator(of_embedding, of_first_order, ctx.stored), None


@torch.fx.wrap  # TorchRec's pipelines trace the model and must not see the branch.
def _split(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    is_plain = rows.dim() == 3 and rows.dtype == torch.float32
    if is_plain and rows.requires_grad and cpu.computing_dtype(rows) is not None:
        return _Split.apply(rows, dim)
    # Slices would have two gradients full of zeros, then added; a split has one concatenation.
    embedding, first_order, _ = rows.split([dim, 1, rows.shape[-1] - dim - 1], -1)
    return embedding, first_order


class SentIds(NamedTuple):
    """Ids of a batch on their way to the ranks that hold their rows, with TorchRec's `context`."""

    context: Any
    ids: Awaitable[Any]
    divisors: Tensor | None  # see `_divisors`


class EmbeddingFront(nn.Module):
    """Looks up every field once.

    The tables are built on the `meta` device; sharding allocates each rank's part.

    Attributes:
        fields: names of the id fields.
        tables: the fields that use each table, by the field whose own it is.

    Args:
        vocabulary_sizes: rows of each field's table, by field name.
        dim: width of the embeddings.
        shared: the field whose table a field uses, by field; others have tables of their own.
        mean: fields whose rows are averaged over the ids of a sample; those of others are summed.
    """

    def __init__(
        self,
        vocabulary_sizes: Mapping[str, int],
        dim: int,
        shared: Mapping[str, str] | None = None,
        mean: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.fields = list(vocabulary_sizes)
        self.tables = fields_of_tables(self.fields, shared or {})
        self.columns = StoredColumns(dim)
        # TorchRec sums, and the front divides: so one table may serve sums and means, on any plan.
        self.mean = list(mean)
        # Any: sharding replaces it.
        self.ebc: Any = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=table_name(table),
                    embedding_dim=self.columns.stored,
                    num_embeddings=vocabulary_sizes[table],
                    feature_names=fields,
                )
                for table, fields in self.tables.items()
            ],
            device=torch.device("meta"),
        )

    def lookup(self, sparse: KeyedJaggedTensor) -> Tensor:
        """Rows of a batch as they are stored, `[batch, fields * stored width]`, in field order.

        A sample with several ids of a field gets their sum or mean; without ids, zeros.
        """
        return _divided(_in_order(self.ebc(sparse), self.fields), _divisors(sparse, self.mean))

    def send(self, sparse: KeyedJaggedTensor) -> SentIds:
        """Start to send a batch's ids, once the front is sharded; see `lookup_sent`."""
        context = self.ebc.create_context()
        ids = self.ebc.input_dist(context, sparse).wait()
        return SentIds(context, ids, _divisors(sparse, self.mean))

    def lookup_sent(self, sent: SentIds) -> Tensor:
        """As `lookup`, of ids that were sent; they can be looked up once."""
        ids = sent.ids.wait()
        if any(part.values().is_cuda for part in ids):
            # They may have come on another stream.
            ids.record_stream(torch.cuda.current_stream())
            if sent.divisors is not None:
                sent.divisors.record_stream(torch.cuda.current_stream())
        pooled = self.ebc.compute_and_output_dist(sent.context, ids)
        return _divided(_in_order(pooled, self.fields), sent.divisors)

    def stored(self, rows: Tensor) -> Tensor:
        """Rows as `[batch, fields, stored width]`; see `lookup`."""
        return rows.view(-1, len(self.fields), self.columns.stored)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings `[batch, fields, dim]` and first-order weights `[batch, fields]` of rows."""
        embeddings, first_order = self.columns.split(self.stored(rows))
        return embeddings, first_order.squeeze(-1)


@torch.fx.wrap  # TorchRec's pipelines trace the model and must not see the branch.
def _in_order(pooled: KeyedTensor, fields: list[str]) -> Tensor:
    """`[batch, fields * width]` in the order of `fields`; a sharded collection has the plan's.

    KTRegroupAsDict would do the same, 60 times slower on CPU.
    """
    if pooled.keys() == fields:
        return pooled.values()
    return KeyedTensor.regroup([pooled], [fields])[0]


@torch.fx.wrap  # See `_in_order`.
def _divisors(sparse: KeyedJaggedTensor, mean: list[str]) -> Tensor | None:
    """What to divide the sums of rows by, `[batch, fields]` float32; None if nothing is averaged.

    The number of ids for fields in `mean`; 1 for other fields, and where there are no ids.
    """
    if not mean:
        return None
    lengths = sparse.lengths().view(len(sparse.keys()), -1)
    divisors = torch.ones(lengths.shape, device=lengths.device)
    for field in mean:
        place = sparse.keys().index(field)
        divisors[place] = lengths[place].clamp(min=1)
    return divisors.T


@torch.fx.wrap  # See `_in_order`.
def _divided(rows: Tensor, divisors: Tensor | None) -> Tensor:
    """Rows `[batch, fields * width]`, those of each field divided."""
    if divisors is None:
        return rows
    return (rows.view(*divisors.shape, -1) / divisors.unsqueeze(-1)).flatten(1)


def fields_of_tables(fields: Iterable[str], shared: Mapping[str, str]) -> dict[str, list[str]]:
    """The fields that use each table, by the field whose own it is; see `EmbeddingFront`."""
    tables = {field: [field] for field in fields if field not in shared}
    for field, table in shared.items():
        tables[table].append(field)
    return tables


def table_name(field: str) -> str:
    """Name of a field's table."""
    return f"t_{field}"
