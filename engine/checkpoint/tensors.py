"""Tensors in the files of a checkpoint, written and read by `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stampede.engine.checkpoint.errors import DamagedCheckpointError
from stampede.engine.checkpoint.layout import DTYPES, ChunkEntry, TensorEntry
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.errors import lacks_memory
from stampede.files import check_files

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Writer(dcp.FileSystemWriter):
    """Writes tensors into the files of one folder, and nothing besides.

    torch's own metadata, a pickle, are not written; the manifest has them as JSON.

    Attributes:
        files: names of the files this process wrote.
    """

    def __init__(self, folder: Path) -> None:
        # What is written lies on the CPU already.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.files: list[str] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's part; see torch's class."""
        written = super().write_data(plan, planner)
        self.files = sorted({item.storage_data.relative_path for item in written.value()})
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note where everything lies; called on rank 0."""
        metadata.storage_data = {
            item.index: item.storage_data for written in results for item in written
        }


class Reader(dcp.FileSystemReader):
    """Reads tensors where a checkpoint's manifest says they are."""

    def __init__(self, folder: Path, tensors: dict[str, TensorEntry]) -> None:
        super().__init__(folder)
        self._tensors = tensors

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What torch would unpickle, made from the manifest."""
        return _as_metadata(self._tensors)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this process's part; see torch's class.

        Raises:
            ValueError: an entry is not as torch saves a tensor.
        """
        for item in plan.items:
            _check_entry(Path(self.path), self.storage_data[item.storage_index])
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:
            # torch's own sentence says how to let the file execute what it likes.
            raise ValueError("an entry holds something else than a tensor") from None


def write_tensors(
    state: dict[str, Any], folder: Path, group: dist.ProcessGroup
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Write tensors; all ranks of the group must call it, and fail together.

    Args:
        state: nested; sharded tensors, and tensors that are the same wherever they are.

    Returns:
        Where all tensors are, and the files that this rank wrote.

    Raises:
        CheckpointException: a rank could not write.
    """
    writer = Writer(folder)
    metadata = dcp.save(state, storage_writer=writer, process_group=group)
    return _as_entries(metadata), writer.files


def read_tensors(path: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Fill tensors from a checkpoint, whatever its plan and number of ranks were.

    Args:
        path: the checkpoint.
        state: tensors as they were written, or some of them; filled in place.
        alone: whether this process reads alone; else all ranks must call it.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged or lacks one of them.
        MemoryError: a rank has no memory to read it.
    """
    # First, as torch would say with a traceback what is wrong there.
    manifest = read_manifest(path)
    try:
        check_files(path, manifest.files, content=False)
        with warnings.catch_warnings():
            # That no process group is there is as it should be.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=Reader(path, manifest.tensors), no_dist=alone)
    except (CheckpointException, OSError, ValueError, RuntimeError, MemoryError) as failure:
        lack = next(filter(lacks_memory, _causes(failure)), None)
        if lack is not None:
            raise MemoryError(reason(lack)) from None
        raise DamagedCheckpointError(
            f"{path}: damaged checkpoint ({reason(failure)}); delete it to use the one before"
        ) from None


def reason(failure: BaseException) -> str:
    """What went wrong, in one line; of the first rank where several failed."""
    failure = _underlying(_causes(failure)[0])
    lines = str(failure).strip().splitlines()
    # Some messages of torch hold all its arguments.
    return lines[0][:300] if lines else type(failure).__name__


def _underlying(failure: BaseException) -> BaseException:
    """What the system said, where torch's writer failed once more in closing its file."""
    found: BaseException | None = failure
    while isinstance(found, RuntimeError):
        found = found.__cause__ or found.__context__
    return found if isinstance(found, OSError) else failure


def _causes(failure: BaseException) -> list[BaseException]:
    """What failed on each rank, where torch tells."""
    if isinstance(failure, CheckpointException) and failure.failures:
        return [cause for cause, _ in failure.failures.values()]
    return [failure]


def _as_entries(metadata: Metadata) -> dict[str, TensorEntry]:
    stored = metadata.storage_data
    return {
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
                # Ranks without rows: several may be at one place.
                if chunk.sizes.numel()
            ],
        )
        for name, tensor in metadata.state_dict_metadata.items()
    }


def _as_metadata(tensors: dict[str, TensorEntry]) -> Metadata:
    described, stored = {}, {}
    for name, tensor in tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            where = _StorageInfo(chunk.file, chunk.start, chunk.bytes)
            stored[MetadataIndex(name, offsets)] = where
        properties = TensorProperties(DTYPES[tensor.dtype])
        described[name] = TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
    return Metadata(described, storage_data=stored, storage_meta=StorageMeta())


def _check_entry(folder: Path, where: _StorageInfo) -> None:
    """Check that a part of a file is what torch saves, which holds no more than its own bytes."""
    with (folder / where.relative_path).open("rb") as file:
        try:
            parts = zipfile.ZipFile(_Slice(file, where.offset, where.length)).infolist()
        except zipfile.BadZipFile as failure:
            raise ValueError(f"{where.relative_path}: {failure}") from None
    plain = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
    if not plain or sum(part.file_size for part in parts) > where.length:
        raise ValueError(f"{where.relative_path}: not as torch saves a tensor")


class _Slice(io.RawIOBase):
    """A part of a file; torch's own view of one cannot seek from its end."""

    def __init__(self, file: io.BufferedIOBase, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError(f"{origin + offset} is before the beginning")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        self._file.seek(self._start + self._position)
        wanted = max(min(len(buffer), self._length - self._position), 0)
        count = self._file.readinto(memoryview(buffer)[:wanted])
        self._position += count
        return count
