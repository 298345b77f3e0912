"""`stampede tune CONFIG.yaml --minutes 10`: searches what a configuration leaves open.

The first trial is the configuration as it is; Optuna's TPE chooses the others, by the validation
part. The same command goes on with a search that was stopped, and spends its minutes anew.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from stampede import Run, TrainingStoppedError, configuration, exit_status
from stampede.files import write_file
from stampede.lab.sweep import Parameter, Point, Runner, Study, Sweep, Trial
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
# The first trial's network may be replaced by those of its group.
_NETWORKS = (("deepfm", "dcnv2", "fm", "lr"), ("mmoe", "ple", "shared_bottom"), ("din", "dcnv2"))
_WITHOUT_DROPOUT = ("fm", "lr")
_DROPOUTS = (0.0, 0.1, 0.2, 0.4)

# More trials than fit into any time.
_MOST_TRIALS = 10_000


def tune(
    file: Path, overrides: Sequence[str], folder: Path, minutes: float, metric: str, seed: int = 1
) -> Path:
    """Search until the time is over; write the best configuration and return its path.

    A trial starts if one of the usual length can still end in time; the first always does.

    Args:
        file: the configuration.
        overrides: `section.key=value` for all trials; what they or the file set is not searched.
        folder: of the trials, and of `tuned.yaml`.
        metric: of the validation part, `auc` or `logloss`; unless `evaluate.metric` is set, it also
            chooses the epoch of a trial.
        seed: `run.seed` of the trials, and of the search.

    Raises:
        SettingsError: the configuration cannot be used, or has no validation part.
        TrainingStoppedError: the first trial failed.
    """
    start = time.monotonic()
    given = read_yaml(file, "write the path of a configuration")
    for text in overrides:
        key, _, value = text.partition("=")
        _set(given, key, parse_yaml(value, f"override {text!r}"))
    asked = [*overrides, "evaluate.compare_with_lr=false"]
    if _is_open(given, "evaluate.metric"):
        # Trials choose their epochs, and `stampede train tuned.yaml` its own, by what is searched.
        _set(given, "evaluate.metric", metric)
        asked.append(f"evaluate.metric={metric}")
    if configuration(given).evaluate.select_on != "validation":
        raise SettingsError(
            "evaluate.select_on: found test, but tune chooses by the validation part; leave the "
            "key out"
        )
    folder.mkdir(parents=True, exist_ok=True)

    def searching(parameters: dict[str, Parameter]) -> Runner:
        study = Study(parameters=parameters, metric=metric, trials=_MOST_TRIALS, seed=seed)
        sweep = Sweep(config=str(file.resolve()), overrides=asked, study=study)
        return Runner(file, sweep, folder, (), retry_failed=False)

    first = Point({"trial": "0000", "settings": "as given"}, {})
    trial = searching({"run.seed": Parameter(choices=[seed])}).run(first, seed)
    if trial.run is None:
        raise TrainingStoppedError(trial.message)
    if "validation" not in trial.run.metrics:
        raise SettingsError("tune needs a validation part: write data.validation_fraction=0.1")
    parameters = open_parameters(given, trial.run)
    if not parameters:
        raise SettingsError(f"{file}: every key that tune searches is set; leave some out")
    with tqdm(total=round(60 * minutes), desc="tune", unit="s", ncols=100, disable=None) as bar:

        def may_go_on(lengths: Sequence[float]) -> bool:
            spent = time.monotonic() - start
            bar.update(round(min(spent, bar.total)) - bar.n)
            return spent + statistics.median(lengths) <= 60 * minutes

        trials = [trial, *_search(searching(parameters), trial, seed, may_go_on)]
    done = [one for one in trials if one.metric(metric) is not None]
    sign = 1 if metric == "logloss" else -1
    done.sort(key=lambda one: sign * one.metric(metric))
    for key, value in done[0].point.overrides.items():
        _set(given, key, value)
    tuned = folder / "tuned.yaml"
    write_file(tuned, yaml.safe_dump(given, sort_keys=False))
    print(_table(done, len(trials) - len(done), tuned))
    return tuned


def open_parameters(given: dict[str, Any], run: Run) -> dict[str, Parameter]:
    """What to search, by key: what `given` leaves open, around the values that `run` had."""

    def value_of(key: str) -> Any:
        section: Any = run.config
        for part in key.split("."):
            section = getattr(section, part)
        return section

    parameters: dict[str, Parameter] = {}
    for key, (low, high) in _FACTORS.items():
        if usual := value_of(key):
            parameters[key] = Parameter(low=low * usual, high=high * usual, log=True)
    epochs = value_of("train.epochs")
    choices = [factor * epochs for factor in _MORE_EPOCHS]
    if epochs == _UNTIL_NO_BETTER and run.summary["rows"]["train"] < _SMALL_LOG:
        choices = [_FEW_EPOCHS, epochs]
    parameters["train.epochs"] = Parameter(choices=choices)
    used = value_of("model.name")
    others = next((group for group in _NETWORKS if used in group), ())
    parameters["model.name"] = Parameter(choices=list(dict.fromkeys([used, *others])))
    dropouts = sorted({value_of("model.dropout"), *_DROPOUTS})
    parameters["model.dropout"] = Parameter(choices=dropouts)
    return {key: what for key, what in parameters.items() if _is_open(given, key)}


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


def _search(
    runner: Runner, first: Trial, seed: int, may_go_on: Callable[[Sequence[float]], bool]
) -> list[Trial]:
    """The trials after the first one."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sought = runner.sweep.study
    minimized = sought.metric == "logloss"
    study = optuna.create_study(direction="minimize" if minimized else "maximize")
    lengths, trials = [first.run.summary["train_seconds"]], []
    for number in range(1, _MOST_TRIALS):
        study.sampler = optuna.samplers.TPESampler(seed=seed + number)
        asked = study.ask()
        for key, what in sought.parameters.items():
            what.suggest(asked, key)
        chosen = dict(asked.params)
        if chosen.get("model.name", first.run.config.model.name) in _WITHOUT_DROPOUT:
            chosen.pop("model.dropout", None)
        point, start = Point({"trial": f"{number:04d}"}, chosen), time.monotonic()
        is_new = not runner.has_run(point, seed)
        if is_new and not may_go_on(lengths):
            break
        trial = runner.run(point, seed)
        value = trial.metric(sought.metric)
        study.tell(asked, value, optuna.trial.TrialState.FAIL if value is None else None)
        trials.append(trial)
        if is_new:
            lengths.append(time.monotonic() - start)
    return trials


def _table(done: Sequence[Trial], failed: int, tuned: Path) -> str:
    """The best trials, by the validation part."""
    lines = [f"{'AUC':>8}{'logloss':>9}{'seconds':>9}  settings"]
    for trial in done[:10]:
        chosen = trial.point.overrides.items()
        settings = " ".join(f"{key.removeprefix('optim.')}={_short(v)}" for key, v in chosen)
        auc, logloss = trial.metric("auc"), trial.metric("logloss")
        seconds = trial.run.summary["train_seconds"]
        lines.append(f"{auc:8.4f}{logloss:9.4f}{seconds:9.1f}  {settings or 'as given'}")
    lines.append(f"{len(done)} trials on the validation part, {failed} failed; the best is {tuned}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.minutes < 0:
        parser.error(f"--minutes: found {given.minutes:g}; write a number of at least 0")
    folder = given.out or Path("runs") / f"{given.config.stem}-tuned"

    def search() -> None:
        tuned = tune(given.config, given.overrides, folder, given.minutes, given.metric)
        print(f"train it with: stampede train {tuned}")

    return exit_status(search)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede tune",
        description="Search what a configuration leaves open (network, rates, L2, epochs,\n"
        "dropout) for some minutes, by the validation part, and write the best configuration.\n"
        "What the configuration sets stays. The same command goes on with an earlier search.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG.yaml", help="the configuration, as for train")
    changes = "changes it for all trials, such as data.path=train.txt"
    add("overrides", nargs="*", default=[], metavar="section.key=value", help=changes)
    add("--minutes", type=float, default=10.0, help="for the search; default 10")
    add("--metric", choices=["auc", "logloss"], default="auc", help="to choose by; default auc")
    out = "folder of the trials and of tuned.yaml; default runs/CONFIG-tuned"
    add("--out", type=Path, metavar="FOLDER", help=out)
    return parser


if __name__ == "__main__":
    sys.exit(main())
