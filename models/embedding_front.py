# pyright: basic
"""The embedding front shared by all networks: one lookup for embeddings and first-order weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from stampede.models import cpu
from stampede.models.histories import Histories, Jagged


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
    """Ids of a batch on their way to the ranks that hold their rows.

    `parts` has TorchRec's context and ids of each collection.
    """

    parts: tuple[tuple[Any, Awaitable[Any]], ...]
    stay: KeyedJaggedTensor | None  # All ids, if they stay on this rank.
    divisors: Tensor | None  # see `_divisors`
    weights: dict[str, Tensor]  # see `_weights`

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the contexts."""
        for context, _ in self.parts:
            context.record_stream(stream)


class LookedUp(NamedTuple):
    """Rows of a batch.

    Attributes:
        rows: `[batch, sum of the stored widths of pooled fields]`, in the order of the fields;
            those of fields with attention are zeros.
        histories: a stored row for each id, by field with attention or without pooling.
    """

    rows: Tensor
    histories: Histories

    def tensors(self) -> list[Tensor]:
        """All rows, those of histories as `[ids, stored width]`."""
        return [self.rows, *(history.values for history in self.histories.values())]


class EmbeddingFront(nn.Module):
    """Looks up every field once.

    The tables are built on the `meta` device; sharding allocates each rank's part.

    TorchRec pools the rows of the fields in `ebc`. It has no table that an
    `EmbeddingBagCollection` and an `EmbeddingCollection` share, so a table with a field that needs
    a row for each id is in `ec` with all its fields, and the front sums those of pooled fields
    itself. A bag for each id of an `EmbeddingBagCollection` would need batch sizes by feature,
    which pad every other feature (`repeat_bags`), or a padded batch of the longest history.
    TorchRec's `EmbeddingCollection` has one width: `ec_of` has those of tables of other widths.

    Attributes:
        fields: names of the id fields.
        columns: of a stored row as the network sees it.
        pooled: those with one embedding for a sample, in the order of the embeddings.
        attention, sequences: the query of each field whose rows stay apart: the model attends to
            them, or the network takes them as they are.
        tables: the fields that use each table, by the field whose own it is.
        weighted: the fields whose ids have weights.
        local: looks up all pooled rows, if ids need not be sent to another rank, see
            `stampede.optim.local_lookup`; None leaves it to TorchRec.

    Args:
        vocabulary_sizes: rows of each field's table, by field name.
        dim: width of the embeddings.
        shared: the field whose table a field uses, by field; others have tables of their own.
        mean: fields whose rows are averaged over the ids of a sample; those of others are summed.
        attention, sequences: see above.
        weighted: pooled fields whose ids have weights, which their rows are multiplied by.
        dims: widths of tables that have another one than `dim`, by the field whose own they are.
    """

    def __init__(
        self,
        vocabulary_sizes: Mapping[str, int],
        dim: int,
        shared: Mapping[str, str] | None = None,
        mean: Sequence[str] = (),
        attention: Mapping[str, str] | None = None,
        sequences: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
        weighted: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.fields = list(vocabulary_sizes)
        self.attention, self.sequences = dict(attention or {}), dict(sequences or {})
        self.pooled = [field for field in self.fields if field not in self.sequences]
        self.tables = fields_of_tables(self.fields, shared or {})
        self.table_of = {field: t for t, fields in self.tables.items() for field in fields}
        self.columns = StoredColumns(dim)
        self.dims = {table: one for table, one in (dims or {}).items() if one != dim}
        self.widths = [self.columns_of(field).stored for field in self.pooled]
        # TorchRec sums, and the front divides: so one table may serve sums and means, on any plan.
        self.mean = list(mean)
        self.weighted = list(weighted)
        # Of these the front sums the rows itself.
        self._weighted = [f for f in weighted if self.has_rows_apart(self.table_of[f])]
        self.local: Callable[[KeyedJaggedTensor], Tensor] | None = None
        # Any: sharding replaces them.
        self.ebc: Any = None
        self.ec: Any = None
        self.ec_of = nn.ModuleDict()
        bags: list[EmbeddingBagConfig] = []
        sequences_of: dict[int, list[EmbeddingConfig]] = {}
        for table, fields in self.tables.items():
            about = {
                "name": table_name(table),
                "embedding_dim": self.columns_of(table).stored,
                "num_embeddings": vocabulary_sizes[table],
                "feature_names": fields,
            }
            if self.has_rows_apart(table):
                config = EmbeddingConfig(**about)
                sequences_of.setdefault(config.embedding_dim, []).append(config)
            else:
                bags.append(EmbeddingBagConfig(**about))
        if bags:
            # TorchRec has weights of all fields or of none; those of others are 1.
            is_weighted = bool(weighted)
            device = torch.device("meta")
            self.ebc = EmbeddingBagCollection(bags, is_weighted=is_weighted, device=device)
        for width, configs in sequences_of.items():
            collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
            if width == self.columns.stored:
                self.ec = collection
            else:
                self.ec_of[str(width)] = collection

    @property
    def histories(self) -> list[str]:
        """Fields whose rows stay apart, in the order of the fields."""
        return [f for f in self.fields if f in self.attention or f in self.sequences]

    def place(self, field: str) -> int:
        """Number of a pooled field, in the order of the embeddings."""
        return self.pooled.index(field)

    def has_rows_apart(self, table: str) -> bool:
        """Whether a table has a field whose rows are not pooled."""
        return not set(self.histories).isdisjoint(self.tables[table])

    def columns_of(self, field: str) -> StoredColumns:
        """The columns of a field's stored rows."""
        table = self.table_of[field]
        return StoredColumns(self.dims[table]) if table in self.dims else self.columns

    def weights(self) -> dict[str, nn.Parameter]:
        """The tables before they are sharded, by the field whose own they are."""
        of_names = {path.split(".")[-2]: weights for path, weights in self.named_parameters()}
        return {table: of_names[table_name(table)] for table in self.tables}

    def drop_tables(self) -> None:
        """Remove the tables: what is left describes rows."""
        self.ebc = self.ec = None
        self.ec_of = nn.ModuleDict()

    def lookup(self, sparse: KeyedJaggedTensor) -> LookedUp:
        """Rows of a batch as they are stored.

        A sample with several ids of a field gets their sum or mean; without ids, zeros.
        """
        if self.local is not None:
            return self.lookup_sent(self.send(sparse))
        divisors = _divisors(sparse, self.mean, self.pooled)
        weights = _weights(sparse, self._weighted)
        found = [collection(sparse) for collection in self._collections()]
        return self._looked_up(found, divisors, weights)

    def send(self, sparse: KeyedJaggedTensor) -> SentIds:
        """Start to send a batch's ids, once the front is sharded; see `lookup_sent`."""
        divisors = _divisors(sparse, self.mean, self.pooled)
        if self.local is not None:
            return SentIds((), sparse, divisors, {})
        parts = []
        for collection in self._collections():
            context = collection.create_context()
            parts.append((context, collection.input_dist(context, sparse).wait()))
        return SentIds(tuple(parts), None, divisors, _weights(sparse, self._weighted))

    def lookup_sent(self, sent: SentIds) -> LookedUp:
        """As `lookup`, of ids that were sent; they can be looked up once."""
        if self.local is not None and sent.stay is not None:
            return LookedUp(_divided(self.local(sent.stay), sent.divisors, self.widths), {})
        found = []
        for collection, (context, awaited) in zip(self._collections(), sent.parts, strict=True):
            ids = awaited.wait()
            if any(part.values().is_cuda for part in ids):
                # They may have come on another stream.
                here = torch.cuda.current_stream()
                ids.record_stream(here)
                for tensor in (sent.divisors, *sent.weights.values()):
                    if tensor is not None:
                        tensor.record_stream(here)
            found.append(collection.compute_and_output_dist(context, ids))
        return self._looked_up(found, sent.divisors, sent.weights)

    def _collections(self) -> list[Any]:
        return [one for one in (self.ebc, self.ec, *self.ec_of.values()) if one is not None]

    def _looked_up(
        self, found: list[Any], divisors: Tensor | None, weights: Mapping[str, Tensor]
    ) -> LookedUp:
        if self.ec is None and not len(self.ec_of):
            return LookedUp(_divided(_in_order(found[0], self.pooled), divisors, self.widths), {})
        of_ids = {
            name: Jagged(one.values(), one.lengths())
            for part in (found if self.ebc is None else found[1:])
            for name, one in cast(Mapping[str, JaggedTensor], part).items()
        }
        widths, rows = dict(zip(self.pooled, self.widths, strict=True)), {}
        if self.ebc is not None:
            names = [name for name in self.pooled if name not in of_ids]
            parts = _in_order(found[0], names).split([widths[name] for name in names], 1)
            rows = dict(zip(names, parts, strict=True))
        first = next(iter(of_ids.values()))
        for name, one in of_ids.items():
            if name in self.attention:
                rows[name] = first.values.new_zeros(len(first.lengths), widths[name])
            elif name in weights:
                rows[name] = one.sums(one.values * weights[name].unsqueeze(1))
            elif name not in self.sequences:
                rows[name] = one.sums(one.values)
        together = torch.cat([rows[name] for name in self.pooled], 1)
        histories = {name: of_ids[name] for name in self.histories}
        return LookedUp(_divided(together, divisors, self.widths), histories)

    def of_field(self, rows: Tensor, field: str) -> Tensor:
        """A pooled field's part of looked-up rows, `[batch, stored width of its table]`."""
        place = self.place(field)
        return rows.narrow(1, sum(self.widths[:place]), self.widths[place])

    def stored(self, rows: Tensor) -> Tensor:
        """Rows of one width as `[batch, fields, stored width]`."""
        return rows.view(-1, len(self.pooled), self.columns.stored)

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
def _divisors(sparse: KeyedJaggedTensor, mean: list[str], pooled: list[str]) -> Tensor | None:
    """What to divide the sums of rows by, `[batch, pooled]` float32; None if nothing is averaged.

    The number of ids for fields in `mean`; 1 for other fields, and where there are no ids.
    """
    if not mean:
        return None
    lengths = sparse.lengths().view(len(sparse.keys()), -1)
    divisors = torch.ones(len(pooled), lengths.shape[1], device=lengths.device)
    for field in mean:
        divisors[pooled.index(field)] = lengths[sparse.keys().index(field)].clamp(min=1)
    return divisors.T


@torch.fx.wrap  # See `_in_order`.
def _weights(sparse: KeyedJaggedTensor, fields: list[str]) -> dict[str, Tensor]:
    """The weights of some fields' ids, `[ids]` float32."""
    return {field: sparse[field].weights() for field in fields}


@torch.fx.wrap  # See `_in_order`.
def _divided(rows: Tensor, divisors: Tensor | None, widths: list[int]) -> Tensor:
    """Rows `[batch, sum of widths]`, those of each field divided."""
    if divisors is None:
        return rows
    if len(set(widths)) == 1:
        return (rows.view(*divisors.shape, -1) / divisors.unsqueeze(-1)).flatten(1)
    of_columns = zip(divisors.split(1, 1), widths, strict=True)
    return rows / torch.cat([one.expand(-1, width) for one, width in of_columns], 1)


def fields_of_tables(fields: Iterable[str], shared: Mapping[str, str]) -> dict[str, list[str]]:
    """The fields that use each table, by the field whose own it is; see `EmbeddingFront`."""
    tables = {field: [field] for field in fields if field not in shared}
    for field, table in shared.items():
        tables[table].append(field)
    return tables


def table_name(field: str) -> str:
    """Name of a field's table."""
    return f"t_{field}"
