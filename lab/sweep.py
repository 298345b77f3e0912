"""Grids of trainings: `stampede sweep SWEEP.yaml`, see `Sweep`.

A trial is a point (overrides of the job) with a seed, and has a run folder of its own. The same
command continues a sweep that was stopped; a trial that fails does not stop it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator
from tqdm import tqdm

from stampede import (
    DataError,
    Run,
    RunFolderError,
    TrainingStoppedError,
    configuration,
    exit_status,
    open_run,
    train,
)
from stampede.files import read_json, refuse_links, to_json, write_file
from stampede.lab.sweep_results import draw, to_csv, to_markdown
from stampede.settings import (
    Section,
    Seed,
    SettingsError,
    keys_help,
    parse_yaml,
    read_yaml,
    reading,
    sentences,
)
from stampede.stores import continued

# Keys that a sweep sets, so that it finds its trials again.
_OWN_KEYS = ("run.name", "run.dir", "run.seed", "run.overwrite", "checkpoint.resume")
_RECORD, _TRIALS = "trials.json", "trials"

# By axis: a list of values of that key, or named lists of overrides.
Grid = dict[str, list[Any] | dict[str, list[str]]]


class Small(Section):
    """Changes for `--small`, a form that a laptop can run."""

    overrides: list[str] = Field([], description="further section.key=value")
    grid: Grid = Field({}, description="replaces axes of the same name")
    seeds: list[Seed] = Field([], description="replaces the seeds of the sweep")


class Sweep(Section):
    """A sweep file."""

    config: str = Field(..., description="the job, relative to the sweep file")
    overrides: list[str] = Field([], description="section.key=value for all trials")
    grid: Grid = Field(
        ..., min_length=1, description="axes; every combination of their values is a point"
    )
    exclude: list[str] = Field([], description="points to leave out, by labels: 'linear / 1K'")
    tune: str = Field(
        "",
        description="axis whose best value, by the AUC of the part that chooses the epoch with the "
        "first seed, each combination of the others takes; other seeds run with it alone",
    )
    seeds: list[Seed] = Field([1], min_length=1, description="run.seed of the trials of a point")
    metrics: list[str] = Field(
        ["auc", "logloss"], min_length=1, description="columns: metrics and keys of summary.json"
    )
    x: str = Field("", description="axis along which pictures are drawn; '': the last one")
    published: dict[str, dict[str, float]] = Field(
        {}, description="AUCs of others, by name of the column and labels of the point"
    )
    small: Small = Small()

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"found {seeds}; write each seed once")
        return seeds

    @model_validator(mode="after")
    def _check(self) -> Sweep:
        for axis, values in {**self.grid, **self.small.grid}.items():
            if not values or (isinstance(values, list) and "." not in axis):
                raise ValueError(
                    f"{axis}: found {values!r}; write a key, such as train.batch_size, with a list "
                    "of values, or names, each with a list of section.key=value"
                )
        for key, axes in (("tune", [self.tune]), ("x", [self.x]), ("small.grid", self.small.grid)):
            for axis in axes:
                if axis and axis not in self.grid:
                    raise ValueError(f"{key}: found {axis!r}; write one of {', '.join(self.grid)}")
        titles = dict.fromkeys(
            point.title for grid in ({}, self.small.grid) for point in self.points(grid)
        )
        if wrong := [title for title in self.exclude if title not in titles]:
            raise ValueError(f"exclude: found {wrong[0]!r}; write one of {', '.join(titles)}")
        return self

    def as_small(self) -> Sweep:
        """The small form."""
        small = self.small
        changes = {
            "overrides": [*self.overrides, *small.overrides],
            "grid": self.grid | small.grid,
            "seeds": small.seeds or self.seeds,
        }
        return self.model_copy(update=changes)

    def points(self, replaced: Grid | None = None) -> list[Point]:
        """The points of the grid, the last axis fastest, perhaps with some axes replaced."""
        grid = self.grid | (replaced or {})
        axes = [
            values.items() if isinstance(values, dict) else [(_label(v), [v]) for v in values]
            for values in grid.values()
        ]
        found = []
        for chosen in itertools.product(*axes):
            labels, overrides = {}, {}
            for (axis, values), (label, what) in zip(grid.items(), chosen, strict=True):
                labels[axis] = label
                overrides |= _parsed(what) if isinstance(values, dict) else {axis: what[0]}
            found.append(Point(labels, overrides))
        return found

    def row(self, point: Point) -> str:
        """The labels of a point's row in the tables: its title without the axis that is tuned."""
        return " / ".join(text for axis, text in point.labels.items() if axis != self.tune)


@dataclass(frozen=True)
class Point:
    """Settings to try: labels by axis, and values by `section.key`."""

    labels: dict[str, str]
    overrides: dict[str, Any]

    @property
    def title(self) -> str:
        """The point's labels, as in `deepfm / 1K`."""
        return " / ".join(self.labels.values())


@dataclass
class Trial:
    """How a point with a seed ended: its run, or the message with which it failed."""

    point: Point
    seed: int
    run: Run | None = None
    message: str = ""
    rejected: bool = False

    def metric(self, name: str) -> float | None:
        """A metric of the part that chose the epoch."""
        if self.run is None:
            return None
        return self.run.metrics[self.run.summary["selected_on"]].get(name)


def _label(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(overrides: Sequence[str]) -> dict[str, Any]:
    """Values by key; a SettingsError for what is not `section.key=value`."""
    found = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or key in _OWN_KEYS:
            what = "a sweep sets it itself" if equals else "write section.key=value"
            raise SettingsError(f"override {text!r}: {what}")
        found[key] = parse_yaml(value, f"override {text!r}")
    return found


class Runner:
    """Runs the trials of a sweep in this process, and records them in `trials.json`.

    Args:
        file: the sweep file.
        folder: of the results.
        overrides: for all trials.
        retry_failed: whether to run trials again that failed.
        recorded: called after each trial.
    """

    def __init__(
        self,
        file: Path,
        sweep: Sweep,
        folder: Path,
        overrides: Sequence[str],
        retry_failed: bool,
        recorded: Callable[[], object] = lambda: None,
    ) -> None:
        self._recorded = recorded
        self._config = file.parent / sweep.config
        self.sweep, self.folder = sweep, folder
        self._overrides = _parsed([*sweep.overrides, *overrides])
        self._record_file = folder / _RECORD
        self._record: dict[str, dict[str, str]] = {}
        if self._record_file.exists():
            remedy = "write another --out"
            with reading(self._record_file, RunFolderError, remedy):
                self._record = read_json(self._record_file)
                if retry_failed:
                    kept = self._record.items()
                    self._record = {name: one for name, one in kept if not one["message"]}

    def checked(self, point: Point, seed: int) -> tuple[str, dict[str, Any], str]:
        """A trial's name, the values to train with, and a digest of them.

        Raises:
            SettingsError: they cannot be used, or another trial of that name has other values.
        """
        parts = [re.sub(r"[^A-Za-z0-9._]+", "-", one).strip("-.") for one in point.labels.values()]
        name = "-".join([*(part or "empty" for part in parts), f"seed{seed}"]).lstrip("_-")
        values = {
            **self._overrides, **point.overrides, "run.seed": seed, "run.name": name,
            "run.dir": str(self.folder / _TRIALS), "checkpoint.resume": "auto",
        }  # fmt: skip
        try:
            config = configuration(self._config, **values)
        except SettingsError as mistake:
            raise SettingsError(f"{point.title}: {mistake}") from None
        told = config.model_dump_json(exclude={"run"}).encode()
        if config.model.import_file:
            told += Path(config.model.import_file).read_bytes()
        digest = hashlib.sha256(told).hexdigest()[:16]
        known = self._record.get(name)
        if known and known["config"] != digest:
            raise SettingsError(
                f"{self.folder}: {name} was trained with another configuration; write another --out"
            )
        return name, values, digest

    def run(self, point: Point, seed: int) -> Trial:
        """Run a trial, or open it if it has ended before."""
        name, values, digest = self.checked(point, seed)
        folder = self.folder / _TRIALS / name
        known = self._record.get(name)
        if known is None:
            message = ""
            tqdm.write(f"{name} ...")
            (self.folder / _TRIALS).mkdir(exist_ok=True)
            try:
                refuse_links(self.folder, f"{_TRIALS}/{name}.log")
                with folder.with_suffix(".log").open("a") as log, redirect_stdout(log):
                    run = train(self._config, **values)
                if run.metrics["test"]["auc"] is None:
                    message = "the test part has one class only"
                # Its scores and curves are kept.
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            except (SettingsError, DataError, RunFolderError, TrainingStoppedError) as failure:
                message = " ".join(str(failure).split())
            except (RuntimeError, MemoryError, OSError) as failure:
                message = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            known = self._record[name] = {"config": digest, "message": message}
            write_file(self._record_file, to_json(self._record, indent=1) + "\n")
            self._recorded()
        if known["message"]:
            return Trial(point, seed, message=known["message"])
        return Trial(point, seed, open_run(folder))


def run_grid(runner: Runner, bar: Callable[[], Any]) -> list[Trial]:
    """Run every point of a grid with every seed, row after row."""
    sweep = runner.sweep
    points = [point for point in sweep.points() if point.title not in sweep.exclude]
    for point in points:
        runner.checked(point, sweep.seeds[0])
    first, *others = sweep.seeds
    rows: dict[str, list[Point]] = {}
    for point in points:
        rows.setdefault(sweep.row(point), []).append(point)
    trials = []
    for of_row in rows.values():
        tried = []
        for point in of_row:
            tried.append(runner.run(point, first))
            bar()
        best = max(tried, key=lambda one: one.metric("auc") or 0.0)
        for trial in tried:
            trial.rejected = trial is not best
        trials += tried
        for seed in others:
            trials.append(runner.run(best.point, seed))
            bar()
    return trials


def load_sweep(path: Path, small: bool = False) -> Sweep:
    """Read and check a sweep file; a SettingsError says what is wrong, key by key."""
    values = read_yaml(path, "configs/sweeps holds the shipped sweeps")
    try:
        sweep = Sweep.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, Sweep))) from None
    if small and not sweep.small.model_fields_set:
        raise SettingsError(f"{path}: no section `small`; leave --small out")
    return sweep.as_small() if small else sweep


def run_sweep(
    file: Path,
    overrides: Sequence[str],
    folder: Path,
    small: bool,
    retry_failed: bool,
    recorded: Callable[[], object] = lambda: None,
) -> list[Path]:
    """Run what has not run yet, then write tables and pictures; returns the files.

    Args:
        recorded: called after each trial.

    Raises:
        TrainingStoppedError: every trial failed.
    """
    sweep = load_sweep(file, small)
    folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(file, sweep, folder, overrides, retry_failed, recorded)
    points = [point for point in sweep.points() if point.title not in sweep.exclude]
    rows = {sweep.row(point) for point in points}
    count = len(points) + len(rows) * (len(sweep.seeds) - 1)
    with tqdm(total=count, desc="trials", unit=" trials", mininterval=5, disable=None) as bar:
        trials = run_grid(runner, bar.update)
    for name, text in (
        ("results.csv", to_csv(sweep, trials)),
        ("results.md", to_markdown(folder.name, sweep, trials)),
    ):
        write_file(folder / name, text)
    if all(trial.message for trial in trials):
        raise TrainingStoppedError(
            f"all trials failed, the first with: {trials[0].message}; --retry-failed runs them "
            "again"
        )
    return [folder / "results.csv", folder / "results.md", *draw(sweep, trials, folder)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake, 1 if all trials failed."""
    given = _parser().parse_intermixed_args(arguments)
    out = given.out or f"runs/{given.sweep.stem}" + "-small" * given.small

    def sweep() -> None:
        with continued(out) as (folder, publish):
            files = run_sweep(
                given.sweep, given.overrides, folder, given.small, given.retry_failed, publish
            )
        print((folder / "results.md").read_text(encoding="utf-8"))
        print(f"results: {', '.join(f'{out}/{file.name}' for file in files)}")
        print(f"curves of the trials: stampede report {out}")

    return exit_status(sweep)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede sweep",
        description="Run a grid of trainings, then write a table (CSV and\n"
        "Markdown) and pictures. Every trial has its own run folder. The same command continues\n"
        "a sweep that was stopped. A failed trial does not stop a sweep; the table lists it.",
        epilog="\n".join(["keys of a sweep file:", *keys_help(Sweep, defaults=False)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP.yaml", help="what to run; shipped: configs/sweeps/")
    changes = "changes the configuration of all trials, such as data.path=train.txt"
    add("overrides", nargs="*", default=[], metavar="section.key=value", help=changes)
    add("--small", action="store_true", help="run the file's small form")
    out = "folder or URL of the results; default runs/NAME, or runs/NAME-small"
    add("--out", metavar="FOLDER", help=out)
    add("--retry-failed", action="store_true", help="run failed trials again")
    return parser
