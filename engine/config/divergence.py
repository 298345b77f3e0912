"""The section `train.on_divergence`."""

from __future__ import annotations

from pydantic import Field, field_validator

from stampede.settings import Section


class DivergenceSection(Section):
    """What becomes of a run whose loss or gradients are no longer finite, or whose loss leaps."""

    rollbacks: int = Field(
        0,
        ge=0,
        description="how often a run that diverges goes back to its newest checkpoint, and on with "
        "the same batches at a lower rate of the dense layers; 0: it stops",
    )
    dense_lr_factor: float = Field(
        0.5,
        gt=0,
        le=1,
        description="what each rollback multiplies the dense layers' scheduled rate by",
    )
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
