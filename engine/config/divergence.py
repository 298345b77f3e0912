"""The section `train.on_divergence`."""

from __future__ import annotations

from pydantic import Field, field_validator

from stampede.settings import Section


class DivergenceSection(Section):
    """When a loss that is finite has diverged: the run then stops."""

    loss_factor: float = Field(
        0.0,
        ge=0,
        description="a logged loss above so many times the median of those logged before it has "
        "diverged too; 0: only what is not finite has",
    )
    window: int = Field(
        10,
        ge=1,
        le=1000,
        description="logged losses that this median is taken of, one every train.log_every steps; "
        "no loss is compared before there are so many",
    )

    @field_validator("loss_factor")
    @classmethod
    def _check_above_the_median(cls, factor: float) -> float:
        if 0 < factor <= 1:
            raise ValueError(
                f"found {factor:g}, which half of all losses exceed; write a number above 1 such "
                "as 5, or 0 for none"
            )
        return factor
