"""One run, from a configuration to its results."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stampede.data.samples import click_shares
from stampede.engine.advice import (
    can_calibrate,
    check_batch_size,
    check_labels,
    on_batch_size,
    on_calibration,
    on_data,
    on_last_epoch,
    tell,
    told,
)
from stampede.engine.checkpoint.resume import begin, find_beginning
from stampede.engine.comparison import BASELINES, check_installed, compare, fit_baseline
from stampede.engine.config import Config
from stampede.engine.config.load import check_config, load_config_of_run
from stampede.engine.config.recipe import described, takes_strength, with_recipe
from stampede.engine.console import printing
from stampede.engine.inference.kept import keep_inputs, keep_network
from stampede.engine.job.build import build
from stampede.engine.periods.scored_before import SCORED, ScoredBefore
from stampede.engine.planning.planner import describe_plan
from stampede.engine.processes import Processes, processes
from stampede.engine.reading import open_dataset
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.results.summary import describe, summarize
from stampede.engine.same_run import check_same_run
from stampede.engine.training.trainer import Trainer
from stampede.engine.training.training_run import AfterEpoch, TrainingRun
from stampede.engine.watching.hang import watched


def run(config: Config, after_epoch: AfterEpoch | None = None) -> RunFolder:
    """Train, evaluate, write the run folder and print the result.

    Args:
        after_epoch: see `stampede.train`; with `train.refit` of the run that chooses the epochs.

    Returns:
        The run folder; empty on a host that is `apart` from that of rank 0.

    Raises:
        SettingsError, DataError, RunFolderError: a user's mistake.
        TrainingStoppedError: training failed.
    """
    with printing(not config.run.quiet), processes(config.run.device) as here:
        if config.train.refit:
            # Refuse a folder in use before the first of the two trainings.
            with RunFolder(os.path.join(config.run.dir, config.run.name)) as folder:
                here.on_main(lambda: folder.reserve(config))
            config, calibration = _refitted(config, here, after_epoch)
            return run_here(config, here, calibration=calibration)
        return run_here(config, here, after_epoch=after_epoch)


def _refitted(
    config: Config, here: Processes, after_epoch: AfterEpoch | None
) -> tuple[Config, list[list[float]]]:
    """Let a run with a validation part choose the epochs; the run on all rows with them.

    That has every setting of the first one, and its calibration. Rates that fall end at 0 after the
    chosen epochs.
    """
    name = f"{config.run.name}-selection"
    given = config.model_dump(mode="json")
    given["train"]["refit"] = False
    given["run"]["name"] = name
    chooses = check_config(given, Path(name), here.world_size)
    run_here(chooses, here, after_epoch=after_epoch)
    chose = RunFolder(os.path.join(config.run.dir, name))
    saved = here.on_main(lambda: load_config_of_run(chose.config_file).model_dump(mode="json"))
    found = here.on_main(chose.read_summary)
    epochs = found["best_epoch"] or saved["train"]["epochs"]
    saved["run"]["name"] = config.run.name
    saved["train"]["epochs"] = saved["evaluate"]["every_epochs"] = epochs
    # Only the last epoch is evaluated, so nothing is chosen by the test part.
    saved["evaluate"] |= {"select_on": "test", "patience": 0, "every": 0}
    if saved["evaluate"]["calibrate"]:
        # `true` needs a validation part.
        saved["evaluate"]["calibrate"] = "auto"
    saved["evaluate"] |= {"compare_with_lr": False, "compare_with_trees": False}
    data = saved["data"]
    if data.get("validation_path"):
        paths = [data["path"], data["validation_path"]]
        data["path"] = [
            one for path in paths for one in ([path] if isinstance(path, str) else path)
        ]
    data |= {
        key: type(data[key])() for key in ("validation_path", "validation_values") if key in data
    }
    for section in saved["optim"]["embedding"], saved["optim"]["dense"]:
        schedule = section["schedule"]
        if schedule["decay"] != "constant" and schedule["unit"] == "epochs":
            schedule["warmup"] = min(schedule["warmup"], epochs / 4)
    if here.is_main:
        print(f"epoch {epochs} was the best: training again, on the validation rows too\n")
    refits = check_config(saved, Path(config.run.name), here.world_size)
    return refits, found["validation"].get("logit_calibration", [])


def run_here(
    config: Config,
    here: Processes,
    scored: ScoredBefore | None = None,
    after_epoch: AfterEpoch | None = None,
    calibration: Sequence[Sequence[float]] = (),
) -> RunFolder:
    """`run` in processes that are already connected; all must call it.

    Args:
        scored: of a period whose rows another model than the run's own scores.
        after_epoch: see `run`.
        calibration: of a new run's logits, see `LogitCalibration`.
    """
    check_same_run(config, here)
    check_installed(config)
    if config.train.reproducible and "MKL_CBWR" not in os.environ and here.is_main:
        # It is too late to set it, see `same_products`.
        print(
            "train.reproducible: the bits of products may depend on where a batch lies in memory; "
            "start Python with MKL_CBWR=AUTO,STRICT in the environment",
            file=sys.stderr,
        )
    folder = RunFolder(os.path.join(config.run.dir, config.run.name))
    with folder:
        continued = here.on_main(lambda: folder.reserve(config))
        folder.check_shared(here)
        with watched(here, config.run, folder.path):
            run, is_new, regression = _begun(config, folder, continued, here, scored)
            run.after_epoch = after_epoch
            if is_new:
                run.progress.calibration = [[*of_goal] for of_goal in calibration]
            if not config.evaluate.calibrate:
                run.progress.calibration = []
            run.job.ctr_model.calibration.set(run.progress.calibration)
            summary = _trained(run, is_new, regression)
            if scored is not None:
                # The data are those of a first period.
                summary["period"] = scored.period
        config = run.config
        title = (
            f"{config.run.name}: {config.model.name}, batch {config.train.batch_size}, "
            f"{here.world_size} x {here.device.type}"
        )
        here.on_main(lambda: folder.write_results(summary, title))
        if here.is_main:
            print(describe(summary, folder, describe_plan(run.job.model.plan)))
    return folder


def _begun(
    config: Config,
    folder: RunFolder,
    continued: bool,
    here: Processes,
    scored: ScoredBefore | None,
) -> tuple[TrainingRun, bool, dict[str, Any] | None]:
    """A run before its first step, whether it is a new one, and a logistic regression if made."""
    if here.is_main and config.model.import_file:
        print(f"model.import: {config.model.import_file} was executed")
    found = find_beginning(config, folder, continued, here)
    is_new = found.newest is None
    with here.heartbeat.slowly("preparing data"):
        dataset = open_dataset(config, here)
    rows, fields = dataset.train.rows, len(dataset.vocabulary_sizes)
    # A period continues the earlier ones, as one log of all rows.
    known = rows + dataset.rows_before
    regression = None
    if is_new and dataset.validation is not None and takes_strength(config, rows):
        # The network is the same model, so the comparison comes first and chooses its L2.
        regression = fit_baseline("logistic_regression", dataset, here)
    strength = None if regression is None else regression["C"]
    config, choices = with_recipe(config, known, fields, here.world_size, found.saved, strength)
    with here.heartbeat.slowly("loading"):
        found_off = []
        if not dataset.period:
            # A period may have few rows, or one class: its model learned from others too.
            if is_new:
                here.on_main(lambda: check_labels(dataset))
            if is_new and "train.batch_size" not in {choice.key for choice in choices}:
                check_batch_size(config.train.batch_size, rows, here.world_size)
            found_off = on_batch_size(config.train.batch_size, rows, here.world_size)
        job = build(config, dataset, here)
        progress, lines, report = begin(found, config, job, dataset, here)
        if scored is not None and not progress.last:
            progress.last = {"test": scored.metrics}

        def begin_folder() -> None:
            folder.claim(config) if is_new else folder.write_config(config)
            if report is not None:
                folder.write_report("init_from.json", asdict(report))
            if scored is not None:
                folder.write_report(SCORED, dict(scored.source))
            keep_inputs(config, folder.path, replace=is_new)
            keep_network(config, folder.path, replace=is_new)
            # A killed run may have logged steps that are repeated now.
            folder.keep_lines(progress.metrics_lines)

        here.on_main(begin_folder)
        run = TrainingRun(config, here, folder, dataset, job, progress)
        _print_beginning(run, described(choices) if choices else "", lines)
        found_off += here.on_main(lambda: on_data(dataset, can_calibrate(config)))
        tell(found_off, progress.step, folder, here)
        progress.metrics_lines = folder.metrics_lines
    return run, is_new, regression


def _trained(run: TrainingRun, is_new: bool, regression: dict[str, Any] | None) -> dict[str, Any]:
    """Train a run to its end; its summary."""
    config, here, folder, dataset = run.config, run.processes, run.folder, run.dataset
    Trainer(run).fit()
    # Measured before the comparison, whose memory and seconds do not count.
    summary = summarize(run)
    summary |= dict.fromkeys(BASELINES)
    if not dataset.period:
        # After the last checkpoint: a run that continues with more epochs drops it.
        results = run.progress.selected or run.progress.last
        found_off = here.on_main(
            lambda: [
                *on_last_epoch(config, folder),
                *on_calibration(config, results, lambda: click_shares(dataset.test), told(folder)),
            ]
        )
        tell(found_off, run.progress.step, folder, here)
        given = config, dataset, run.progress, folder, here, {"logistic_regression": regression}
        summary |= compare(*given, same_data=not is_new)
    summary["advice"] = here.on_main(lambda: told(folder))
    return summary


def _print_beginning(run: TrainingRun, chosen: str, lines: list[str]) -> None:
    """Print what will be trained, what the recipe chose, and where the run starts from."""
    if not run.processes.is_main:
        return
    rows, ids = run.dataset.train.rows, sum(run.dataset.tables.values())
    plan = describe_plan(run.job.model.plan)
    print(f"{run.config.run.name}: {rows:,} training rows, {ids:,} ids, {plan}")
    if run.dataset.features:
        print(textwrap.fill(f"features: {run.dataset.features}", 98, subsequent_indent="  "))
    if chosen:
        print(chosen)
    print(run.job.scaling.table())
    print(f"dense layers in {run.job.precision.reason}")
    for line in lines:
        print(line)
