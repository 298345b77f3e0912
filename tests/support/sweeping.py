"""Small sweeps, their trials in this process."""

import csv
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from stampede.engine.config.load import load_config
from stampede.engine.errors import exit_status
from stampede.engine.run import run
from stampede.engine.sweep.run import run_sweep
from stampede.engine.sweep.spec import load_sweep

JOB = """
preset: paper
data: {scale: 0.0005, rows: 600, test_rows: 200}
model: {hidden: [8], init_std: 1e-4}
train: {batch_size: 256, epochs: 1}
optim: {dense: {lr: 1e-3}}
"""


class Started:
    """Runs trials here, and counts them.

    Args:
        die_at: number of the trial during which the sweep is killed.
    """

    def __init__(self, die_at: int | None = None) -> None:
        self.names: list[str] = []
        self._die_at = die_at

    def __call__(self, arguments, log: Path) -> int:
        name = next(a for a in reversed(arguments) if a.startswith("run.name="))
        self.names.append(name.removeprefix("run.name=").strip('"'))
        if len(self.names) == self._die_at:
            raise SystemExit("killed")
        path, *overrides = arguments
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
            return exit_status(lambda: run(load_config(Path(path), overrides)))


def write_sweep(folder: Path, text: str) -> Path:
    """A sweep file beside its job."""
    (folder / "job.yaml").write_text(JOB)
    path = folder / "tiny.yaml"
    path.write_text(f"config: job.yaml\n{text}")
    return path


def sweep(folder: Path, text: str, start: Started, **options):
    """Run a sweep in a folder; the sweep."""
    found = load_sweep(write_sweep(folder, text), (), folder=folder / "out")
    run_sweep(found, start, **options)
    return found


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Lines of `results.csv` of the sweep in a folder."""
    with (folder / "out/results.csv").open() as file:
        return list(csv.DictReader(file))
