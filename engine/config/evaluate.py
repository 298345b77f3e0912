"""The section `evaluate` of a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from stampede.settings import Section

_Metric = Literal[
    "auc", "logloss", "pr_auc", "normalized_entropy", "calibration", "calibration_buckets", "gauc"
]


def _one_goal(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


class EvaluateSection(Section):
    """Evaluation on the validation and test parts after every epoch."""

    every: int = Field(0, ge=0, description="steps between evaluations within an epoch; 0: none")
    every_epochs: int | None = Field(
        None,
        ge=1,
        description="epochs between evaluations and checkpoints; always after the last; null: by "
        "the recipe, 1 except for lr on small logs",
    )
    batch_size: int = Field(8192, ge=1, description="global batch size, over all ranks")
    select_on: Literal["validation", "test"] = Field(
        "validation",
        description="part that chooses the best epoch, stops early and reduces rates; test, as in "
        "the paper, keeps no rows for validation and makes best_auc optimistic",
    )
    metric: Literal["auc", "logloss", "both"] | None = Field(
        None,
        description="what chooses the best epoch, stops early and reduces rates; both: AUC minus "
        "logloss; null: by the recipe, both",
    )
    calibrate: Literal["auto", True, False] = Field(
        "auto",
        description="auto: move scores that are too certain towards the share of clicks, by the "
        "validation part (not for esmm); true: also shift them so that its predictions add up to "
        "its clicks; the model keeps both, also in predict and packages",
    )
    select_goals: Annotated[
        dict[str, Annotated[float, Field(ge=0)]], BeforeValidator(_one_goal)
    ] = Field(
        {},
        description="with several goals, the goal whose metric chooses, or weights of the mean "
        "of their metrics by goal; {}: the weights of train.goals",
    )
    patience: int | None = Field(
        None,
        ge=0,
        description="evaluated epochs in a row without a better metric on select_on before "
        "training stops; 0: never; null: by the recipe",
    )
    metrics: list[_Metric] = Field(
        ["pr_auc", "normalized_entropy", "calibration", "calibration_buckets"],
        description="metrics besides auc and logloss; gauc needs group_by, and is always computed "
        "with it",
    )
    group_by: str = Field(
        "",
        description="id field whose ids are the groups of GAUC, such as the user's, without "
        "missing, rare and unseen ids; '': none",
    )
    compare_with_lr: Literal["auto", True, False] = Field(
        "auto",
        description="fit logistic regression to the same features after training, on rank 0's CPU, "
        "and say if it is better; auto: up to a million training rows",
    )
    compare_with_trees: Literal["auto", True, False] = Field(
        "auto",
        description="the same with LightGBM, if it is installed and there is a validation part; "
        "auto: up to a million training rows, unless compare_with_lr is false",
    )

    @model_validator(mode="after")
    def _check_groups(self) -> EvaluateSection:
        if "gauc" in self.metrics and not self.group_by:
            raise ValueError(
                "metrics has 'gauc' but group_by is not given; write the id field that groups "
                "samples, such as evaluate.group_by=user"
            )
        return self
