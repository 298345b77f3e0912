"""Where the tensors of a checkpoint lie in its files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from stampede.engine.checkpoint.states import Count
from stampede.files import FileEntry
from stampede.settings import Section

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
}

Shape = Annotated[list[Count], Field(max_length=8)]


class ChunkEntry(Section):
    """A part of a tensor that one process wrote.

    Attributes:
        offsets: where it begins in the tensor.
        sizes: its own.
        file: that it lies in.
        start, bytes: where in the file, as torch saves a tensor.
    """

    offsets: Shape
    sizes: Shape
    file: str
    start: Count
    bytes: Count


class TensorEntry(Section):
    """A tensor, in chunks that cover it exactly."""

    dtype: Literal[tuple(DTYPES)]
    size: Shape
    chunks: list[ChunkEntry]

    @model_validator(mode="after")
    def _chunks_cover_it(self) -> TensorEntry:
        itemsize = DTYPES[self.dtype].itemsize
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(self.size):
                raise ValueError("a chunk has other dimensions than its tensor")
            if chunk.bytes < math.prod(chunk.sizes) * itemsize:
                raise ValueError("a chunk is larger than its part of the file")
        if not _is_covered(self.size, [(c.offsets, c.sizes) for c in self.chunks]):
            raise ValueError("its chunks do not cover it")
        return self


def check_fits_files(tensors: Mapping[str, TensorEntry], files: Sequence[FileEntry]) -> None:
    """Check that every chunk lies in one of the files, and that they share no bytes.

    Raises:
        ValueError: what does not fit.
    """
    lengths = {entry.name: entry.bytes for entry in files}
    if len(lengths) != len(files):
        raise ValueError("files: their names must differ")
    used: Counter[str] = Counter()
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in lengths:
                raise ValueError(f"tensors.{name}: {chunk.file!r:.80} is not one of the files")
            if chunk.start + chunk.bytes > lengths[chunk.file]:
                raise ValueError(f"tensors.{name}: it ends after the end of {chunk.file}")
            used[chunk.file] += chunk.bytes
    for name, total in used.items():
        if total > lengths[name]:
            raise ValueError(f"files: more than the whole of {name} is used")


def _is_covered(size: Sequence[int], boxes: Iterable[tuple[list[int], list[int]]]) -> bool:
    """Whether boxes `(offsets, sizes)` cover a tensor exactly, as sharded tables do.

    Those are cut into columns, each of which is cut into rows of its own.
    """
    boxes = [(offsets, sizes) for offsets, sizes in boxes if math.prod(sizes)]
    if not math.prod(size):
        return not boxes
    if len(size) != 1 and len(size) != 2:
        return boxes == [([0] * len(size), list(size))]
    rows_last = sorted((o[::-1], s[::-1]) for o, s in boxes)
    columns = []
    for column, parts in groupby(rows_last, key=lambda box: (box[0][:-1], box[1][:-1])):
        if not _is_partition(size[0], ((o[-1], s[-1]) for o, s in parts)):
            return False
        columns.append(column)
    if len(size) == 1:
        return len(columns) == 1
    return _is_partition(size[1], ((o[0], s[0]) for o, s in columns))


def _is_partition(length: int, intervals: Iterable[tuple[int, int]]) -> bool:
    """Whether intervals `(start, length)`, in order, follow each other from 0 to the end."""
    end = 0
    for start, size in intervals:
        if start != end:
            return False
        end += size
    return end == length
