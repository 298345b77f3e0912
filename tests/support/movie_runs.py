"""Small runs on a log with every kind of column, and the rows of its test part as raw files."""

import json
from pathlib import Path

from stampede.engine.config.load import load_config
from stampede.engine.run import run
from support.movies import MOVIES, movies, write_movies
from support.preparing import prepared

ROWS = 600
JOB = [
    "preset=paper",
    "train.epochs=1",
    "data.kind=table",
    "data.validation_fraction=0.2",
    "model.hidden=[16,16]",
    "model.init_std=0.1",
    "train.batch_size=64",
    "evaluate.batch_size=64",
    "evaluate.compare_with_lr=false",
    "optim.embedding.lr=1e-2",
    "optim.dense.lr=1e-3",
    "sharding.plan=table_wise",
]


def train_on_movies(folder: Path, *overrides: str, world_size: int = 1) -> Path:
    """A whole run, as the launcher does it; also as a rank of several. Its folder."""
    path = folder / "movies.yaml"
    config = load_config(path, [*job(folder), *overrides], world_size)
    run(config)
    return folder / config.run.name


def prepare_movies(folder: Path, rows: int = ROWS, schema: str = MOVIES) -> Path:
    """What `train_on_movies` needs in its folder: the log, its schema, a configuration."""
    folder.mkdir(exist_ok=True)
    write_movies(folder / "log.csv", movies(rows))
    (folder / "schema.yaml").write_text(schema)
    (folder / "movies.yaml").write_text("")
    return folder


def prepared_movies(folder: Path) -> Path:
    """The log and its prepared form, whose vocabularies are in files; the folder of that."""
    prepare_movies(folder)
    schema = str(folder / "schema.yaml")
    return prepared(folder / "data", "table", str(folder / "log.csv"), schema=schema)


def job(folder: Path) -> list[str]:
    """Overrides of a run on `log.csv`."""
    paths = [f"data.path={folder}/log.csv", f"data.schema_file={folder}/schema.yaml"]
    return [f"run.dir={folder}", f"data.cache={folder}/cache", *paths, *JOB]


def rows_of_test_part():
    """The rows of the test part, the last tenth."""
    return movies(ROWS)[ROWS - ROWS // 10 :]


def summary_of(run_folder: Path) -> dict:
    """What the run said at its end."""
    return json.loads((run_folder / "summary.json").read_text())
