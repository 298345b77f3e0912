"""Tensors in the files of a checkpoint, written and read by `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stampede.engine.checkpoint.manifest import (
    DTYPES,
    REMEDY,
    TABLES,
    ChunkEntry,
    DamagedCheckpointError,
    Manifest,
    TensorEntry,
    read_manifest,
)
from stampede.engine.errors import RunFolderError
from stampede.engine.exit_status import lacks_memory
from stampede.files import check_files

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Rows copied at a time.
_PIECE = 1 << 18


@torch.no_grad()
def on_cpu(values: Any, *, copy: bool) -> Any:
    """Nested and sharded tensors on the CPU, in a layout that torch saves without a copy.

    Without `copy`, tensors that are already on the CPU share memory.
    """
    if isinstance(values, dict):
        return {key: on_cpu(value, copy=copy) for key, value in values.items()}
    moved: Tensor = values.cpu()
    if moved is not values:
        # It came from a GPU, so it is already a copy.
        return moved

    def taken(tensor: Tensor) -> Tensor:
        if copy or not tensor.numel() or not tensor.is_contiguous():
            return tensor.clone()
        # A storage of its own size: tables lie in one array, and torch would copy a part of it.
        content = tensor.detach().view(-1).view(torch.uint8)
        return torch.from_numpy(content.numpy()).view(tensor.dtype).view(tensor.shape)

    if not isinstance(values, ShardedTensor):
        return taken(values)
    shards = [Shard(taken(shard.tensor), shard.metadata) for shard in values.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, values.metadata())


def bytes_on_cpu(values: Any) -> int:
    """Bytes in main memory of this process's parts of nested tensors."""
    if isinstance(values, dict):
        return sum(map(bytes_on_cpu, values.values()))
    return sum(part.nbytes for part, _ in local_parts(values) if part.device.type == "cpu")


def local_parts(tensor: Tensor | ShardedTensor) -> Iterator[tuple[Tensor, list[int]]]:
    """This process's parts of a tensor and their offsets."""
    if not isinstance(tensor, ShardedTensor):
        yield tensor.detach(), [0] * tensor.dim()
        return
    for shard in tensor.local_shards():
        yield shard.tensor.detach(), list(shard.metadata.shard_offsets)


@torch.no_grad()
def copy_rows_(table: Tensor | ShardedTensor, whole: Tensor, rows: Tensor) -> None:
    """Copy rows into this process's parts of a table, from its first column on.

    Args:
        table: `[n]` or `[n, columns]`, on any device.
        whole: `[m]` or `[m, these columns or fewer]`, on the CPU.
        rows: `[n]` int64, the row of `whole` for each row of the table; -1: unchanged.
    """
    for part, (first_row, *first_column) in local_parts(table):
        mine = rows[first_row : first_row + len(part)]
        columns = [
            slice(first, min(first + size, most))
            for first, size, most in zip(first_column, part.shape[1:], whole.shape[1:], strict=True)
        ]
        for places in (mine >= 0).nonzero().squeeze(1).split(_PIECE):
            values = whole[(mine[places], *columns)]
            here = [slice(size) for size in values.shape[1:]]
            part[(places.to(part.device), *here)] = values.to(part)


def write_tensors(
    state: dict[str, Any], folder: Path, group: dist.ProcessGroup
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Write nested tensors; all ranks of the group must call it, and fail together.

    Returns the place of each tensor, and the files that this rank wrote. Tensors are sharded, or
    equal on all ranks. Raises torch's CheckpointException.
    """
    writer = _Writer(folder)
    metadata = dcp.save(state, storage_writer=writer, process_group=group)
    stored = metadata.storage_data
    entries = {
        name: TensorEntry(
            dtype=_NAMES[tensor.properties.dtype],
            size=list(tensor.size),
            chunks=[
                ChunkEntry(
                    offsets=list(chunk.offsets),
                    sizes=list(chunk.sizes),
                    file=(where := stored[MetadataIndex(name, chunk.offsets)]).relative_path,
                    start=where.offset,
                    bytes=where.length,
                )
                for chunk in tensor.chunks
                # Ranks without rows may share an offset.
                if chunk.sizes.numel()
            ],
        )
        for name, tensor in metadata.state_dict_metadata.items()
    }
    return entries, writer.files


def read_tensors(
    path: Path, state: dict[str, Any], *, alone: bool = False, manifest: Manifest | None = None
) -> None:
    """Fill tensors in place from a checkpoint of any plan and number of ranks.

    Args:
        state: all or some of the written tensors, by name.
        alone: whether only this process reads; else all ranks must call it.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged, or a tensor is missing.
        MemoryError: a rank lacks the memory.
    """
    # Checked first: torch would print a traceback.
    manifest = manifest or read_manifest(path)
    # A reader of one tensor at a time does not need the metadata of thousands.
    wanted = {name: manifest.tensors[name] for name in state if name in manifest.tensors}
    tensors = wanted if len(wanted) == len(state) else manifest.tensors
    try:
        check_files(path, manifest.files, content=False)
        with warnings.catch_warnings():
            # torch warns if there is no process group.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=Reader(path, tensors), no_dist=alone)
    except (CheckpointException, OSError, ValueError, RuntimeError, MemoryError) as failure:
        lack = next(filter(lacks_memory, _causes(failure)), None)
        if lack is not None:
            raise MemoryError(reason(lack)) from None
        raise DamagedCheckpointError(
            f"{path}: damaged checkpoint ({reason(failure)}); {REMEDY}"
        ) from None


def check_same_network(path: Path, manifest: Manifest, model: Mapping[str, Tensor]) -> None:
    """Refuse a model other than the trained one, before anything is read into it.

    Args:
        model: its `state_dict`; tensors may be sharded and on any device.
    """
    now = {name: list(tensor.size()) for name, tensor in model.items()}
    saved = {
        name.removeprefix("model."): entry.size
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    }
    for name in [*now, *(name for name in saved if not name.startswith(TABLES))]:
        if saved.get(name) != now.get(name):
            raise RunFolderError(
                f"{path}: the network differs from the trained one ({name}: "
                f"{saved.get(name, 'absent')} in the checkpoint, {now.get(name, 'absent')} now). "
                "Keep the checkpoint, which is intact; restore the configuration's section model "
                "and the file of model.import, or train from scratch with another run.name"
            )


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights of a checkpoint that are not finite, with a `RunFolderError`."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # In parts: `isfinite` of a whole table takes a quarter of its memory.
        if not all(bound.isfinite() for bound in tensor.aminmax()):
            raise RunFolderError(
                f"{path}: {name} holds numbers that are not finite, so it cannot score; "
                "write another --epoch, or train again with lower rates"
            )


class _Writer(dcp.FileSystemWriter):
    """Writes tensors into `files` of a folder, without torch's pickled metadata."""

    def __init__(self, folder: Path) -> None:
        # The tensors are already on the CPU.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.files: list[str] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's part and note its files."""
        written = super().write_data(plan, planner)
        self.files = sorted({item.storage_data.relative_path for item in written.value()})
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the place of each tensor; called on rank 0."""
        metadata.storage_data = {
            item.index: item.storage_data for written in results for item in written
        }


class Reader(dcp.FileSystemReader):
    """Reads tensors from the places that a manifest names."""

    def __init__(self, folder: Path, tensors: dict[str, TensorEntry]) -> None:
        super().__init__(folder)
        self._tensors = tensors

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """torch's metadata, made from the manifest instead of a pickle."""
        described, stored = {}, {}
        for name, tensor in self._tensors.items():
            chunks = []
            for chunk in tensor.chunks:
                offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                where = _StorageInfo(chunk.file, chunk.start, chunk.bytes)
                stored[MetadataIndex(name, offsets)] = where
            properties = TensorProperties(DTYPES[tensor.dtype])
            described[name] = TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
        return Metadata(described, storage_data=stored, storage_meta=StorageMeta())


def reason(failure: BaseException) -> str:
    """The failure in one line; of the first rank that failed."""
    failure = cause = _causes(failure)[0]
    # torch's writer fails again when it closes its file.
    while isinstance(cause, RuntimeError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        failure = cause
    lines = str(failure).strip().splitlines()
    # Some of torch's messages contain all arguments.
    return lines[0][:300] if lines else type(failure).__name__


def _causes(failure: BaseException) -> list[BaseException]:
    """The failures by rank, if torch has them."""
    if isinstance(failure, CheckpointException) and failure.failures:
        return [cause for cause, _ in failure.failures.values()]
    return [failure]
