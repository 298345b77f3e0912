"""The section `evaluate`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stampede.engine.metrics import Metric
from stampede.settings import Section


class EvaluateSection(Section):
    """Evaluation of the validation and test part, after every epoch."""

    every: int = Field(
        0, ge=0, description="steps between further evaluations within an epoch; 0: none"
    )
    every_epochs: int = Field(
        1, ge=1, description="epochs between evaluations and checkpoints; the last epoch has both"
    )
    batch_size: int = Field(8192, ge=1, description="samples of a global batch, over all ranks")
    select_on: Literal["validation", "test"] = Field(
        "validation",
        description="part that chooses the best epoch, stops early and reduces rates; test is the "
        "paper's way: no rows are kept for validation, and best_auc is optimistic",
    )
    patience: int = Field(
        2,
        ge=0,
        description="evaluated epochs in a row without a better AUC on select_on, after which "
        "training stops; 0: never",
    )
    metrics: list[Metric] = Field(
        ["pr_auc", "normalized_entropy", "calibration", "calibration_buckets"],
        description="what is computed besides auc and logloss; gauc needs group_by and is always "
        "computed with it",
    )
    group_by: str = Field(
        "",
        description="id field of the model, such as the user's, whose ids are the groups of GAUC, "
        "missing, rare and unseen ones left out; '': none",
    )

    @model_validator(mode="after")
    def _check_groups(self) -> EvaluateSection:
        if "gauc" in self.metrics and not self.group_by:
            raise ValueError(
                "metrics has 'gauc' but group_by is not given; write the id field whose ids are "
                "its groups, for example evaluate.group_by=user"
            )
        return self
