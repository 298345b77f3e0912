"""What a sweep file says."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stampede.settings import Section, Seed

# A value of a key, or overrides under a name.
Axis = list[Any] | dict[str, list[str]]
Grid = dict[str, Any]
Metric = Literal[
    "auc",
    "logloss",
    "pr_auc",
    "gauc",
    "normalized_entropy",
    "calibration",
    "best_epoch",
    "steps",
    "clipped_share",
    "train_seconds",
    "samples_per_second",
]
# Those that are better the larger they are; the losses are better the smaller.
_LARGER_IS_BETTER = {"auc": True, "pr_auc": True, "gauc": True}
_SHOWN = {"auc": "AUC", "pr_auc": "PR-AUC", "gauc": "GAUC", "train_seconds": "seconds"}
_Seeds = Annotated[list[Seed], Field(min_length=1)]


def shown_as(metric: str) -> str:
    """A metric's name for people."""
    return _SHOWN.get(metric, metric)


def _checked_grid(grid: Grid) -> Grid:
    for axis, values in grid.items():
        named = isinstance(values, dict) and all(
            isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
            for overrides in values.values()
        )
        if not values or not (isinstance(values, list) or named):
            raise ValueError(
                f"{axis}: found {values!r}; write a list of values of that key, such as "
                "[1024, 8192], or names that each stand for a list of section.key=value"
            )
        if isinstance(values, list) and "." not in axis:
            raise ValueError(
                f"{axis}: a list is of values of a key, such as train.batch_size; write such a "
                "key, or names that each stand for a list of section.key=value"
            )
    return grid


class ParameterSection(Section):
    """What a study may choose for a key: a range, or one of some values."""

    low: int | float | None = Field(None, description="smallest value")
    high: int | float | None = Field(
        None, description="largest value; whole numbers where both are"
    )
    log: bool = Field(False, description="whether small and large values are equally likely")
    choices: list[int | float | str | bool] = Field([], description="values, instead of a range")

    @model_validator(mode="after")
    def _check_together(self) -> ParameterSection:
        given = (self.low is not None, self.high is not None)
        if bool(self.choices) == any(given) or given[0] != given[1]:
            raise ValueError("write low and high, or choices")
        if all(given) and not self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; write a larger high")
        if self.log and (self.choices or self.low <= 0):
            raise ValueError("log is for a range with a low above 0")
        return self

    @property
    def whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def tried(self) -> list[Any]:
        """The ends of the range, or the values."""
        if self.choices:
            return list(self.choices)
        ends = (self.low, self.high)
        return list(ends) if self.whole else [float(end) for end in ends]


class StudySection(Section):
    """A search by Optuna."""

    parameters: dict[str, ParameterSection] = Field(
        ..., min_length=1, description="by section.key: what is tried"
    )
    metric: Literal["auc", "logloss", "pr_auc", "gauc", "normalized_entropy"] = Field(
        "auc", description="what is sought, on evaluate.select_on at the best epoch"
    )
    direction: Literal["maximize", "minimize"] = Field(
        "maximize", description="whether a large or a small metric is sought"
    )
    trials: int = Field(20, ge=1, description="points tried, failed ones included")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="seed of the sampler")
    sampler: Literal["tpe", "random"] = Field("tpe", description="how points are chosen")

    @model_validator(mode="after")
    def _check_direction(self) -> StudySection:
        right = "maximize" if self.metric in _LARGER_IS_BETTER else "minimize"
        if self.direction != right:
            raise ValueError(
                f"direction is {self.direction!r}, but {self.metric} is better the "
                f"{'larger' if right == 'maximize' else 'smaller'}; write direction: {right}"
            )
        return self


class ReportSection(Section):
    """What tables and pictures show."""

    metrics: list[Metric] = Field(
        ["auc", "logloss"],
        min_length=1,
        description="of the test part at the best epoch, which evaluate.select_on chose",
    )
    x: str = Field("", description="axis of the grid along the picture; '': the last one")


class PublishedSection(Section):
    """Figures of others for the same points."""

    source: str = Field(..., min_length=1, description="where they stand, and what they are of")
    auc: dict[str, Annotated[float, Field(ge=0.5, le=1)]] = Field(
        ..., min_length=1, description="by the point's labels, such as 'deepfm / 1K'; 0.5 to 1"
    )


class SmallSection(Section):
    """What `--small` changes: something that a laptop does."""

    overrides: list[str] = Field([], description="section.key=value, after those of the sweep")
    grid: Grid = Field({}, description="axes instead of those of the same name")
    seeds: list[Seed] = Field([], description="instead of the sweep's, where any are given")
    trials: int | None = Field(None, ge=1, description="of the study")
    published: bool = Field(False, description="whether published figures are shown there too")

    _check_grid = field_validator("grid")(_checked_grid)


class SweepSection(Section):
    """A sweep file."""

    config: str = Field(..., description="the job, relative to the sweep file")
    overrides: list[str] = Field([], description="section.key=value for all trials")
    grid: Grid = Field({}, description="axes, of which every combination is a point")
    study: StudySection | None = Field(None, description="a search instead of a grid")
    seeds: _Seeds = Field([1], description="run.seed of the runs of a point")
    keep_checkpoints: bool = Field(
        True, description="false: a trial's checkpoints are deleted when it is done"
    )
    report: ReportSection = ReportSection()
    published: PublishedSection | None = None
    small: SmallSection = SmallSection()

    _check_grid = field_validator("grid")(_checked_grid)

    @model_validator(mode="after")
    def _check_together(self) -> SweepSection:
        if bool(self.grid) == (self.study is not None):
            raise ValueError("write a grid or a study, one of them")
        if self.published is not None and self.study is not None:
            raise ValueError("published: figures are of the points of a grid; leave it out")
        unknown = sorted(set(self.small.grid) - set(self.grid))
        if unknown:
            raise ValueError(
                f"small.grid.{unknown[0]}: no axis of the grid; write one of {', '.join(self.grid)}"
            )
        if self.report.x and self.report.x not in self.grid:
            raise ValueError(
                f"report.x: {self.report.x!r} is no axis of the grid; write one of "
                f"{', '.join(self.grid)}"
            )
        for seeds, key in ((self.seeds, "seeds"), (self.small.seeds, "small.seeds")):
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"{key}: found {seeds}; write each seed once")
        return self
