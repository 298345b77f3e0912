"""The keys of every section with data in files that say how these are read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stampede.settings import Section


class ReadingSection(Section):
    """How prepared data are read."""

    residence: Literal["auto", "disk", "memory", "device"] = Field(
        "auto",
        description="where the data are during training; changes the speed, never the batches. "
        "auto: the GPU where they take less than half of its free memory, else main memory up to "
        "memory_gb, else disk",
    )
    shuffle: Literal["auto", "global", "block", "none"] = Field(
        "auto",
        description="order of the training rows in each epoch: over all rows; over blocks, then "
        "within windows of a quarter of memory_gb; as they stand. auto: block where the training "
        "part is larger than memory_gb, else global",
    )
    memory_gb: float = Field(
        16.0, gt=0, description="main memory that the data may take on a machine, in 10^9 bytes"
    )
