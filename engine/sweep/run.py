"""Runs the trials of a sweep that are not done, then writes tables and pictures."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from stampede.engine.config import Config
from stampede.engine.config.load import load_config_of_run
from stampede.engine.config.presets import flat_keys
from stampede.engine.console import progress_bar, readable_metric
from stampede.engine.errors import INTERRUPTED, RunFolderError, TrainingStoppedError
from stampede.engine.inference.kept import check_executed
from stampede.engine.metrics import selected_metrics
from stampede.engine.processes import start_ranks
from stampede.engine.reading import check_files
from stampede.engine.recipe import open_keys
from stampede.engine.run_folder import RunFolder
from stampede.engine.sweep.results import Outcome, best_of, draw, results, to_csv, to_markdown
from stampede.engine.sweep.spec import Point, Sweep, Trial, label, override, shown_as
from stampede.files import open_inside, read_json, to_json, write_file
from stampede.settings import SettingsError, reading

# Runs a trial with these arguments, writes its output to the file, returns its exit status.
Start = Callable[[Sequence[str], Path], int]

# These keys do not change what a run computes.
_NOT_COMPARED = ("run.dir", "run.name", "checkpoint.resume")


def run_sweep(sweep: Sweep, start: Start, retry_failed: bool = False) -> list[Path]:
    """Run all trials that are not done, then write tables and pictures.

    Returns:
        The written files.

    Raises:
        SettingsError, DataError, RunFolderError: the user must fix something.
        TrainingStoppedError: every trial failed.
        KeyboardInterrupt: a trial was interrupted.
    """
    folder = sweep.folder
    # The points of a study are not known yet.
    for point in sweep.points or [Point({}, (), name="study")]:
        check_files(sweep.config_of(point.trial(sweep.section.seeds[0])))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_inside(folder, ".lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(
                    f"{folder} is in use by another sweep; end it first, or write another --out"
                ) from None
            outcomes = _run_all(sweep, _Runner(sweep, start, retry_failed))
            found = results(sweep, outcomes)
            tables = {"results.csv": to_csv, "results.md": to_markdown}
            for name, table in tables.items():
                write_file(folder / name, table(sweep, found))
            pictures = draw(sweep, found, folder)
    except OSError as failure:
        raise RunFolderError(
            f"{failure.filename or folder}: cannot be written ({failure.strerror or failure}); "
            "make room and rerun the command, or write another --out"
        ) from None
    if all(outcome.message for outcome in outcomes):
        again = "" if sweep.study else "; --retry-failed runs them again"
        raise TrainingStoppedError(
            f"all {len(outcomes)} trials failed, the first with: {outcomes[0].message}; see "
            f"{sweep.runs}/*.log{again}"
        )
    return [*(folder / name for name in tables), *pictures]


def _run_all(sweep: Sweep, runner: _Runner) -> list[Outcome]:
    for trial in sweep.trials(sweep.points):
        # Find folders with another configuration now, not after hours of training.
        runner.known(trial)
    with progress_bar(sweep.count, 0, True, "sweep", "trials") as bar:

        def run(trial: Trial) -> Outcome:
            outcome = runner.known(trial)
            if outcome is None:
                tqdm.write(f"{trial.name} ...")
                outcome = runner.run(trial)
                tqdm.write(f"{trial.name}: {_said(outcome)}")
            bar.update()
            return outcome

        if sweep.study is not None:
            return _run_study(sweep, run)
        if sweep.section.tune:
            return _run_tuned(sweep, run)
        return [run(trial) for trial in sweep.trials(sweep.points)]


def _run_tuned(sweep: Sweep, run: Callable[[Trial], Outcome]) -> list[Outcome]:
    """Run all points with the first seed, then the best of each row with the others."""
    first, *others = sweep.section.seeds
    rows: dict[str, list[Outcome]] = {}
    for point in sweep.points:
        rows.setdefault(sweep.section.row(point), []).append(run(point.trial(first)))
    for tried in rows.values():
        point = best_of(tried).trial.point
        tried += [run(point.trial(seed)) for seed in others]
    return [outcome for of_row in rows.values() for outcome in of_row]


def _said(outcome: Outcome) -> str:
    if outcome.message:
        return f"failed: {outcome.message}"
    aucs = ", ".join(
        f"{part} AUC {readable_metric(metrics['auc'])}"
        for part, metrics in selected_metrics(outcome.summary).items()
    )
    epoch = f"epoch {outcome.summary['best_epoch']}, chosen on the {outcome.selected_on} part"
    return f"{aucs} in {epoch}; trained {outcome.summary['train_seconds']:.0f} s"


class _Runner:
    """Runs trials in their own processes, and records failures in `failures.json`."""

    def __init__(self, sweep: Sweep, start: Start, retry_failed: bool) -> None:
        self._sweep, self._start = sweep, start
        self._file = sweep.folder / "failures.json"
        # Message and digest of the configuration, by trial.
        self._failures: dict[str, dict[str, str]] = {}
        if retry_failed:
            self._file.unlink(missing_ok=True)
        if self._file.exists():
            remedy = "delete it to run the trials that failed again"
            with reading(self._file, RunFolderError, remedy):
                self._failures = read_json(self._file)
                for failure in self._failures.values():
                    itemgetter("message", "config")(failure)

    def known(self, trial: Trial) -> Outcome | None:
        """How a trial ended; None if it must still run.

        Raises:
            RunFolderError: its run folder has another configuration or network, or is damaged.
        """
        try:
            config = self._sweep.config_of(trial)
        except SettingsError as mistake:
            # A study may choose values that contradict each other.
            return Outcome(trial, message=" ".join(str(mistake).split()))
        failure = self._failures.get(trial.name)
        if failure and failure["config"] == _digest(config):
            return Outcome(trial, message=failure["message"])
        folder = RunFolder(self._sweep.runs / trial.name)
        if not folder.config_file.exists():
            return None
        if differs := _difference(config, folder):
            raise RunFolderError(
                f"{folder.path} was made with another configuration ({differs}); write another "
                "--out, or delete the folder to train again"
            )
        check_executed(config, folder.path)
        if not folder.summary.exists():
            return None
        if not self._sweep.section.keep_checkpoints:
            shutil.rmtree(folder.checkpoints, ignore_errors=True)
        with reading(folder.summary, RunFolderError, f"delete {folder.path} to train again"):
            summary = read_json(folder.summary)
            itemgetter("selected_on", "best_epoch", "rows", "train_seconds")(summary)
            needed, metrics = [("test", "auc")], selected_metrics(summary)
            if self._sweep.study is not None:
                needed.append((summary["selected_on"], self._sweep.study.metric))
            undefined = [(p, name) for p, name in needed if metrics[p].get(name) is None]
        if not undefined:
            return Outcome(trial, summary)
        part, name = undefined[0]
        where = "a group" if name == "gauc" else "the part"
        message = (
            f"the {shown_as(name)} of the {part} part is undefined; {where} must have both clicks "
            "and non-clicks"
        )
        return Outcome(trial, message=message)

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end; KeyboardInterrupt if it was interrupted."""
        log = self._sweep.runs / f"{trial.name}.log"
        self._sweep.runs.mkdir(parents=True, exist_ok=True)
        begins = log.stat().st_size if log.exists() else 0
        status = self._start([str(self._sweep.config), *self._sweep.overrides_of(trial)], log)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        outcome = None if status else self.known(trial)
        if outcome is None:
            with log.open("rb") as output:
                output.seek(begins)
                message = why(output.read(), status)
            if self._sweep.study is None:
                # A sweep resumes its trials.
                message = message.replace("checkpoint.resume=auto", "--retry-failed")
            config = self._sweep.config_of(trial)
            self._failures[trial.name] = {"message": message, "config": _digest(config)}
            write_file(self._file, to_json(self._failures, indent=1) + "\n")
            outcome = Outcome(trial, message=message)
        return outcome


def _compared(config: Config) -> dict[str, Any]:
    """The settings that change what a run computes, by `section.key`."""
    values = flat_keys(config.model_dump(mode="json"))
    return {key: value for key, value in values.items() if key not in _NOT_COMPARED}


def _digest(config: Config) -> str:
    text = json.dumps(_compared(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _difference(config: Config, folder: RunFolder) -> str:
    """The first key that differs between a run folder and a configuration; empty if none does."""
    try:
        there, here = _compared(load_config_of_run(folder.config_file)), _compared(config)
    except SettingsError as mistake:
        return f"its configuration cannot be used: {mistake}"
    for key in dict.fromkeys([*here, *there]):
        values = [json.dumps(of[key]) if key in of else "absent" for of in (there, here)]
        if values[0] != values[1] and key not in open_keys(config):
            return f"{key} is {values[0]} there and {values[1]} here"
    return ""


def why(said: bytes, status: int) -> str:
    """The error sentence in the output of a failed run's processes, or else its last line."""
    # A progress bar ends its lines with carriage returns.
    text = "\n".join(said.decode(errors="replace").splitlines()).strip()
    # The first error: other processes' errors follow from it. Its list is indented.
    found = re.search(r"^error(?: on rank \d+)?: (.*(?:\n +.*)*)", text, re.MULTILINE)
    if found:
        return " ".join(found[1].split())
    killed = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{killed}: {text.splitlines()[-1].strip()}" if text else killed


def start_trial(processes: int, arguments: Sequence[str], log: Path) -> int:
    """Train with that many processes on this machine."""
    command = [sys.executable, "-m", "stampede.engine.sweep.trial", *arguments]
    return start_ranks(processes, command, log)


def _run_study(sweep: Sweep, run: Callable[[Trial], Outcome]) -> list[Outcome]:
    """Run the trials of a study that are not done; returns the outcomes of all, in order.

    A point's value is the mean over its seeds. Each point has a new sampler, seeded with the
    study's seed plus the point's number, and Optuna is told the earlier points anew, so that a
    killed study continues as if nothing had happened.
    """
    import optuna
    from optuna.samplers import RandomSampler, TPESampler

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings = sweep.study
    # What a study may not change; only its number of trials may.
    asked = {
        **settings.model_dump(mode="json", exclude={"trials"}),
        "seeds": list(sweep.section.seeds),
        "overrides": list(sweep.overrides),
    }
    record = sweep.folder / "study.json"
    chosen = _chosen(record, asked)
    study = optuna.create_study(direction=settings.direction)
    outcomes = []
    for number in range(settings.trials):
        sampler = {"tpe": TPESampler, "random": RandomSampler}[settings.sampler]
        study.sampler = sampler(seed=settings.seed + number)
        if number < len(chosen):
            study.enqueue_trial(chosen[number])
        trial = study.ask()
        for key, what in settings.parameters.items():
            values = what.tried()
            if what.choices:
                trial.suggest_categorical(key, values)
            else:
                whole = isinstance(values[0], int)
                suggest = trial.suggest_int if whole else trial.suggest_float
                suggest(key, *values, log=what.log)
        if number == len(chosen):
            # Before its trials run: another version of Optuna may choose other values.
            chosen.append(trial.params)
            write_file(record, to_json({"asked": asked, "chosen": chosen}, indent=1) + "\n")
        labels = {
            key: f"{value:.4g}" if isinstance(value, float) else label(value)
            for key, value in trial.params.items()
        }
        overrides = tuple(itertools.starmap(override, trial.params.items()))
        point = Point(labels, overrides, name=f"trial{number:04d}")
        of_point = [run(each) for each in sweep.trials([point])]
        if any(outcome.message for outcome in of_point):
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, statistics.mean(one.objective(settings.metric) for one in of_point))
        outcomes += of_point
    return outcomes


def _chosen(record: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of the points that the study has chosen so far."""
    if not record.exists():
        return []
    with reading(record, RunFolderError, "write another --out"):
        found = read_json(record)
        before, chosen = found["asked"], found["chosen"]
        changed = [key for key, value in asked.items() if before[key] != value]
    if changed:
        raise SettingsError(
            f"{record.parent} holds a study with another {', '.join(changed)}; write another --out"
        )
    return chosen
