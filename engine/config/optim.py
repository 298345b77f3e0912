"""The section `optim`: optimizers, learning-rate schedules, scaling with the batch size."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stampede.optim.clip import CowClip, Granularity, Variant
from stampede.optim.scaling import ScalingRule
from stampede.optim.schedules import Decay, Schedule
from stampede.settings import Beta, Section

# Copies of types in `stampede.optim`, which needs torch; a test compares them.
EpsPlacement = Literal["keras", "torch"]
Rows = Literal["all", "touched"]
OnNonfinite = Literal["error", "skip_row"]

# Types that add up a row's gradients in the order of the global batch on any number of ranks.
IN_ORDER_SHARDING_TYPES = ("table_wise", "row_wise")
SHARDING_TYPES = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)


class ScheduleSection(Section):
    """How the learning rate changes during training."""

    warmup: float | None = Field(
        None,
        ge=0,
        description="length of the linear warm-up from 1e-8, in units; 0: none; null: by the "
        "recipe, else none",
    )
    decay: Decay | None = Field(
        None, description="decay after the warm-up; null: by the recipe, else constant"
    )
    unit: Literal["epochs", "steps"] = Field(
        "epochs", description="unit of warmup, length and every"
    )
    length: float | None = Field(
        None,
        gt=0,
        description="polynomial, cosine: length of the decay after the warm-up, in units; null: "
        "up to the end of training",
    )
    final: float = Field(
        0.0, ge=0, le=1, description="polynomial, cosine: rate at the end, as a fraction of lr"
    )
    power: float = Field(1.0, gt=0, description="polynomial: exponent; 1 is a straight line")
    every: float = Field(
        1.0, gt=0, description="step: units between drops, counted from the end of the warm-up"
    )
    factor: float = Field(0.1, ge=0, le=1, description="step: factor of each drop")

    @model_validator(mode="after")
    def _check_keys_together(self) -> ScheduleSection:
        try:
            self.as_schedule()
        except ValueError as failure:
            raise ValueError(str(failure).removeprefix("Schedule: ")) from None
        return self

    def as_schedule(self) -> Schedule:
        """The schedule for the rate formulas; null becomes no warm-up and a constant rate."""
        null = {"warmup": self.warmup or 0.0, "decay": self.decay or "constant"}
        return Schedule(**self.model_dump() | null)


class PlateauSection(Section):
    """Reduction of the scheduled rate when the AUC stops rising."""

    factor: float = Field(1.0, gt=0, le=1, description="factor of a reduction; 1: none")
    patience: int = Field(
        2,
        ge=0,
        description="evaluations in a row, including those within an epoch, without a better AUC "
        "on evaluate.select_on before the next one reduces the rate",
    )
    threshold: float = Field(
        1e-4, ge=0, description="AUC above the best so far that counts as better"
    )
    least: float = Field(0.01, ge=0, le=1, description="lowest fraction of the scheduled rate")


class ClipSection(Section):
    """Settings of the clip."""

    granularity: Granularity = Field(
        "cowclip",
        description="how the gradient of each row is clipped. none: not at all; row: with a "
        "constant threshold; cowclip: with a threshold from the weights of the row",
    )
    ratio: float = Field(1.0, gt=0, description="cowclip: gradient norm allowed per weight norm")
    bound: float = Field(1e-5, ge=0, description="cowclip: lower bound of the weight norm")
    threshold: float | None = Field(
        None, gt=0, description="row: gradient norm allowed; required by this clip"
    )
    variant: Variant = Field(
        "reference", description="form of the lower bound: as in the authors' code or in the paper"
    )

    @model_validator(mode="after")
    def _check_keys_together(self) -> ClipSection:
        try:
            self.as_clip(columns=None)
        except ValueError as failure:
            raise ValueError(str(failure).removeprefix("CowClip: ")) from None
        return self

    def as_clip(self, columns: int | None) -> CowClip:
        """The clip for the optimizers; `columns` of a stored row are clipped."""
        return CowClip(**self.model_dump(), columns=columns)


class _TableOptimizer(Section):
    lr: float = Field(1e-4, ge=0, description="learning rate, which the schedule changes")
    schedule: ScheduleSection = ScheduleSection()
    plateau: PlateauSection = PlateauSection()


class _L2(Section):
    l2: float = Field(1e-5, ge=0, description="coefficient of ||w||^2 in the loss")


class _Decoupled(Section):
    weight_decay: float = Field(
        0.0, ge=0, description="decoupled decay, w = w * (1 - lr*weight_decay); never scaled"
    )


class _Rows(Section):
    rows: Rows = Field("all", description="rows that take a step: all, or those in the batch")


class _Clipped(_TableOptimizer, _L2, _Decoupled, _Rows):
    clip: ClipSection | None = Field(ClipSection(), description="null for no clipping")
    on_nonfinite: OnNonfinite = Field(
        "error",
        description="what to do about a NaN or infinity in a row's gradient: stop the run, or "
        "leave the row out of the batch",
    )


class _BetasByRecipe(Section):
    betas: tuple[Beta, Beta] | None = Field(
        None, description="decay rates of the two moments; null: by the recipe", strict=False
    )


class AdamSection(_Clipped, _BetasByRecipe):
    """Adam with the clip; the row-wise form has one second moment per row."""

    optimizer: Literal["adam", "rowwise_adam"] = Field(
        "adam", description="optimizer of the tables"
    )
    lr: float | None = Field(
        None, ge=0, description="learning rate, which the schedule changes; null: by the recipe"
    )
    l2: float | None = Field(
        None, ge=0, description="coefficient of ||w||^2 in the loss; null: by the recipe"
    )
    eps: float = Field(1e-7, gt=0, description="Adam's epsilon")
    eps_placement: EpsPlacement = Field(
        "keras", description="epsilon before (keras) or after (torch) the bias correction"
    )


class AdagradSection(_Clipped):
    """Adagrad with the clip; the row-wise form has one sum per row."""

    optimizer: Literal["adagrad", "rowwise_adagrad"] = Field(
        "adagrad", description="optimizer of the tables"
    )
    eps: float = Field(1e-8, gt=0, description="added to the denominator")


class SGDSection(_Clipped):
    """SGD with the clip."""

    optimizer: Literal["sgd"] = Field("sgd", description="optimizer of the tables")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum")


EmbeddingOptimSection = Annotated[
    AdamSection | AdagradSection | SGDSection,
    Field(discriminator="optimizer"),
]


class DenseOptimSection(_BetasByRecipe):
    """The optimizer of the dense layers, at the base batch size."""

    lr: float | None = Field(
        None, ge=0, description="learning rate, which the schedule changes; null: by the recipe"
    )
    schedule: ScheduleSection = ScheduleSection()
    plateau: PlateauSection = PlateauSection()
    eps: float = Field(1e-7, gt=0, description="Adam's epsilon")
    eps_placement: EpsPlacement = Field(
        "keras", description="epsilon before (keras) or after (torch) the bias correction"
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="decoupled decay (AdamW), w = w * (1 - lr*weight_decay), of matrices only: not "
        "of biases, norms and first-order weights; never scaled",
    )


class ScalingSection(Section):
    """How the settings for the base batch size change with the batch size."""

    rule: ScalingRule | None = Field(
        None, description="scaling rule; none: no scaling; null: by the recipe"
    )
    base_batch_size: int | None = Field(
        None,
        ge=1,
        description="global batch size that the settings are meant for; null: by the recipe",
    )


class OptimSection(Section):
    """Optimizers."""

    embedding: EmbeddingOptimSection = AdamSection()
    dense: DenseOptimSection = DenseOptimSection()
    scaling: ScalingSection = ScalingSection()
