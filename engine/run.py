"""One run, from a configuration to its results."""

from __future__ import annotations

from pathlib import Path

from stampede.engine import checkpoint
from stampede.engine.build import Job, build
from stampede.engine.checkpoint import Progress
from stampede.engine.config import Config
from stampede.engine.curve import draw_curve
from stampede.engine.datasets import open_dataset
from stampede.engine.plan import describe_plan
from stampede.engine.processes import Processes, processes
from stampede.engine.run_folder import RunFolder
from stampede.engine.summary import describe, summarize
from stampede.engine.trainer import Trainer


def run(config: Config) -> None:
    """Train, evaluate, write the run folder and print the result.

    Raises:
        ConfigError, DataError, RunFolderError: the user's to mend.
        TrainingStoppedError: training cannot go on.
    """
    with processes(config.run.device) as here:
        folder = RunFolder(Path(config.run.dir) / config.run.name)
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        here.on_main(lambda: folder.claim(config))
        progress = Progress()
        newest = here.on_main(lambda: checkpoint.newest(folder.checkpoints))
        changed: list[str] = []
        if newest is not None:
            progress, changed = checkpoint.load(newest, job, config, dataset)
            here.on_main(lambda: folder.write_config(config))
        # A run that was killed may have logged steps that will be done again.
        here.on_main(lambda: folder.cut_after(progress.step))
        plan = describe_plan(job.model.plan)
        if here.is_main:
            ids = sum(dataset.vocabulary_sizes.values())
            print(f"{config.run.name}: {dataset.train.rows:,} training rows, {ids:,} ids, {plan}")
            print(_describe_scaling(config, job))
            if newest is not None:
                print(f"continuing after epoch {progress.epoch} from {newest}")
            for line in changed:
                print(f"changed since then: {line}")
        progress = Trainer(config, dataset, job, here, folder, progress).fit()
        summary = summarize(config, progress, here)
        if here.is_main:
            _write_results(config, here, folder, summary, plan)


def _write_results(
    config: Config, here: Processes, folder: RunFolder, summary: dict, plan: str
) -> None:
    folder.write_summary(summary)
    title = f"{config.run.name}: {config.model.name}, batch {config.train.batch_size}"
    draw_curve(folder.lines(), f"{title}, {here.world_size} x {here.device.type}", folder.curve)
    folder.close()
    print(describe(summary, folder, plan))


def _describe_scaling(config: Config, job: Job) -> str:
    scaling = config.optim.scaling
    changes = ", ".join(
        f"{name} {before:.3g} -> {getattr(job.actual, name):.3g}"
        for name, before in vars(job.base).items()
    )
    return (
        f"scaling rule {scaling.rule}, batch {scaling.base_batch_size} -> "
        f"{config.train.batch_size}: {changes}"
    )
