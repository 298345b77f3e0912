"""What is wrong with a sweep, found before anything is trained."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stampede.engine.config import Config
from stampede.engine.sweeps.points import Point, grid_points, override
from stampede.engine.sweeps.sections import StudySection, SweepSection, shown_as
from stampede.settings import SettingsError

if TYPE_CHECKING:
    from stampede.engine.sweeps.sweep import Sweep

# What a sweep sets itself, so that its trials are found again.
_OWN_KEYS = ("run.name", "run.dir", "run.seed", "run.overwrite", "checkpoint.resume")


def check_keys(path: Path, overrides: Sequence[str], varied: Mapping[str, set[str]]) -> None:
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


def check_published(path: Path, section: SweepSection) -> None:
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


def check_trials(sweep: Sweep) -> None:
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
