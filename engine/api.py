# pyright: basic
"""Training and trained runs from Python: `from stampede import train, open_run`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cached_property
from importlib import import_module
from itertools import chain, count
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pandas as pd
import polars as pl
import pyarrow

from stampede import stores
from stampede.data.errors import DataError
from stampede.engine.config import Config
from stampede.engine.config.load import check_config, load_config_of_run, set_key
from stampede.engine.errors import RunFolderError
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.start_up import importing, launched_world_size, libraries_quiet
from stampede.settings import SettingsError, read_yaml, reading

if TYPE_CHECKING:
    from stampede.data.prepared.manifest import PartName
    from stampede.engine.inference.options import OnBadValue, RowType
    from stampede.engine.inference.trained import Trained

# Keys of an evaluation's line that are not metrics.
_NOT_METRICS = ("kind", "part", "step", "train_seconds", "samples", "goals")
_FRAMES = pd.DataFrame | pl.DataFrame | pyarrow.Table
_FIRST_COLUMNS = ("epoch", "step", "train_seconds", "train_loss")


def train(
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    /,
    *,
    after_epoch: Callable[[Mapping[str, dict[str, Any]]], bool | None] | None = None,
    **sections: Any,
) -> Run:
    """Train like `python launch.py`, with the same output, and open the run.

    Without `run.name` the run gets a free name: the file's (`run` without a file), then
    `quickstart-2` and so on. A second call replaces nothing.

    Args:
        config: path of a YAML file, or a dict of sections; `{"train.epochs": 3}` works too.
        sections: replace values of it, as in `train={"epochs": 3}`; without `config` they are the
            whole configuration.
        after_epoch: called on rank 0 with the metrics by part, such as
            `metrics["validation"]["auc"]`, after each epoch that was evaluated. If it returns True,
            training ends as if that epoch were the last.

    Returns:
        The run, with its results. Hosts that share no folder fetch it from its store.

    Raises:
        SettingsError, DataError, RunFolderError: what is wrong, and what to write instead.
        TrainingStoppedError: training failed.
    """
    with importing():
        from stampede.engine.run import run

    checked = configuration(config, **sections)
    with libraries_quiet():
        folder = run(checked, after_epoch)
    # A host without a folder that it shares with that of rank 0 has no file of the run.
    return Run(folder.path) if folder.config_file.is_file() else open_run(folder.url)


def configuration(
    config: str | PathLike[str] | Mapping[str, Any] | None = None, /, **sections: Any
) -> Config:
    """The checked configuration that `train` would train.

    Raises:
        SettingsError: what is wrong, key by key.
    """
    # Messages begin with the source.
    source, values = Path("configuration"), {}
    if config is None or isinstance(config, Mapping):
        _merge(values, config or {}, ())
    else:
        source = Path(config)
        values = read_yaml(source, "write the path of a YAML file, or a dict of sections")
    _merge(values, sections, ())
    world_size = launched_world_size()
    named = "name" in (values.get("run") or {})
    if not named and (config is None or isinstance(config, Mapping)):
        set_key(values, ["run", "name"], "run")
    checked = check_config(values, source, world_size)
    if named or checked.run.overwrite or checked.checkpoint.resume == "auto" or world_size > 1:
        return checked
    names = chain([checked.run.name], (f"{checked.run.name}-{number}" for number in count(2)))
    name = next(name for name in names if not stores.exists(os.path.join(checked.run.dir, name)))
    return checked.model_copy(update={"run": checked.run.model_copy(update={"name": name})})


def _merge(values: dict[str, Any], given: Mapping[str, Any], above: tuple[str, ...]) -> None:
    """Merge values into a configuration; a mapping is a section and keeps its other keys."""
    for key, value in given.items():
        parts = (*above, *str(key).split("."))
        if isinstance(value, Mapping) and value:
            _merge(values, value, parts)
        elif isinstance(value, _FRAMES):
            raise SettingsError(
                f"{'.'.join(parts)}: found a data frame, but training reads files; write it to "
                'one, such as log.parquet, and pass data={"kind": "table", "path": "log.parquet", '
                '"schema_file": "schema.yaml"}'
            )
        else:
            plain = str(value) if isinstance(value, PathLike) else deepcopy(value)
            set_key(values, parts, plain)


def open_run(path: str | PathLike[str], *, allow_import: bool = False) -> Run:
    """Open a run folder.

    Args:
        path: such as `runs/quickstart`, or its URL in a store.
        allow_import: allow to execute the Python file of a run with its own network.

    Raises:
        RunFolderError: there is no such run.
    """
    return Run(stores.fetched(path), allow_import=allow_import)


class Run:
    """A trained run.

    Scores, embeddings and exports come from the checkpoint of the selected epoch.

    Args:
        path: the run folder.
        allow_import: see `open_run`.

    Attributes:
        path: the run folder.

    Raises:
        RunFolderError: the folder holds no run.
    """

    def __init__(self, path: Path, *, allow_import: bool = False) -> None:
        self.path = path
        self._folder = RunFolder(path)
        self._allow_import = allow_import
        if not self._folder.config_file.is_file():
            raise RunFolderError(
                f"{path}: there is no run ({self._folder.config_file.name} is missing); write a "
                "run folder such as runs/quickstart"
            )

    def __repr__(self) -> str:
        if not self._folder.summary.is_file():
            return f"Run({str(self.path)!r}, not finished)"
        aucs = {part: metrics["auc"] for part, metrics in self.metrics.items()}
        said = ", ".join(f"{part} AUC {auc:.4f}" for part, auc in aucs.items() if auc is not None)
        return f"Run({str(self.path)!r}, epoch {self.summary['best_epoch']}: {said})"

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`.

        Raises:
            RunFolderError: the run has not ended, or the file is damaged.
        """
        file, remedy = self._folder.summary, "continue the run with checkpoint.resume=auto"
        if not file.exists():
            what = f"the run has not ended ({file.name} is missing)"
            raise RunFolderError(f"{self.path}: {what}; {remedy}")
        with reading(file, RunFolderError, f"delete it and {remedy}"):
            return self._folder.read_summary()

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Metrics of the selected epoch by part: `validation`, if there is one, and `test`.

        Those of the last epoch are in `summary["last"]`.

        Raises:
            RunFolderError: as `summary`.
        """
        from stampede.engine.metrics import selected_metrics

        return selected_metrics(self.summary)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, each of a `kind`; none before the first.

        Raises:
            RunFolderError: `metrics.jsonl` is damaged.
        """
        remedy = "repair the line or leave the run out"
        with reading(self._folder.metrics, RunFolderError, remedy):
            return self._folder.lines()

    @property
    def history(self) -> pd.DataFrame:
        """A row for each evaluation, in order.

        Columns: `epoch`, from 1, in or after which it was made; `step`; `train_seconds`, spent in
        training until then; `train_loss`, the mean of the losses logged since the evaluation
        before; and each metric of each part, such as `validation_auc` and `test_logloss`, and with
        several goals of each goal, such as `test_click_auc`.
        Unknown values are NaN.

        Raises:
            RunFolderError: `metrics.jsonl` is damaged.
        """
        rows: dict[int, dict[str, Any]] = {}
        epoch, losses = 1, []
        for line in self.lines:
            if line["kind"] == "train":
                epoch = line.get("epoch", epoch)
                if line["loss"] is not None:
                    losses.append(line["loss"])
            elif line["kind"] == "evaluation":
                # The parts of one evaluation share a row.
                if line["step"] not in rows:
                    loss, losses = fmean(losses) if losses else None, []
                    first = (epoch, line["step"], line["train_seconds"], loss)
                    rows[line["step"]] = dict(zip(_FIRST_COLUMNS, first, strict=True))
                of_goals = line.get("goals") or {}
                for prefix, of_goal in {"": line, **of_goals}.items():
                    rows[line["step"]] |= {
                        f"{line['part']}_{prefix}{'_' * bool(prefix)}{name}": value
                        for name, value in of_goal.items()
                        if name not in _NOT_METRICS and not isinstance(value, list)
                    }
        return pd.DataFrame(list(rows.values()), columns=None if rows else _FIRST_COLUMNS)

    @property
    def config(self) -> Config:
        """The configuration, defaults filled in."""
        if self._allow_import:
            return self._trained.config
        return load_config_of_run(self._folder.config_file)

    def score(
        self,
        data: pd.DataFrame | pl.DataFrame | pyarrow.Table | str | PathLike[str] | list[str],
        *,
        batch_size: int = 8192,
        on_bad_value: OnBadValue = "error",
    ) -> np.ndarray:
        """Probabilities of a click, `[n]` float64, of all rows in order.

        Of a model with several goals they are `[n, goals]`, in the order of `goals`.

        Args:
            data: a frame with the columns of the training log (the label is optional), names of raw
                files or globs of them, or one prepared folder, whose test part is scored.
            batch_size: rows scored at a time.
            on_bad_value: `missing` treats raw values that cannot be used as missing,
                and warns how many there were.

        Prints the shares of missing and unseen ids of raw rows, and warns if one is far above that
        of the validation part.

        Raises:
            DataError: it lacks a column, or a value cannot be used.
            RunFolderError: the run has no checkpoint, or it is damaged.
            ValueError: there is no such `on_bad_value`.
        """
        from stampede.engine.inference.options import OnBadValue
        from stampede.engine.inference.prediction import score

        if batch_size < 1:
            raise SettingsError(f"batch_size: found {batch_size}; write a number of at least 1")
        if on_bad_value not in get_args(OnBadValue):
            raise ValueError(f"on_bad_value: found {on_bad_value!r}; write 'error' or 'missing'")
        with libraries_quiet():
            if not isinstance(data, _FRAMES):
                data = [*data] if isinstance(data, list | tuple) else [data]
                for one in data:
                    # A UPath of a store is no PathLike, but has a protocol.
                    if not (isinstance(one, str | PathLike) or hasattr(one, "protocol")):
                        raise DataError(
                            f"the rows to score: found {type(one).__name__}; pass a pandas, polars "
                            "or Arrow frame, or names of files"
                        )
                data = [str(name) for name in data]
            scores, missing, unknown = score(
                self._trained, self._model, data, batch_size, on_bad_value
            )
        if unknown is not None:
            print("; ".join(": ".join(line) for line in unknown.lines.items()), file=sys.stderr)
            for sentence in unknown.warnings:
                warnings.warn(sentence, stacklevel=2)
        if missing:
            told = ", ".join(f"{count:,} of {column}" for column, count in missing.items())
            warnings.warn(f"bad values treated as missing: {told}", stacklevel=2)
        return scores

    @property
    def goals(self) -> list[str]:
        """Names of the goals, in the order of the scores; none for a single label."""
        return list(self._trained.data.goals)

    @property
    def fields(self) -> dict[str, int]:
        """Rows of each id field's table, by field."""
        return dict(self._trained.data.vocabulary_sizes)

    def embeddings(self, field: str) -> pd.DataFrame:
        """Embeddings of an id field, `[rows of its table, dim]` float32.

        The index holds the ids as they are in the log, `<missing>` and `<rare or unseen>`; for
        hashed ids and buckets it holds row numbers.

        Raises:
            RunFolderError: there is no such field, or no checkpoint.
        """
        from stampede.engine.inference.kept import inputs_folder, row_names
        from stampede.engine.tables import read_field

        trained = self._trained
        weights = read_field(trained.checkpoint, field).embedding.numpy()
        inputs = inputs_folder(trained.config, trained.run)
        names = row_names(inputs, field, len(weights))
        return pd.DataFrame(weights, index=pd.Index(names, name=field))

    def importance(
        self,
        *,
        part: PartName = "test",
        rows: int = 100_000,
        repeats: int = 5,
        goal: str | None = None,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Permutation importance: what the model loses if a column's values are shuffled.

        All inputs made from a column of the log are shuffled together. Needs the run's own data.

        Args:
            part: of the run's data.
            rows: at most; of a larger part, rows that `seed` draws.
            repeats: shuffles of each column, at least 2.
            goal: of several; by default the one with the largest weight in `evaluate.select_goals`.

        Returns:
            A row for each column, the most important first: `auc_lost` and `logloss_added`, means
            over the repeats, and `auc_error` and `logloss_error`, their standard errors. `attrs`
            has the `auc` and `logloss` of the rows as they are, and how many `rows` were used.

        Raises:
            DataError, RunFolderError: the data or the checkpoint are not there.
            SettingsError: there is no such goal, or a number is too small.
        """
        from stampede.engine.inference.importance import permutation_importance

        asked = {"part": part, "rows": rows, "repeats": repeats, "goal": goal, "seed": seed}
        with libraries_quiet():
            return permutation_importance(self._trained, self._model, **asked)

    def report(self, folder: str | PathLike[str] | None = None) -> Path:
        """Write the page of pictures and tables, by default into `report` in the run folder.

        Returns:
            `report.html`.

        Raises:
            RunFolderError: it cannot be written, or a file of the run cannot be read.
        """
        folder = self.path / "report" if folder is None else Path(folder)
        return import_module("stampede.lab.report.page").report_on(self.path, folder)

    def export(
        self, folder: str | PathLike[str], rows: RowType = "fp32", *, overwrite: bool = False
    ) -> Path:
        """Write a folder that scores without stampede, see `stampede export --help`.

        Returns:
            The folder.

        Raises:
            RunFolderError, DataError: the folder exists, or cannot be written.
        """
        from stampede.engine.inference.packaging import export

        with libraries_quiet():
            export(self._trained, Path(folder), rows, overwrite)
        return Path(folder)

    @cached_property
    def _trained(self) -> Trained:
        with importing():
            from stampede.engine.inference.trained import open_trained

        with libraries_quiet():
            return open_trained(self.path, allow_import=self._allow_import)

    @cached_property
    def _model(self) -> Any:
        from stampede.engine.inference.trained import whole_model
        from stampede.engine.processes import choose_device

        return whole_model(self._trained, choose_device("auto", "run.device"))
