"""One run, from a configuration to its results."""

from __future__ import annotations

import os
import textwrap
from dataclasses import asdict
from typing import Any

from stampede.engine.advice import (
    check_batch_size,
    check_labels,
    compare_with_lr,
    fit_lr,
    on_batch_size,
    on_calibration,
    on_data,
    on_last_epoch,
    tell,
    told,
)
from stampede.engine.checkpoint.resume import begin, find_beginning
from stampede.engine.config import Config
from stampede.engine.config.recipe import described, takes_strength, with_recipe
from stampede.engine.console import printing
from stampede.engine.inference.kept import keep_inputs, keep_network
from stampede.engine.job.build import build
from stampede.engine.planning.planner import describe_plan
from stampede.engine.processes import Processes, processes
from stampede.engine.reading import open_dataset
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.results.summary import describe, summarize
from stampede.engine.same_run import check_same_run
from stampede.engine.training.trainer import Trainer
from stampede.engine.training.training_run import TrainingRun
from stampede.engine.watching.hang import watched


def run(config: Config) -> None:
    """Train, evaluate, write the run folder and print the result.

    Raises:
        SettingsError, DataError, RunFolderError: a user's mistake.
        TrainingStoppedError: training failed.
    """
    with printing(not config.run.quiet), processes(config.run.device) as here:
        run_here(config, here)


def run_here(config: Config, here: Processes) -> None:
    """`run` in processes that are already connected; all must call it."""
    check_same_run(config, here)
    folder = RunFolder(os.path.join(config.run.dir, config.run.name))
    with folder:
        continued = here.on_main(lambda: folder.reserve(config))
        folder.check_shared(here)
        with watched(here, config.run, folder.path):
            run, is_new, regression = _begun(config, folder, continued, here)
            summary = _trained(run, is_new, regression)
        config = run.config
        title = (
            f"{config.run.name}: {config.model.name}, batch {config.train.batch_size}, "
            f"{here.world_size} x {here.device.type}"
        )
        here.on_main(lambda: folder.write_results(summary, title))
        if here.is_main:
            print(describe(summary, folder, describe_plan(run.job.model.plan)))


def _begun(
    config: Config, folder: RunFolder, continued: bool, here: Processes
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
        regression = fit_lr(dataset, here)
    strength = None if regression is None else regression["C"]
    config, choices = with_recipe(config, known, fields, here.world_size, found.saved, strength)
    with here.heartbeat.slowly("loading"):
        if is_new and not dataset.period:
            here.on_main(lambda: check_labels(dataset))
            if "train.batch_size" not in {choice.key for choice in choices}:
                check_batch_size(config.train.batch_size, rows, here.world_size)
        job = build(config, dataset, here)
        progress, lines, report = begin(found, config, job, dataset, here)

        def begin_folder() -> None:
            folder.claim(config) if is_new else folder.write_config(config)
            if report is not None:
                folder.write_report("init_from.json", asdict(report))
            keep_inputs(config, folder.path, replace=is_new)
            keep_network(config, folder.path, replace=is_new)
            # A killed run may have logged steps that are repeated now.
            folder.keep_lines(progress.metrics_lines)

        here.on_main(begin_folder)
        run = TrainingRun(config, here, folder, dataset, job, progress)
        _print_beginning(run, described(choices) if choices else "", lines)
        found_off = []
        if not dataset.period:
            # A period's batch size is chosen by all rows so far.
            found_off = on_batch_size(config.train.batch_size, rows, here.world_size)
        can_calibrate = config.evaluate.select_on != "test" and config.model.name != "esmm"
        found_off += here.on_main(lambda: on_data(dataset, can_calibrate))
        tell(found_off, progress.step, folder, here)
        progress.metrics_lines = folder.metrics_lines
    return run, is_new, regression


def _trained(run: TrainingRun, is_new: bool, regression: dict[str, Any] | None) -> dict[str, Any]:
    """Train a run to its end; its summary."""
    config, here, folder, dataset = run.config, run.processes, run.folder, run.dataset
    Trainer(run).fit()
    if not dataset.period:
        # After the last checkpoint: a run that continues with more epochs drops it.
        results = run.progress.selected or run.progress.last
        found_off = here.on_main(
            lambda: [
                *on_last_epoch(config, folder),
                *on_calibration(config, results, told(folder)),
            ]
        )
        tell(found_off, run.progress.step, folder, here)
    # Measured before the comparison, whose memory and seconds do not count.
    summary = summarize(run)
    summary["logistic_regression"] = compare_with_lr(
        config, dataset, run.progress, folder, here, regression, same_data=not is_new
    )
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
