"""A sweep: its file, what the command line changed, its trials, and what is wrong with them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from stampede.engine.config import Config
from stampede.engine.config.load import load_config
from stampede.engine.run_folder import TRIALS
from stampede.engine.sweeps.points import Point, Trial, grid_points, keys_by_axis, override
from stampede.engine.sweeps.sections import (
    PublishedSection,
    StudySection,
    SweepSection,
    shown_as,
)
from stampede.settings import SettingsError, read_yaml, sentences

# What a sweep sets itself, so that its trials are found again.
_OWN_KEYS = ("run.name", "run.dir", "run.seed", "run.overwrite", "checkpoint.resume")


@dataclass(frozen=True)
class Sweep:
    """What is run.

    Attributes:
        file: the sweep file.
        section: its content.
        config: the job.
        overrides: for all trials.
        points: of the grid; none of a study.
        study: None for a grid.
        seeds: of every point.
        small: whether it is the file's small form.
        folder: for the results.
        published: figures of others; None where there are none for this form.
    """

    file: Path
    section: SweepSection
    config: Path
    overrides: tuple[str, ...]
    points: tuple[Point, ...]
    study: StudySection | None
    seeds: tuple[int, ...]
    small: bool
    folder: Path
    published: PublishedSection | None

    @property
    def runs(self) -> Path:
        """Folder of the run folders."""
        return self.folder / TRIALS

    def trials(self, points: Sequence[Point]) -> list[Trial]:
        """The runs of points, all seeds of a point together."""
        return [point.trial(seed) for point in points for seed in self.seeds]

    def overrides_of(self, trial: Trial) -> list[str]:
        """Everything that differs from the job's file."""
        return [
            *self.overrides,
            *trial.point.overrides,
            override("run.seed", trial.seed),
            override("run.dir", str(self.runs)),
            override("run.name", trial.name),
            "checkpoint.resume=auto",
        ]

    def config_of(self, trial: Trial) -> Config:
        """The configuration of a trial.

        Raises:
            SettingsError: it cannot be used.
        """
        try:
            return load_config(self.config, self.overrides_of(trial))
        except SettingsError as mistake:
            raise SettingsError(f"{self.file}: {trial.point.title}: {mistake}") from None


def load_sweep(
    path: Path, overrides: Sequence[str] = (), small: bool = False, folder: Path | None = None
) -> Sweep:
    """Read and check a sweep file.

    Args:
        path: YAML file.
        overrides: `section.key=value` of the configuration, for all trials.
        small: whether its small form is run.
        folder: for the results; `runs/NAME` or `runs/NAME-small` where none is given.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    values = read_yaml(path, "configs/sweeps holds the shipped sweeps")
    try:
        section = SweepSection.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, SweepSection))) from None
    grid, study, seeds = section.grid, section.study, section.seeds
    given = section.overrides
    if small:
        if not section.small.model_fields_set:
            raise SettingsError(f"{path}: has no section `small`; leave --small out")
        grid = {axis: section.small.grid.get(axis, values) for axis, values in grid.items()}
        seeds = section.small.seeds or seeds
        given = [*given, *section.small.overrides]
        if study is not None and section.small.trials is not None:
            study = study.model_copy(update={"trials": section.small.trials})
    points = tuple(grid_points(grid)) if grid else ()
    varied = keys_by_axis(grid) if study is None else {key: {key} for key in study.parameters}
    _check_keys(path, [*given, *overrides], varied)
    sweep = Sweep(
        file=path,
        section=section,
        config=path.parent / section.config,
        overrides=(*given, *overrides),
        points=points,
        study=study,
        seeds=tuple(seeds),
        small=small,
        folder=folder or Path("runs") / (path.stem + ("-small" if small else "")),
        published=None if small and not section.small.published else section.published,
    )
    _check_published(path, section)
    _check_trials(sweep)
    return sweep


def _check_keys(path: Path, overrides: Sequence[str], varied: Mapping[str, set[str]]) -> None:
    """Check that no key is set twice, or is the sweep's own.

    Args:
        path: the sweep file.
        overrides: for all trials.
        varied: by axis or parameter, the keys that it sets.

    Raises:
        SettingsError: one is.
    """
    keys = set().union(*varied.values())
    for text in overrides:
        key = text.partition("=")[0]
        if key in keys:
            raise SettingsError(
                f"{path}: {text}: the sweep varies {key}; leave the override out, or change the "
                "values in the file"
            )
    for key in [*(text.partition("=")[0] for text in overrides), *sorted(keys)]:
        if key in _OWN_KEYS:
            instead = {"run.seed": "seeds in the file", "run.dir": "--out FOLDER"}
            raise SettingsError(
                f"{path}: {key}: a sweep sets it itself; write "
                f"{instead.get(key, 'nothing: leave it out')}"
            )
    for (one, of_one), (other, of_other) in itertools.combinations(varied.items(), 2):
        for key, another in itertools.product(sorted(of_one), sorted(of_other)):
            # A section that is set replaces what is set in it.
            if f"{key}.".startswith(f"{another}.") or f"{another}.".startswith(f"{key}."):
                inside = max(key, another, key=len)
                raise SettingsError(
                    f"{path}: {one!r} and {other!r} both set {inside}, so that one would undo the "
                    "other; write them as one axis of named points"
                )


def _check_published(path: Path, section: SweepSection) -> None:
    """Check that published figures are of points.

    Raises:
        SettingsError: one is not.
    """
    titles = [point.title for point in grid_points(section.grid)]
    for title in section.published.auc if section.published is not None else ():
        if title not in titles:
            raise SettingsError(
                f"{path}: published.auc: {title!r} is no point of the grid; write labels such as "
                f"{titles[0]!r}"
            )


def _check_trials(sweep: Sweep) -> None:
    """Check the configurations of all points, or those that a study may choose.

    Raises:
        SettingsError: one cannot be used.
    """
    trials = sweep.trials(sweep.points)
    for name, times in Counter(trial.name for trial in trials).items():
        if times > 1:
            raise SettingsError(
                f"{sweep.file}: {times} points would have the run folder {name}; write other names"
            )
    for trial in trials:
        if trial.seed == sweep.seeds[0]:
            sweep.config_of(trial)
    if sweep.study is not None:
        _check_study(sweep, sweep.study)


def _check_study(sweep: Sweep, study: StudySection) -> None:
    for key, what in study.parameters.items():
        for value in what.tried():
            # Values may need others beside them: it is wrong if it goes with none of these.
            mistake = None
            for others in _others(study, key):
                point = Point({key: f"{key}={value}"}, (*others, override(key, value)), "study")
                try:
                    config = sweep.config_of(point.trial(sweep.seeds[0]))
                    break
                except SettingsError as failure:
                    mistake = mistake or failure
            else:
                raise mistake
    _check_sought(sweep, study, config)


def _others(study: StudySection, key: str) -> Iterator[list[str]]:
    yield []
    for place in (0, -1):
        yield [
            override(other, what.tried()[place])
            for other, what in study.parameters.items()
            if other != key
        ]


def _check_sought(sweep: Sweep, study: StudySection, config: Config) -> None:
    evaluate, metric = config.evaluate, study.metric
    if metric == "gauc":
        computed, instead = bool(evaluate.group_by), "evaluate.group_by=FIELD to the overrides"
    else:
        computed = metric in ("auc", "logloss", *evaluate.metrics)
        instead = f"{metric} into evaluate.metrics"
    if not computed:
        raise SettingsError(
            f"{sweep.file}: study.metric is {metric!r}, but {shown_as(metric)} is not computed; "
            f"write {instead}"
        )
