"""The section `train.profile`."""

from __future__ import annotations

from pydantic import Field

from stampede.settings import Section


class ProfileSection(Section):
    """A trace of some steps by torch.profiler."""

    start: int = Field(10, ge=1, description="first step to trace, counted from 1")
    steps: int = Field(
        0,
        ge=0,
        le=1000,
        description="steps to trace, into profile/ of the run folder, a file for each rank, some "
        "MB a step; 0: none",
    )
