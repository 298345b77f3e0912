"""One run, from a configuration to its results."""

from __future__ import annotations

import textwrap
from pathlib import Path

from stampede.engine.advice import compare_with_lr, on_batch_size, on_data, tell, told
from stampede.engine.build import build
from stampede.engine.config import Config
from stampede.engine.datasets import open_dataset
from stampede.engine.hang import watched
from stampede.engine.inference.kept import keep_inputs, keep_network
from stampede.engine.planning.planner import describe_plan
from stampede.engine.processes import PATIENCE, processes
from stampede.engine.recipe import described, with_recipe
from stampede.engine.resume import begin, find_beginning
from stampede.engine.run_folder import RunFolder
from stampede.engine.summary import describe, summarize
from stampede.engine.trainer import Trainer


def run(config: Config) -> None:
    """Train, evaluate, write the run folder and print the result.

    Raises:
        SettingsError, DataError, RunFolderError: the user's to mend.
        TrainingStoppedError: training cannot go on.
    """
    folder = RunFolder(Path(config.run.dir) / config.run.name)
    with processes(config.run.device) as here, folder:
        continued = here.on_main(lambda: folder.reserve(config))
        if here.is_main and config.model.import_file:
            print(f"model.import: {config.model.import_file} was executed")
        found = find_beginning(config, folder, continued, here)
        is_new = found.newest is None
        dataset = open_dataset(config, here)
        config, choices = with_recipe(
            config,
            dataset.train.rows,
            len(dataset.vocabulary_sizes),
            here.world_size,
            found.saved,
        )
        job = build(config, dataset, here)
        begun = begin(found, config, job, dataset, here)
        here.on_main(lambda: folder.claim(config) if is_new else folder.write_config(config))
        if begun.report is not None:
            report = begun.report.values()
            here.on_main(lambda: folder.write_report("init_from.json", report))
        here.on_main(lambda: keep_inputs(config, folder.path, replace=is_new))
        here.on_main(lambda: keep_network(config, folder.path, replace=is_new))
        # A run that was killed may have logged steps that will be done again.
        lost = here.on_main(lambda: folder.keep_lines(begun.progress.metrics_lines))
        begun.progress.metrics_lines = folder.metrics_lines
        plan = describe_plan(job.model.plan)
        if here.is_main:
            ids = sum(dataset.vocabulary_sizes.values())
            print(f"{config.run.name}: {dataset.train.rows:,} training rows, {ids:,} ids, {plan}")
            if dataset.features:
                print(textwrap.fill(f"features: {dataset.features}", 98, subsequent_indent="  "))
            if choices:
                print(described(choices))
            print(job.scaling.table())
            print(f"dense layers in {job.precision.reason}")
            for line in [*begun.lines, *lost]:
                print(line)
        with watched(here, config.run, folder.path):
            batch_size, rows = config.train.batch_size, dataset.train.rows
            found_off = on_batch_size(batch_size, rows, here.world_size)
            found_off += here.on_main(lambda: on_data(dataset), patience=PATIENCE)
            tell(found_off, begun.progress.step, folder, here)
            begun.progress.metrics_lines = folder.metrics_lines
            trainer = Trainer(config, dataset, job, here, folder, begun.progress)
            progress = trainer.fit()
            # Its memory and seconds are not those of the training.
            summary = summarize(config, progress, here, dataset, job)
            same_data = not is_new
            summary["logistic_regression"] = compare_with_lr(
                config, dataset, progress, folder, here, same_data=same_data
            )
        summary["advice"] = here.on_main(lambda: told(folder))
        title = (
            f"{config.run.name}: {config.model.name}, batch {config.train.batch_size}, "
            f"{here.world_size} x {here.device.type}"
        )
        here.on_main(lambda: folder.write_results(summary, title))
        if here.is_main:
            print(describe(summary, folder, plan))
