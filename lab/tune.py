"""`stampede tune CONFIG.yaml --minutes 10`: searches what a configuration leaves open.

The first trial is the configuration as it is, the next ones change one key each. Then Optuna's TPE
proposes, by the validation part. Several processes train the trials. One ends after an epoch that
is worse than half of the others were there (Optuna's `MedianPruner`). Optuna's journal keeps the
trials, so the same command goes on with a search that was stopped, and spends its minutes anew.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tqdm import tqdm

from stampede import (
    DataError,
    InterruptedRunError,
    Run,
    RunFolderError,
    TrainingStoppedError,
    configuration,
    exit_status,
    open_run,
    selection_score,
    train,
)
from stampede.files import delete_folder, refuse_links, write_file
from stampede.lab.search_space import (
    COLUMNS,
    SMALL_LOG,
    Parameter,
    changes_of_one,
    choose,
    is_open,
    open_parameters,
    training_rows,
    value_of,
)
from stampede.settings import SettingsError, parse_yaml, read_yaml
from stampede.stores import continued

# More trials than fit into any time.
_MOST_TRIALS = 10_000
# Training rows of a trial. What it finds are factors of what the recipe chooses for so many rows,
# which suit all rows of the log (docs/experiments.md).
ROWS, _ROWS_OF_BATCH = 1_000_000, 100
# Trials that Optuna has before it compares, and that end before others are cut short.
_COMPARED, _UNCUT = 8, 4
_JOURNAL, _TRIALS = "search.log", "trials"
# Most trainings at a time, unless asked for; each has a copy of everything.
_MOST_WORKERS = 8


@dataclass(frozen=True)
class _Search:
    """What every process of a search knows.

    Attributes:
        config: the configuration's file.
        values: of all trials, by `section.key`.
        folder: of the search.
        metric: of the validation part.
        seed: of the search.
    """

    config: Path
    values: Mapping[str, Any]
    folder: Path
    metric: str
    seed: int

    def digest(self, given: Mapping[str, Any]) -> str:
        """Of all that the trials share."""
        checked = configuration(given)
        told = checked.model_dump_json(exclude={"run"}) + f"{self.metric} {self.seed}"
        told += f" {self.values.get('data.train_rows')}"
        if checked.model.import_file:
            told += Path(checked.model.import_file).read_text(encoding="utf-8")
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def study(self, worker: int = 0) -> optuna.Study:
        """Optuna's study of this search, with the trials of all processes."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=self.seed + worker, n_startup_trials=_COMPARED, constant_liar=True
            )
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(self.folder / _JOURNAL))),
            study_name="tune",
            direction="maximize",
            sampler=sampler,
            pruner=optuna.pruners.MedianPruner(_UNCUT, n_warmup_steps=2),
            load_if_exists=True,
        )

    def train(self, number: int, chosen: Mapping[str, Any], **further: Any) -> Run:
        """Train a trial; what it prints is in `trials/NUMBER.log`."""
        name, folder = f"{number:04d}", self.folder / _TRIALS
        refuse_links(self.folder, f"{_TRIALS}/{name}.log")
        own = {"run.name": name, "run.dir": str(folder)}
        own |= {"run.overwrite": False, "checkpoint.resume": "auto", "train.refit": False}
        with (folder / f"{name}.log").open("a") as log, redirect_stdout(log):
            return train(self.config, **{**self.values, **chosen, **own}, **further)

    def tell(self, study: optuna.Study, trial: optuna.Trial, run: Run) -> None:
        """Note how a trial ended; of its run, scores and curves are kept."""
        found = run.metrics["validation"]
        for name in ("auc", "logloss"):
            trial.set_user_attr(name, found[name])
        trial.set_user_attr("seconds", run.summary["train_seconds"])
        if trial.number > 0 and trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, selection_score(run.metrics["validation"], self.metric))
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)


@dataclass(frozen=True)
class _Limits:
    """When a search ends: at a time of `time.time()`, or with so many trials."""

    end: float
    trials: int

    def leave_time(self, study: optuna.Study) -> bool:
        begun = [
            one for one in study.get_trials(deepcopy=False) if one.state is not TrialState.WAITING
        ]
        return time.time() < self.end and len(begun) < self.trials


def tune(
    file: Path,
    overrides: Sequence[str],
    folder: Path,
    minutes: float,
    metric: str,
    seed: int = 1,
    trials: int = _MOST_TRIALS,
    workers: int | None = None,
    rows: int | None = ROWS,
) -> Path:
    """Search until the time is over; write the best configuration and return its path.

    A trial that trains when the time is over ends with its epoch, also the first one.

    Args:
        file: the configuration.
        overrides: `section.key=value` for all trials; what they or the file set is not searched.
        folder: of the trials, and of `tuned.yaml`.
        metric: of the validation part, as `evaluate.metric`: `auc`, `logloss`, or `both`, AUC minus
            logloss; unless that key is set, it also chooses the epoch of a trial.
        seed: `run.seed` of the trials, and of the search.
        trials: after which it ends too, those of earlier searches included.
        workers: trainings at a time; by default one for each CPU core, at most 8, and one on a GPU
            or if a trial has a million rows.
        rows: of the training part, the last ones, that a trial trains on; None: all.

    Raises:
        SettingsError: the configuration cannot be used, or has no validation part.
        TrainingStoppedError: the first trial failed, or no process of the search could go on.
    """
    end = time.time() + 60 * minutes
    given, values = _configured(file, overrides, metric, seed, rows)
    (folder / _TRIALS).mkdir(parents=True, exist_ok=True)
    search = _Search(file.resolve(), values, folder, metric, seed)
    with _alone(folder):
        first, parameters = _first_trial(search, given, end)
        limits = _Limits(end, trials)
        network = first.config.model.name
        study = search.study()
        for one in study.trials:
            if one.state is TrialState.RUNNING:
                # Of a process that was killed.
                study.tell(one.number, state=TrialState.FAIL)
        if workers is None:
            is_small = first.summary["device"] == "cpu" and training_rows(first) < SMALL_LOG
            workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if is_small else 1
        if limits.leave_time(study):
            _in_processes(workers, end, (search, parameters, network, limits))
    done = [one for one in study.trials if one.state is TrialState.COMPLETE]
    done.sort(key=lambda one: -one.value)
    usual = next(one for one in study.trials if one.number == 0).params
    for key, value in done[0].params.items():
        # What the recipe chose for the rows of a trial is another choice for all rows.
        if value != usual[key]:
            _set(given, key, value)
    tuned = folder / "tuned.yaml"
    write_file(tuned, yaml.safe_dump(given, sort_keys=False))
    print(_table(done, study.trials, tuned))
    return tuned


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other searches out of the folder; the system lets them in once this process is gone."""
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"{folder}: another search writes here; end it first, or write another --out"
            ) from None
        yield


def _first_trial(
    search: _Search, given: dict[str, Any], end: float
) -> tuple[Run, dict[str, Parameter]]:
    """The run of the configuration as it is, which the study then holds, and what to search."""
    folder = search.folder / _TRIALS
    study, digest = search.study(), search.digest(given)
    is_other = study.user_attrs.get("searched", digest) != digest
    is_told = any(one.state is TrialState.COMPLETE for one in study.trials)
    if is_told and is_other:
        raise SettingsError(
            f"{search.folder}: was searched with another configuration; write another --out"
        )
    if not is_told:
        if is_other:
            delete_folder(folder)
            folder.mkdir()
        (search.folder / _JOURNAL).unlink()
        study = search.study()
        study.set_user_attr("searched", digest)
    if (folder / "0000/summary.json").is_file():
        first = open_run(folder / "0000")
    else:
        first = search.train(0, {}, after_epoch=lambda metrics: time.time() >= end)
    if "validation" not in first.metrics:
        raise SettingsError("tune needs a validation part: write data.validation_fraction=0.1")
    if selection_score(first.metrics["validation"], search.metric) is None:
        raise SettingsError("the validation part has one class only, and so no AUC")
    parameters = open_parameters(given, first)
    if not parameters:
        raise SettingsError(f"{search.config}: every key that tune searches is set; leave some out")
    if not is_told:
        usual = {key: value_of(first.config, key) for key in parameters}
        for changes in ({}, *changes_of_one(parameters, usual)):
            study.enqueue_trial({**usual, **changes})
        trial = study.ask()
        choose(trial, parameters, first.config.model.name)
        search.tell(study, trial, first)
    return first, parameters


def _configured(
    file: Path, overrides: Sequence[str], metric: str, seed: int, rows: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration with the overrides, and the values of all trials by key."""
    given = read_yaml(file, "write the path of a configuration")
    values: dict[str, Any] = {"evaluate.compare_with_lr": False, "run.seed": seed}
    for text in overrides:
        key, _, value = text.partition("=")
        values[key] = parse_yaml(value, f"override {text!r}")
        _set(given, key, values[key])
    if is_open(given, "evaluate.metric"):
        # Trials choose their epochs, and `stampede train tuned.yaml` its own, by what is searched.
        _set(given, "evaluate.metric", metric)
        values["evaluate.metric"] = metric
    checked = configuration(given)
    if is_open(given, "data.train_rows") and hasattr(checked.data, "train_rows"):
        # With fewer rows the recipe would take a batch for a large one.
        least = _ROWS_OF_BATCH * (checked.train.batch_size or 0)
        values["data.train_rows"] = None if rows is None else max(rows, least)
    if checked.evaluate.select_on != "validation":
        raise SettingsError(
            "evaluate.select_on: found test, but tune chooses by the validation part; leave the "
            "key out"
        )
    return given, values


def _set(given: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        # An empty section is None.
        if given.get(section) is None:
            given[section] = {}
        given = given[section]
        if not isinstance(given, dict):
            raise SettingsError(f"{section}: found {given!r}; write a section with keys")
    given[name] = value


def _in_processes(workers: int, end: float, given: tuple[Any, ...]) -> None:
    """Let so many processes do `_work` until the time is over."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(n, *given)) for n in range(1, workers + 1)]
    left = round(end - time.time())
    with _threads(workers):
        for process in processes:
            process.start()
    try:
        with (
            _stopping_by_signals(),
            tqdm(total=left, desc="tune", unit="s", ncols=100, disable=None) as bar,
        ):
            while running := [process.sentinel for process in processes if process.is_alive()]:
                multiprocessing.connection.wait(running, 1.0)
                bar.update(max(0, min(left, round(left - end + time.time())) - bar.n))
    finally:
        for process in processes:
            # A signal in the last evaluation of a trial does not end that trial.
            while process.is_alive():
                process.terminate()
                process.join(1.0)
    if all(process.exitcode for process in processes):
        raise TrainingStoppedError(
            "every process of the search ended with an error, see above; the same command goes on "
            "with the search"
        )


@contextmanager
def _stopping_by_signals() -> Iterator[None]:
    """Raise an InterruptedRunError at SIGTERM or SIGINT, in the main thread."""

    def stop(number: int, _: Any) -> None:
        raise InterruptedRunError("stopped; the same command goes on with the search", number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _threads(workers: int) -> Iterator[None]:
    """Share the cores among processes that start, unless the user has chosen their threads."""
    key = "OMP_NUM_THREADS"
    is_chosen = key in os.environ
    if not is_chosen:
        os.environ[key] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    try:
        yield
    finally:
        if not is_chosen:
            del os.environ[key]


def _work(
    worker: int,
    search: _Search,
    parameters: Mapping[str, Parameter],
    network: str,
    limits: _Limits,
) -> None:
    """Train trials until the time is over, in a process of its own."""
    study, parent = search.study(worker), multiprocessing.parent_process()

    def is_over() -> bool:
        # A killed search leaves its processes behind.
        return time.time() >= limits.end or (parent is not None and not parent.is_alive())

    while limits.leave_time(study) and not is_over():
        trial = study.ask()
        choose(trial, parameters, network)
        values: list[float] = []

        def after_epoch(
            metrics: Mapping[str, dict[str, Any]],
            trial: optuna.Trial = trial,
            values: list[float] = values,
        ) -> bool:
            values.append(selection_score(metrics["validation"], search.metric))
            trial.report(values[-1], len(values))
            return trial.should_prune() or is_over()

        try:
            log = search.folder / _TRIALS / f"{trial.number:04d}.log"
            with log.open("a") as errors, redirect_stderr(errors):
                run = search.train(trial.number, trial.params, after_epoch=after_epoch)
            search.tell(study, trial, run)
            continue
        except (SettingsError, DataError, RunFolderError, TrainingStoppedError) as failure:
            message = " ".join(str(failure).split())
        except (RuntimeError, MemoryError, OSError) as failure:
            message = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        except (InterruptedRunError, KeyboardInterrupt):
            return
        # Another search may have taken over.
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            trial.set_user_attr("message", message)
            study.tell(trial, state=TrialState.FAIL)


def _table(done: Sequence[Any], trials: Sequence[Any], tuned: Path) -> str:
    """The best trials, by the validation part."""
    searched = {key for trial in done for key in trial.params}
    columns = {key: column for key, column in COLUMNS.items() if key in searched}
    headers = "".join(f"{name:>{width}}" for name, width in columns.values())
    lines = [f"{'AUC':>7}{'logloss':>9}{'seconds':>8}{headers}"]
    for trial in done[:10]:
        chosen = "".join(
            f"{_short(trial.params.get(key, '-')):>{width}}" for key, (_, width) in columns.items()
        )
        known = trial.user_attrs
        numbers = f"{known['auc']:7.4f}{known['logloss']:9.4f}{known['seconds']:8.1f}"
        lines.append(f"{numbers}{chosen}{'' if trial.number else ' *'}")
    states = [trial.state for trial in trials if trial.state is not TrialState.WAITING]
    lines.append(
        f"trials: {len(states)}, of which {states.count(TrialState.PRUNED)} cut short and "
        f"{states.count(TrialState.FAIL)} failed; *: as given; "
        f"the best on the validation part is {tuned}"
    )
    messages = [one.user_attrs["message"] for one in trials if "message" in one.user_attrs]
    if messages:
        lines.append(f"the first failure: {messages[0]}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str("auto" if value is None else value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.minutes < 0:
        parser.error(f"--minutes: found {given.minutes:g}; write a number of at least 0")
    for name, least in (("workers", 1), ("trials", 1), ("rows", SMALL_LOG)):
        found = getattr(given, name)
        if found is not None and found < least and not (name == "rows" and found == 0):
            parser.error(f"--{name}: found {found}; write a number of at least {least:,}")
    out = given.out or f"runs/{given.config.stem}-tuned"

    def search() -> None:
        with continued(out) as (folder, _):
            tuned = tune(
                given.config, given.overrides, folder, given.minutes, given.metric,
                trials=given.trials, workers=given.workers, rows=given.rows or None,
            )  # fmt: skip
        print(f"train it with: stampede train {tuned}")

    return exit_status(search)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede tune",
        description="Search what a configuration leaves open (network, rates, L2, epochs,\n"
        "dropout, init_std, on small logs batch and min_count) for some minutes, with the last\n"
        "million training rows, by the validation part, and write the best configuration. What\n"
        "the configuration sets stays. The same command goes on with an earlier search.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG.yaml", help="the configuration, as for train")
    changes = "changes it for all trials, such as data.path=train.txt"
    add("overrides", nargs="*", default=[], metavar="section.key=value", help=changes)
    add("--minutes", type=float, default=10.0, help="for the search; default 10")
    chosen = "to choose by; default both, AUC minus logloss"
    add("--metric", choices=["auc", "logloss", "both"], default="both", help=chosen)
    most = "ends the search too, with those of earlier searches"
    add("--trials", type=int, default=_MOST_TRIALS, metavar="N", help=most)
    part = f"training rows of a trial, the last ones; default and least {ROWS:,}; 0: all"
    add("--rows", type=int, default=ROWS, metavar="N", help=part)
    several = "trainings at a time; default: one for each core, 1 on a GPU or from 1M rows on"
    add("--workers", type=int, metavar="N", help=several)
    out = "folder or URL of the trials and of tuned.yaml; default runs/CONFIG-tuned"
    add("--out", metavar="FOLDER", help=out)
    return parser
