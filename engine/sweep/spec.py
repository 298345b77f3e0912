"""The sweep file: its keys, its trials, and its mistakes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from stampede.engine.config import Config
from stampede.engine.config.load import load_config
from stampede.engine.run_folder import TRIALS
from stampede.settings import Section, Seed, SettingsError, read_yaml, sentences

# By axis: a list of values of that key, or named lists of overrides.
Grid = dict[str, Any]
Metric = Literal[
    "auc", "logloss", "pr_auc", "gauc", "normalized_entropy", "calibration", "best_epoch",
    "steps", "clipped_share", "train_seconds", "samples_per_second", "parameters",
    "attainable_auc",
]  # fmt: skip


def _each_once(seeds: list[Seed]) -> list[Seed]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"found {seeds}; write each seed once")
    return seeds


_Seeds = Annotated[list[Seed], Field(min_length=1), AfterValidator(_each_once)]

_SHOWN = {
    "auc": "AUC",
    "pr_auc": "PR-AUC",
    "gauc": "GAUC",
    "attainable_auc": "attainable AUC",
    "train_seconds": "seconds",
    "samples_per_second": "samples/s",
}

# Keys that a sweep sets, so that it finds its trials again, and what a user does instead.
_OWN_KEYS = dict.fromkeys(("run.name", "run.overwrite", "checkpoint.resume"), "leave it out") | {
    "run.seed": "write seeds in the file",
    "run.dir": "write --out FOLDER",
}


def shown_as(metric: str) -> str:
    """A metric's name in tables."""
    return _SHOWN.get(metric, metric)


def override(key: str, value: Any) -> str:
    """`section.key=value`, the value in JSON, which is YAML too."""
    return f"{key}={json.dumps(value)}"


def label(value: Any) -> str:
    """A value as tables show it."""
    return value if isinstance(value, str) else json.dumps(value)


def _checked_grid(grid: Grid) -> Grid:
    for axis, values in grid.items():
        named = isinstance(values, dict) and all(
            isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
            for overrides in values.values()
        )
        if not values or not (named or (isinstance(values, list) and "." in axis)):
            raise ValueError(
                f"{axis}: found {values!r}; write a key, such as train.batch_size, with a list of "
                "values, such as [1024, 8192], or names, each with a list of section.key=value"
            )
    return grid


class ParameterSection(Section):
    """What a study may choose for a key: a range, or one of some values."""

    low: int | float | None = Field(None, description="smallest value")
    high: int | float | None = Field(
        None, description="largest value; if both are whole numbers, so are the values"
    )
    log: bool = Field(False, description="draw on a logarithmic scale")
    choices: list[int | float | str | bool] = Field([], description="values instead of a range")

    @model_validator(mode="after")
    def _check_together(self) -> ParameterSection:
        ends = [end for end in (self.low, self.high) if end is not None]
        if len(ends) != (0 if self.choices else 2):
            raise ValueError("write low and high, or choices")
        if ends and not self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; write a larger high")
        if self.log and (self.choices or self.low <= 0):
            raise ValueError("log is for a range with a low above 0")
        return self

    def tried(self) -> list[Any]:
        """The values, or the ends of the range: whole numbers, or both floats."""
        ends = [self.low, self.high]
        whole = all(isinstance(end, int) for end in ends)
        return self.choices or (ends if whole else [float(end) for end in ends])


class StudySection(Section):
    """A search by Optuna."""

    parameters: dict[str, ParameterSection] = Field(
        ..., min_length=1, description="what to try, by section.key"
    )
    metric: Literal["auc", "logloss", "pr_auc", "gauc", "normalized_entropy"] = Field(
        "auc", description="what to optimize, on evaluate.select_on at the best epoch"
    )
    direction: Literal["maximize", "minimize"] = Field(
        "maximize", description="maximize AUCs; minimize logloss and normalized_entropy"
    )
    trials: int = Field(20, ge=1, description="points to try, failed ones included")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="seed of the sampler")
    sampler: Literal["tpe", "random"] = Field("tpe", description="Optuna's sampler")

    @model_validator(mode="after")
    def _check_direction(self) -> StudySection:
        larger = self.metric in ("auc", "pr_auc", "gauc")
        right = "maximize" if larger else "minimize"
        if self.direction != right:
            raise ValueError(
                f"direction is {self.direction!r}, but a {'larger' if larger else 'smaller'} "
                f"{self.metric} is better; write direction: {right}"
            )
        return self


class ReportSection(Section):
    """What tables and pictures show."""

    metrics: list[Metric] = Field(
        ["auc", "logloss"],
        min_length=1,
        description="of the test part at the best epoch, chosen on evaluate.select_on",
    )
    x: str = Field("", description="axis of the grid on the x axis of pictures; '': the last one")


class PublishedSection(Section):
    """Results of others for the same points."""

    source: str = Field(..., min_length=1, description="where they were published, and of what")
    auc: dict[str, Annotated[float, Field(ge=0.5, le=1)]] = Field(
        ...,
        min_length=1,
        description="from 0.5 to 1, by the point's labels without the one of `tune`: 'deepfm / 1K'",
    )


class SmallSection(Section):
    """Changes for `--small`, a form that a laptop can run."""

    overrides: list[str] = Field([], description="further section.key=value")
    grid: Grid = Field({}, description="replaces axes of the same name")
    seeds: list[Seed] = Field([], description="replaces the seeds of the sweep")
    trials: int | None = Field(None, ge=1, description="replaces study.trials")
    published: bool = Field(False, description="show published results too")

    _check_grid = field_validator("grid")(_checked_grid)


class SweepSection(Section):
    """A sweep file."""

    config: str = Field(..., description="the job, relative to the sweep file")
    overrides: list[str] = Field([], description="section.key=value for all trials")
    grid: Grid = Field({}, description="axes; every combination of their values is a point")
    exclude: list[str] = Field(
        [], description="points of the grid to leave out, by their labels: 'linear / 1K'"
    )
    study: StudySection | None = Field(None, description="a search instead of a grid")
    seeds: _Seeds = Field([1], description="run.seed of the trials of a point")
    tune: str = Field(
        "",
        description="axis of the grid: each combination of the other axes takes its best value, by "
        "the AUC of evaluate.select_on with the first seed; the other seeds run with that value "
        "alone",
    )
    keep_checkpoints: bool = Field(
        True, description="false: delete a trial's checkpoints when it is done"
    )
    report: ReportSection = ReportSection()
    published: dict[str, PublishedSection] = Field(
        {}, description="results of others, by the name of their column"
    )
    small: SmallSection = SmallSection()

    _check_grid = field_validator("grid")(_checked_grid)

    @model_validator(mode="after")
    def _check_together(self) -> SweepSection:
        if bool(self.grid) == (self.study is not None):
            raise ValueError("write either a grid or a study")
        for key in ("published", "exclude"):
            if getattr(self, key) and self.study is not None:
                raise ValueError(f"{key}: only for the points of a grid; leave it out")
        if self.tune and (self.tune not in self.grid or len(self.grid) < 2):
            raise ValueError(
                f"tune: found {self.tune!r}; write an axis of a grid with at least two axes"
            )
        for axis in self.small.grid:
            if axis not in self.grid:
                raise ValueError(
                    f"small.grid.{axis}: not an axis of the grid; write one of "
                    f"{', '.join(self.grid)}"
                )
        shown = [axis for axis in self.grid if axis != self.tune]
        if self.report.x and self.report.x not in shown:
            raise ValueError(
                f"report.x: {self.report.x!r} is not an axis of the grid that is not tuned; write "
                f"one of {', '.join(shown)}"
            )
        return self

    def row(self, point: Point) -> str:
        """The labels of a point's row in the tables: its title without the axis that is tuned."""
        return " / ".join(text for axis, text in point.labels.items() if axis != self.tune)

    def as_small(self) -> SweepSection:
        """The small form."""
        small, study = self.small, self.study
        if study is not None and small.trials is not None:
            study = study.model_copy(update={"trials": small.trials})
        changes = {
            "overrides": [*self.overrides, *small.overrides],
            "grid": self.grid | small.grid,
            "seeds": small.seeds or self.seeds,
            "study": study,
            "published": self.published if small.published else {},
        }
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class Point:
    """Settings to try; in a study with a name, which files are called by."""

    labels: Mapping[str, str]
    overrides: tuple[str, ...]
    name: str = ""

    @property
    def title(self) -> str:
        """The point's labels, as in `deepfm / 1K`."""
        return " / ".join(self.labels.values())

    def trial(self, seed: int) -> Trial:
        """The trial with a seed."""
        names = [self.name] if self.name else self.labels.values()
        parts = [re.sub(r"[^A-Za-z0-9._]+", "-", one).strip("-.") or "empty" for one in names]
        return Trial(self, seed, "-".join([*parts, f"seed{seed}"]).lstrip("_-"))


@dataclass(frozen=True)
class Trial:
    """A run: a point, a seed, and the name of the run folder."""

    point: Point
    seed: int
    name: str


@dataclass(frozen=True)
class Sweep:
    """A sweep file, or its small form.

    Attributes:
        overrides: for all trials.
        points: of the grid; empty for a study.
        folder: of the results.
    """

    file: Path
    section: SweepSection
    overrides: tuple[str, ...]
    points: tuple[Point, ...]
    folder: Path

    @property
    def config(self) -> Path:
        """The job."""
        return self.file.parent / self.section.config

    @property
    def study(self) -> StudySection | None:
        """The study; None for a grid."""
        return self.section.study

    @property
    def runs(self) -> Path:
        """Folder of the run folders."""
        return self.folder / TRIALS

    def trials(self, points: Sequence[Point]) -> list[Trial]:
        """The trials of points, with all seeds of a point before the next."""
        return [point.trial(seed) for point in points for seed in self.section.seeds]

    @property
    def count(self) -> int:
        """Number of trials in a run of the sweep."""
        seeds = len(self.section.seeds)
        if self.study is not None:
            return self.study.trials * seeds
        rows = {self.section.row(point) for point in self.points}
        return len(self.points) + (seeds - 1) * len(rows)

    def overrides_of(self, trial: Trial) -> list[str]:
        """All changes to the job's file."""
        return [
            *self.overrides,
            *trial.point.overrides,
            override("run.seed", trial.seed),
            override("run.dir", str(self.runs)),
            override("run.name", trial.name),
            "checkpoint.resume=auto",
        ]

    def config_of(self, trial: Trial) -> Config:
        """The configuration of a trial; SettingsError if it cannot be used."""
        try:
            return load_config(self.config, self.overrides_of(trial))
        except SettingsError as mistake:
            raise SettingsError(f"{self.file}: {trial.point.title}: {mistake}") from None


def load_sweep(
    path: Path, overrides: Sequence[str] = (), small: bool = False, folder: Path | None = None
) -> Sweep:
    """Read and check a sweep file.

    Args:
        overrides: `section.key=value`, for all trials.
        small: whether to take the small form.
        folder: of the results; by default `runs/NAME` or `runs/NAME-small`.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    values = read_yaml(path, "configs/sweeps holds the shipped sweeps")
    try:
        section = SweepSection.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, SweepSection))) from None
    _check_points(path, section)
    if small:
        if not section.small.model_fields_set:
            raise SettingsError(f"{path}: no section `small`; leave --small out")
        section = section.as_small()
    sweep = Sweep(
        path,
        section,
        (*section.overrides, *overrides),
        tuple(_points(section)) if section.grid else (),
        folder or Path("runs") / (path.stem + "-small" * small),
    )
    _check_keys(sweep)
    if section.study is not None:
        _check_study(sweep, section.study)
    names = set()
    for trial in (point.trial(section.seeds[0]) for point in sweep.points):
        if trial.name in names:
            raise SettingsError(
                f"{path}: 2 points share the run folder {trial.name}; write other names"
            )
        names.add(trial.name)
        sweep.config_of(trial)
    return sweep


def _points(section: SweepSection) -> list[Point]:
    """The points of a grid without those left out, the last axis fastest."""
    grid = section.grid
    points = [
        Point(
            {axis: text for axis, (text, _) in zip(grid, chosen, strict=True)},
            tuple(text for _, overrides in chosen for text in overrides),
        )
        for chosen in itertools.product(*(choices(axis, grid[axis]).items() for axis in grid))
    ]
    return [point for point in points if point.title not in section.exclude]


def choices(axis: str, values: Any) -> dict[str, list[str]]:
    """The overrides of an axis by label, in order."""
    if isinstance(values, dict):
        return values
    return {label(value): [override(axis, value)] for value in values}


def _check_points(path: Path, section: SweepSection) -> None:
    """Check that the named points are in the grid."""
    whole = section.model_copy(update={"exclude": []})
    titles = [point.title for form in (whole, whole.as_small()) for point in _points(form)]
    rows = [section.row(point) for point in _points(section)]
    if section.grid and not (rows and _points(section.as_small())):
        raise SettingsError(f"{path}: exclude: no point of the grid is left; name fewer")
    named = [("exclude", section.exclude, titles)]
    named += [(f"published.{name}.auc", of.auc, rows) for name, of in section.published.items()]
    for key, points, known in named:
        for title in points:
            if title not in known:
                raise SettingsError(
                    f"{path}: {key}: {title!r} is not a point of the grid; write labels such as "
                    f"{known[0]!r}"
                )


def _check_keys(sweep: Sweep) -> None:
    """Check that no key is set twice or belongs to the sweep."""
    path, section = sweep.file, sweep.section
    varied = {
        axis: {text.partition("=")[0] for set_by in choices(axis, of).values() for text in set_by}
        for axis, of in section.grid.items()
    } or {key: {key} for key in section.study.parameters}
    fixed = [text.partition("=")[0] for text in sweep.overrides]
    keys = sorted(set().union(*varied.values()))
    for key in [*fixed, *keys]:
        if key in fixed and key in keys:
            raise SettingsError(
                f"{path}: the sweep varies {key}; leave the override {key}=... out, or change the "
                "values in the file"
            )
        if key in _OWN_KEYS:
            raise SettingsError(f"{path}: {key}: the sweep sets it; {_OWN_KEYS[key]}")
    for (one, of_one), (other, of_other) in itertools.combinations(varied.items(), 2):
        # Setting a section replaces all its keys.
        pairs = [sorted(pair, key=len) for pair in itertools.product(of_one, of_other)]
        both = sorted(inner for outer, inner in pairs if f"{inner}.".startswith(f"{outer}."))
        if both:
            raise SettingsError(
                f"{path}: {one!r} and {other!r} both set {both[0]}; write them as one axis of "
                "named points"
            )


def _check_study(sweep: Sweep, study: StudySection) -> None:
    """Check the values that a study may try, and that its metric is computed."""
    for key, what in study.parameters.items():
        for value in what.tried():
            mistakes = []
            # A value may need certain others: it is wrong only if it fails with all of these.
            for at in (0, -1):
                chosen = {k: its.tried()[at] for k, its in study.parameters.items()} | {key: value}
                overrides = tuple(itertools.starmap(override, chosen.items()))
                point = Point({key: f"{key}={value}"}, overrides, "study")
                try:
                    evaluate = sweep.config_of(point.trial(sweep.section.seeds[0])).evaluate
                except SettingsError as mistake:
                    mistakes.append(mistake)
            if len(mistakes) == 2:
                raise mistakes[0]
    metric, instead = study.metric, f"{study.metric} into evaluate.metrics"
    computed = ["auc", "logloss", *evaluate.metrics]
    if metric == "gauc":
        instead = "evaluate.group_by=FIELD to the overrides"
        computed += ["gauc"] * bool(evaluate.group_by)
    if metric not in computed:
        raise SettingsError(
            f"{sweep.file}: study.metric is {metric!r}, but {shown_as(metric)} is not computed; "
            f"write {instead}"
        )
