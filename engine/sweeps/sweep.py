"""A sweep: its file, what the command line changed, and the configurations of its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from stampede.engine.config import Config, load_config
from stampede.engine.run_folder import TRIALS
from stampede.engine.sweeps.checks import check_keys, check_published, check_trials
from stampede.engine.sweeps.points import Point, Trial, grid_points, keys_by_axis, override
from stampede.engine.sweeps.sections import PublishedSection, StudySection, SweepSection
from stampede.settings import SettingsError, read_yaml, sentences


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
    check_keys(path, [*given, *overrides], varied)
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
    check_published(path, section)
    check_trials(sweep)
    return sweep
