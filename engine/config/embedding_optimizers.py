"""The optimizers of the embedding tables: one section for each, told apart by `optimizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stampede.engine.config.schedule import PlateauSection, ScheduleSection
from stampede.optim import CowClip
from stampede.optim.clip import Granularity, Variant
from stampede.optim.rules import EpsPlacement
from stampede.optim.settings import OnNonfinite, Rows
from stampede.settings import Beta, Section


class ClipSection(Section):
    """The clip."""

    granularity: Granularity = Field(
        "cowclip",
        description="what is held against one threshold: nothing, the gradients of all tables, of "
        "a field, of an id; field_adaptive and cowclip take it from the weights of a field or id",
    )
    ratio: float = Field(
        1.0, gt=0, description="field_adaptive, cowclip: gradient norm allowed per weight norm"
    )
    bound: float = Field(1e-5, ge=0, description="cowclip: lower bound of the weight norm")
    threshold: float | None = Field(
        None, gt=0, description="global, field, row: gradient norm allowed; required there"
    )
    variant: Variant = Field(
        "reference", description="form of the lower bound: the authors' code, or the paper"
    )

    @model_validator(mode="after")
    def _check_keys_together(self) -> ClipSection:
        try:
            self.as_clip(columns=None)
        except ValueError as failure:
            raise ValueError(str(failure).removeprefix("CowClip: ")) from None
        return self

    def as_clip(self, columns: int | None) -> CowClip:
        """The same, for the optimizers.

        Args:
            columns: how many columns of a stored row are clipped.
        """
        return CowClip(**self.model_dump(), columns=columns)


class _TableOptimizer(Section):
    lr: float = Field(1e-4, ge=0, description="learning rate, which the schedule changes")
    schedule: ScheduleSection = ScheduleSection()
    plateau: PlateauSection = PlateauSection()


class _L2(Section):
    l2: float = Field(1e-5, ge=0, description="coefficient of ||w||^2 in the loss")


class _Decoupled(Section):
    weight_decay: float = Field(
        0.0, ge=0, description="decoupled decay, w = w * (1 - lr*weight_decay); no rule scales it"
    )


class _Betas(Section):
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of the two moments", strict=False
    )


class _Rows(Section):
    rows: Rows = Field("all", description="rows that take a step: all, or those of the batch")


class _Clipped(_TableOptimizer, _L2, _Decoupled, _Rows):
    clip: ClipSection | None = Field(ClipSection(), description="null for no clipping")
    on_nonfinite: OnNonfinite = Field(
        "error",
        description="a NaN or infinity in the gradient of a row stops the run, or leaves the row "
        "out of the batch",
    )


class AdamSection(_Clipped, _Betas):
    """Adam with the clip; row-wise with one second moment per row."""

    optimizer: Literal["adam", "rowwise_adam"] = Field(
        "adam", description="optimizer of the tables"
    )
    lr: float | None = Field(
        None, ge=0, description="learning rate, which the schedule changes; null: by the recipe"
    )
    l2: float | None = Field(
        None, ge=0, description="coefficient of ||w||^2 in the loss; null: by the recipe"
    )
    schedule: ScheduleSection = ScheduleSection()
    eps: float = Field(1e-7, gt=0, description="Adam's epsilon")
    eps_placement: EpsPlacement = Field(
        "keras", description="epsilon before (keras) or after (torch) the bias correction"
    )


class AdagradSection(_Clipped):
    """Adagrad with the clip; row-wise with one sum per row."""

    optimizer: Literal["adagrad", "rowwise_adagrad"] = Field(
        "adagrad", description="optimizer of the tables"
    )
    eps: float = Field(1e-8, gt=0, description="added to the denominator")


class SGDSection(_Clipped):
    """SGD with the clip."""

    optimizer: Literal["sgd"] = Field("sgd", description="optimizer of the tables")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum")


class HelenSection(_TableOptimizer, _L2, _Betas, _Rows):
    """Helen (arXiv 2403.00798): two passes a step, the second at perturbed rows."""

    optimizer: Literal["helen"] = Field("helen", description="optimizer of the tables")
    rho: float = Field(0.05, ge=0, description="length of the perturbation")
    bound: float = Field(
        0.3, ge=0, le=1, description="smallest share of the perturbation for rare ids"
    )
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon, after the bias correction")
    weight_decay: float = Field(0.0, ge=0, description="adds weight_decay*w to the gradient")


class FbgemmRowWiseAdagradSection(_TableOptimizer, _L2, _Decoupled):
    """FBGEMM's own row-wise Adagrad, a baseline."""

    optimizer: Literal["fbgemm_rowwise_adagrad"] = Field(
        "fbgemm_rowwise_adagrad", description="optimizer of the tables"
    )
    l2: float = Field(0.0, ge=0, description="coefficient of ||w||^2 in the loss; not on CPU")
    eps: float = Field(1e-8, gt=0, description="added to the denominator")


class FbgemmAdamSection(_TableOptimizer, _Decoupled, _Betas):
    """FBGEMM's own Adam, a baseline; on CUDA only."""

    optimizer: Literal["fbgemm_adam"] = Field("fbgemm_adam", description="optimizer of the tables")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon, after the bias correction")


class FbgemmCowClipSection(_TableOptimizer, _L2, _Decoupled):
    """FBGEMM's mode of the name COWCLIP, a baseline; another rule than the paper's."""

    optimizer: Literal["fbgemm_cowclip"] = Field(
        "fbgemm_cowclip", description="optimizer of the tables"
    )
    eps: float = Field(1e-8, gt=0, description="added to the denominator")
    ratio: float = Field(1.0, ge=0, description="step norm allowed per weight norm of a row")
    bound: float = Field(1e-5, ge=0, description="lower bound of that")
    counter_halflife: Literal[-1, 0] = Field(
        -1, description="-1 counts the steps a row was seen in, 0 only the present one"
    )


EmbeddingOptimSection = Annotated[
    AdamSection
    | AdagradSection
    | SGDSection
    | HelenSection
    | FbgemmRowWiseAdagradSection
    | FbgemmAdamSection
    | FbgemmCowClipSection,
    Field(discriminator="optimizer"),
]
