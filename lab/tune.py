"""`stampede tune CONFIG.yaml --minutes 10`: searches what a configuration leaves open.

The first trial is the configuration as it is, the next ones change one key each. Then Optuna's TPE
proposes, by the validation part. Several processes train the trials. One ends after an epoch that
is worse than half of the others were there (Optuna's `MedianPruner`). Optuna's journal keeps the
trials, so the same command goes on with a search that was stopped, and spends its minutes anew.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
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
    train,
)
from stampede.files import refuse_links, write_file
from stampede.lab.sweep import Parameter
from stampede.settings import SettingsError, parse_yaml, read_yaml

# By key, a range of factors of the value that the first trial had.
_FACTORS = {
    "optim.embedding.lr": (0.3, 10.0),
    "optim.dense.lr": (0.3, 5.0),
    "optim.embedding.l2": (0.1, 10.0),
}
_MORE_EPOCHS = (1, 2, 4)
# On smaller logs the recipe trains until evaluations are no longer better, in up to this many
# epochs: a higher limit changes little, but with few epochs the rates fall.
_SMALL_LOG, _UNTIL_NO_BETTER, _FEW_EPOCHS = 1_000_000, 20, 6
# There a half and twice the first trial's batch are tried.
_BATCHES = (1, 2, 4)
# The first trial's network may be replaced by those of its group.
_NETWORKS = (("deepfm", "dcnv2", "fm", "lr"), ("mmoe", "ple", "shared_bottom"), ("din", "dcnv2"))
_WITHOUT_DROPOUT = ("fm", "lr")
_DROPOUTS = (0.0, 0.1, 0.2, 0.4)

# More trials than fit into any time.
_MOST_TRIALS = 10_000
# Trials that Optuna has before it compares, and that end before others are cut short.
_COMPARED, _UNCUT = 8, 4
_JOURNAL, _TRIALS = "search.log", "trials"
# Most trainings at a time, unless asked for; each has a copy of everything.
_MOST_WORKERS = 8
# Columns of the table, by key, with their widths. Trials change one key each in this order.
_COLUMNS = {
    "optim.embedding.lr": ("table lr", 9),
    "model.name": ("network", 14),
    "model.dropout": ("dropout", 8),
    "train.batch_size": ("batch", 6),
    "train.epochs": ("epochs", 7),
    "optim.embedding.l2": ("table l2", 9),
    "optim.dense.lr": ("dense lr", 9),
}


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
        own = {"run.name": name, "run.dir": str(folder), "checkpoint.resume": "auto"}
        with (folder / f"{name}.log").open("a") as log, redirect_stdout(log):
            run = train(self.config, **{**self.values, **chosen, **own}, **further)
        # Its scores and curves are kept.
        shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)
        return run


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
) -> Path:
    """Search until the time is over; write the best configuration and return its path.

    A trial that trains when the time is over ends with its epoch.

    Args:
        file: the configuration.
        overrides: `section.key=value` for all trials; what they or the file set is not searched.
        folder: of the trials, and of `tuned.yaml`.
        metric: of the validation part, as `evaluate.metric`: `auc`, `logloss`, or `both`, AUC minus
            logloss; unless that key is set, it also chooses the epoch of a trial.
        seed: `run.seed` of the trials, and of the search.
        trials: after which it ends too, those of earlier searches included.
        workers: trainings at a time; by default one for each CPU core, at most 8, and one on a GPU
            or for a log of a million rows.

    Raises:
        SettingsError: the configuration cannot be used, or has no validation part.
        TrainingStoppedError: the first trial failed, or no process of the search could go on.
    """
    end = time.time() + 60 * minutes
    given, search = _begun(file, overrides, folder, metric, seed)
    study = search.study()
    first = open_run(folder / _TRIALS / "0000") if study.trials else search.train(0, {})
    if "validation" not in first.metrics:
        raise SettingsError("tune needs a validation part: write data.validation_fraction=0.1")
    if _worth(first.metrics, metric) is None:
        raise SettingsError("the validation part has one class only, and so no AUC")
    parameters = open_parameters(given, first)
    if not parameters:
        raise SettingsError(f"{file}: every key that tune searches is set; leave some out")
    if not study.trials:
        usual = {key: _value(first.config, key) for key in parameters}
        study.enqueue_trial(usual)
        trial = study.ask()
        _choose(trial, parameters, first.config.model.name)
        _tell(study, trial, first, metric)
        for changes in _changes(parameters, usual):
            study.enqueue_trial({**usual, **changes})
    for one in study.trials:
        if one.state is TrialState.RUNNING:
            # Of a process that was killed.
            study.tell(one.number, state=TrialState.FAIL)
    if workers is None:
        is_small = first.summary["device"] == "cpu" and _rows(first) < _SMALL_LOG
        workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if is_small else 1
    limits = _Limits(end, trials)
    if limits.leave_time(study):
        _in_processes(workers, end, (search, parameters, first.config.model.name, limits))
    done = [one for one in study.trials if one.state is TrialState.COMPLETE]
    done.sort(key=lambda one: -one.value)
    if done[0].number > 0:
        for key, value in done[0].params.items():
            _set(given, key, value)
    tuned = folder / "tuned.yaml"
    write_file(tuned, yaml.safe_dump(given, sort_keys=False))
    print(_table(done, study.trials, tuned))
    return tuned


def _begun(
    file: Path, overrides: Sequence[str], folder: Path, metric: str, seed: int
) -> tuple[dict[str, Any], _Search]:
    """The configuration with the overrides, and the search in its folder."""
    given = read_yaml(file, "write the path of a configuration")
    values: dict[str, Any] = {"evaluate.compare_with_lr": False, "run.seed": seed}
    for text in overrides:
        key, _, value = text.partition("=")
        values[key] = parse_yaml(value, f"override {text!r}")
        _set(given, key, values[key])
    if _is_open(given, "evaluate.metric"):
        # Trials choose their epochs, and `stampede train tuned.yaml` its own, by what is searched.
        _set(given, "evaluate.metric", metric)
        values["evaluate.metric"] = metric
    checked = configuration(given)
    if checked.evaluate.select_on != "validation":
        raise SettingsError(
            "evaluate.select_on: found test, but tune chooses by the validation part; leave the "
            "key out"
        )
    told = checked.model_dump_json(exclude={"run"}) + f"{metric} {seed}"
    if checked.model.import_file:
        told += Path(checked.model.import_file).read_text(encoding="utf-8")
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    (folder / _TRIALS).mkdir(parents=True, exist_ok=True)
    search = _Search(file.resolve(), values, folder, metric, seed)
    study = search.study()
    if study.user_attrs.get("searched", digest) != digest:
        raise SettingsError(
            f"{folder}: was searched with another configuration; write another --out"
        )
    study.set_user_attr("searched", digest)
    return given, search


def open_parameters(given: Mapping[str, Any], run: Run) -> dict[str, Parameter]:
    """What to search, by key: what `given` leaves open, around the values that `run` had."""
    is_small = _rows(run) < _SMALL_LOG
    parameters: dict[str, Parameter] = {}
    for key, (low, high) in _FACTORS.items():
        if usual := _value(run.config, key):
            parameters[key] = Parameter(low=low * usual, high=high * usual, log=True)
    epochs = _value(run.config, "train.epochs")
    choices = [factor * epochs for factor in _MORE_EPOCHS]
    if is_small and epochs == _UNTIL_NO_BETTER:
        choices = [_FEW_EPOCHS, epochs]
    parameters["train.epochs"] = Parameter(choices=choices)
    if is_small:
        half = max(1, _value(run.config, "train.batch_size") // 2)
        usual = _value(run.config, "train.batch_size")
        sizes = dict.fromkeys([*(half * factor for factor in _BATCHES), usual])
        parameters["train.batch_size"] = Parameter(choices=sorted(sizes))
    used = _value(run.config, "model.name")
    others = next((group for group in _NETWORKS if used in group), ())
    parameters["model.name"] = Parameter(choices=list(dict.fromkeys([used, *others])))
    dropouts = sorted({_value(run.config, "model.dropout"), *_DROPOUTS})
    parameters["model.dropout"] = Parameter(choices=dropouts)
    return {key: parameters[key] for key in _COLUMNS if key in parameters and _is_open(given, key)}


def _changes(
    parameters: Mapping[str, Parameter], usual: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Changes of one key each: its other choices, or half of the way to the ends of its range."""
    for key, what in parameters.items():
        others = what.choices or [math.sqrt(end * usual[key]) for end in (what.high, what.low)]
        yield from ({key: other} for other in others if other != usual[key])


def _worth(metrics: Mapping[str, dict[str, Any]], metric: str) -> float | None:
    """What is searched for, as `evaluate.metric` has it: higher is better."""
    auc, logloss = (metrics["validation"][name] for name in ("auc", "logloss"))
    if metric == "logloss":
        return -logloss
    return auc if auc is None or metric == "auc" else auc - logloss


def _rows(run: Run) -> int:
    return run.summary["rows"]["train"]


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


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


def _is_open(given: Any, key: str) -> bool:
    for part in key.split("."):
        given = given.get(part) if isinstance(given, dict) else None
    return given is None


def _choose(trial: optuna.Trial, parameters: Mapping[str, Parameter], network: str) -> None:
    """Let Optuna choose; without a choice of it, the network is the one that is named."""
    for key, what in parameters.items():
        if key == "model.dropout" and trial.params.get("model.name", network) in _WITHOUT_DROPOUT:
            continue
        what.suggest(trial, key)


def _in_processes(workers: int, end: float, given: tuple[Any, ...]) -> None:
    """Let so many processes do `_work` until the time is over."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(n, *given)) for n in range(1, workers + 1)]
    left = round(end - time.time())
    with (
        _threads(workers),
        tqdm(total=left, desc="tune", unit="s", ncols=100, disable=None) as bar,
    ):
        for process in processes:
            process.start()
        try:
            while any(process.is_alive() for process in processes):
                processes[0].join(1.0)
                bar.update(max(0, min(left, round(left - end + time.time())) - bar.n))
        except KeyboardInterrupt:
            for process in processes:
                process.terminate()
                process.join()
            raise InterruptedRunError(
                "stopped; the same command goes on with the search", signal.SIGINT
            ) from None
    if all(process.exitcode for process in processes):
        raise TrainingStoppedError(
            "every process of the search ended with an error, see above; the same command goes on "
            "with the search"
        )


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
    study = search.study(worker)
    while limits.leave_time(study):
        trial = study.ask()
        _choose(trial, parameters, network)
        values: list[float] = []

        def after_epoch(
            metrics: Mapping[str, dict[str, Any]],
            trial: optuna.Trial = trial,
            values: list[float] = values,
        ) -> bool:
            values.append(_worth(metrics, search.metric))
            trial.report(values[-1], len(values))
            return trial.should_prune() or time.time() >= limits.end

        message = ""
        try:
            log = search.folder / _TRIALS / f"{trial.number:04d}.log"
            with log.open("a") as errors, redirect_stderr(errors):
                run = search.train(trial.number, trial.params, after_epoch=after_epoch)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
            else:
                _tell(study, trial, run, search.metric)
        except (SettingsError, DataError, RunFolderError, TrainingStoppedError) as failure:
            message = " ".join(str(failure).split())
        except (RuntimeError, MemoryError, OSError) as failure:
            message = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        except (InterruptedRunError, KeyboardInterrupt):
            study.tell(trial, state=TrialState.FAIL)
            return
        if message:
            trial.set_user_attr("message", message)
            study.tell(trial, state=TrialState.FAIL)


def _tell(study: optuna.Study, trial: optuna.Trial, run: Run, metric: str) -> None:
    found = run.metrics["validation"]
    value = _worth(run.metrics, metric)
    for name in ("auc", "logloss"):
        trial.set_user_attr(name, found[name])
    trial.set_user_attr("seconds", run.summary["train_seconds"])
    study.tell(trial, value)


def _table(done: Sequence[Any], trials: Sequence[Any], tuned: Path) -> str:
    """The best trials, by the validation part."""
    searched = {key for trial in done for key in trial.params}
    columns = {key: column for key, column in _COLUMNS.items() if key in searched}
    headers = "".join(f"{name:>{width}}" for name, width in columns.values())
    lines = [f"{'AUC':>7}{'logloss':>9}{'seconds':>8}{headers}"]
    for trial in done[:10]:
        chosen = "".join(
            f"{_short(trial.params.get(key, '-')):>{width}}" for key, (_, width) in columns.items()
        )
        known = trial.user_attrs
        numbers = f"{known['auc']:7.4f}{known['logloss']:9.4f}{known['seconds']:8.1f}"
        lines.append(f"{numbers}{chosen}{'' if trial.number else '  as given'}")
    states = [trial.state for trial in trials if trial.state is not TrialState.WAITING]
    lines.append(
        f"{len(states)} trials on the validation part, {states.count(TrialState.PRUNED)} cut "
        f"short, {states.count(TrialState.FAIL)} failed; the best is {tuned}"
    )
    messages = [one.user_attrs["message"] for one in trials if "message" in one.user_attrs]
    if messages:
        lines.append(f"the first failure: {messages[0]}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.minutes < 0:
        parser.error(f"--minutes: found {given.minutes:g}; write a number of at least 0")
    for name in ("workers", "trials"):
        if (found := getattr(given, name)) is not None and found < 1:
            parser.error(f"--{name}: found {found}; write a number of at least 1")
    folder = given.out or Path("runs") / f"{given.config.stem}-tuned"

    def search() -> None:
        tuned = tune(
            given.config, given.overrides, folder, given.minutes, given.metric,
            trials=given.trials, workers=given.workers,
        )  # fmt: skip
        print(f"train it with: stampede train {tuned}")

    return exit_status(search)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede tune",
        description="Search what a configuration leaves open (network, rates, L2, epochs,\n"
        "dropout, on small logs the batch) for some minutes, by the validation part, and write\n"
        "the best configuration. What the configuration sets stays. The same command goes on with\n"
        "an earlier search.",
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
    several = "trainings at a time; default: one for each core, 1 on a GPU or from 1M rows on"
    add("--workers", type=int, metavar="N", help=several)
    out = "folder of the trials and of tuned.yaml; default runs/CONFIG-tuned"
    add("--out", type=Path, metavar="FOLDER", help=out)
    return parser


if __name__ == "__main__":
    sys.exit(main())
