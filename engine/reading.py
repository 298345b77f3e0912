"""Opens the data set of a configuration, and the batches that each rank reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from stampede import stores
from stampede.data import DataError, Dataset, GlobalBatches, Order, Part
from stampede.data.learning.row_meanings import vocabulary_fingerprint
from stampede.data.on_spark import engine_of
from stampede.data.prepare import prepare
from stampede.data.prepared.manifest import FORMAT, MANIFEST, read_manifest
from stampede.data.prepared.reader import ShardedPart, open_prepared
from stampede.data.prepared.streaming import (
    StreamedPart,
    is_streamed,
    make_files,
    open_streamed,
)
from stampede.data.prepared.verify import check_unchanged
from stampede.data.residence import Readahead, choose_residence, make_order, part_bytes, place
from stampede.data.sources import Source, fingerprint
from stampede.engine.config import (
    Config,
    check_columns,
    check_goals,
    check_groups,
    goal_weights,
)
from stampede.engine.config.data import (
    PreparedSection,
    RawSection,
    ReadingSection,
    SizesSection,
    SyntheticSection,
)
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import Processes, together
from stampede.files import remove, sha256
from stampede.settings import SettingsError

# Batches read ahead, in page-locked memory for a GPU.
_AHEAD = 2

# Keys that decide the order of training rows and that a resumed run may change.
_ORDERING = ("shuffle", "memory_gb", "cache_gb")

# Rows whose weights are checked at a time.
_PIECE = 1 << 20


class Reader:
    """Opens the parts of a data set for training and evaluation, as this rank of a run.

    Make it after model and optimizers have their memory: `data.residence: auto` puts the data on
    the GPU if they fit into what is left.

    Attributes:
        dataset: in the place that `data.residence` names.
        residence: `disk`, `memory` or `device`.
    """

    def __init__(self, config: Config, dataset: Dataset, processes: Processes) -> None:
        # The defaults for data without files.
        section = config.data if isinstance(config.data, ReadingSection) else ReadingSection()
        for name, part in (("validation", dataset.validation), ("test", dataset.test)):
            if part is not None:
                _check_weighted(name, part, goal_weights(config, dataset.goals))
        self._config, self._section, self._processes = config, section, processes
        # From the data as opened: independent of their residence.
        self._order = self._order_of(
            dataset.train, section.shuffle if dataset.shuffle else "rotate"
        )
        self.residence = choose_residence(
            section.residence, dataset, section.memory_gb * 1e9, processes.device
        )
        try:
            self.dataset = place(dataset, self.residence, processes.device)
        except torch.OutOfMemoryError:
            raise SettingsError(
                "data.residence: found 'device', but the data do not fit into the free memory of "
                f"{processes.device}; write data.residence=memory or disk"
            ) from None

    @property
    def cached_bytes(self) -> float:
        """Bytes of the system's cache that the data are to stay in while they are used."""
        if self.residence == "device":
            return 0.0
        size = sum(map(part_bytes, self.dataset.parts().values()))
        return min(size, self._section.memory_gb * 1e9)

    def training(self) -> GlobalBatches:
        """Batches of the training part, in a new order in each epoch."""
        return self._batches(self.dataset.train, self._order, self._config.train.batch_size)

    def evaluation(self, part: Part) -> GlobalBatches:
        """Batches of a part of `dataset` in the order of its rows."""
        order = self._order_of(part, "none")
        return self._batches(part, order, self._config.evaluate.batch_size)

    def state_dict(self, batches: GlobalBatches) -> dict[str, Any]:
        """State of the training batches, and the settings that decide their order."""
        settings = {key: getattr(self._section, key, None) for key in _ORDERING}
        return {**batches.state_dict(), "settings": settings}

    def load_state_dict(self, batches: GlobalBatches, state: Mapping[str, Any]) -> None:
        """Continue the training batches from a state."""
        settings, order = state.get("settings"), state.get("order")
        if settings and order and Order(**order).deciding() != self._order.deciding():
            now = {key: getattr(self._section, key, None) for key in _ORDERING}
            told = [key for key in now if not now[key] is settings.get(key) is None]
            here, before = (
                " ".join(f"data.{key}={of.get(key) or 'null'}" for key in told)
                for of in (now, settings)
            )
            raise RunFolderError(
                f"{here} puts the training rows into another order than the run so far; write "
                f"{before} as in the checkpoint and use the same data, or choose another run.name"
            )
        batches.load_state_dict(state)

    def _order_of(self, part: Part, shuffle: str) -> Order:
        memory = self._section.memory_gb
        if isinstance(part, StreamedPart):
            # Four windows are here, and at most three parts.
            share = 4 if shuffle == "none" else 2
            memory = min(memory, self._section.cache_gb / share)
        return make_order(part, shuffle, memory * 1e9, self._config.run.seed)

    def _batches(self, part: Part, order: Order, batch_size: int) -> GlobalBatches:
        from_disk = self.residence == "disk" and isinstance(part, ShardedPart)
        on_gpu = self._processes.device.type == "cuda"
        copied = on_gpu and part.device.type == "cpu"
        train = self._config.train
        return GlobalBatches(
            part,
            list(self.dataset.vocabulary_sizes),
            batch_size,
            self._processes.rank,
            self._processes.world_size,
            order,
            # Without a GPU, training keeps all cores busy: a thread would not help.
            ahead=_AHEAD if copied or from_disk else 0,
            pin=self._processes.device if copied else None,
            before_reading=Readahead(part, order) if from_disk else None,
            unknown_rows=self.dataset.unknown_rows,
            tiles=train.tiles if train.reproducible else 0,
        )


def _check_weighted(name: str, part: Part, goals: Mapping[str, float]) -> None:
    """Refuse a part without a weight above 0 and a label, before training, as in `evaluate`.

    The first rows usually suffice.
    """
    chosen = [goal for goal, weight in goals.items() if weight]
    for start in range(0, part.rows, _PIECE):
        rows = torch.arange(start, min(start + _PIECE, part.rows), device=part.device)
        weights = part.weight(rows)
        known = torch.ones((), dtype=torch.bool, device=part.device)
        if goals:
            columns = torch.tensor([goal in chosen for goal in goals], device=part.device)
            known = ~part.label(rows)[:, columns].isnan().all(1)
        if bool((known if weights is None else weights * known).any()):
            return
    if goals:
        raise DataError(
            f"no sample of the {name} part has a weight above 0 and a label of "
            f"{', '.join(chosen)}, so its logloss is undefined; split the data differently, or "
            "write other evaluate.select_goals"
        )
    raise DataError(
        f"all {part.rows:,} samples of the {name} part have weight 0, so its logloss is "
        "undefined; give some a weight above 0, or split the data differently"
    )


def open_dataset(config: Config, processes: Processes) -> Dataset:
    """Open the data; rank 0 prepares them if need be."""
    section, selects = config.data, _selects_on_validation(config)
    if isinstance(section, SizesSection):
        raise SettingsError(
            "data.kind is 'sizes', which has no clicks to train on; plan it with `launch.py --plan "
            "--world-size N --device-memory SIZE`, or choose another data.kind"
        )
    if isinstance(section, SyntheticSection):
        validation = int(section.rows * section.validation_fraction) if selects else 0
        dataset = section.clicks().dataset(section.rows, section.test_rows, validation)
    else:
        section.check_path()
        place = processes.on_main(lambda: prepared(config))
        processes.on_each_machine(lambda: _fetched(section, place))
        folder = stores.local(place)
        say = partial(print, file=sys.stderr, flush=True)
        _check_same_folder(folder, processes)
        processes.on_each_machine(lambda: check_unchanged(folder, say))
        hashed = processes.on_main(lambda: vocabulary_fingerprint(folder))
        dataset = replace(_opened(section, place, processes), vocabulary_sha256=hashed)
        dataset = _last_rows(dataset, section.train_rows)
    if dataset.train.rows == 0 or dataset.test.rows == 0:
        raise SettingsError(
            "data: the training or the test part has no rows; write data.split=random, or "
            "another data.test_fraction"
        )
    if selects and dataset.validation is None:
        raise SettingsError(
            f"the data have no validation part ({dataset.train.rows} training rows); write a "
            "larger data.validation_fraction, or evaluate.select_on=test"
        )
    multi = {name: name in dataset.multi for name in dataset.vocabulary_sizes}
    check_groups(config.evaluate.group_by, multi)
    check_goals(config, dataset.goals)
    return dataset


def _fetched(section: RawSection | PreparedSection, place: str) -> Path:
    """The prepared data of a folder or URL here, without the rows that are streamed."""
    if getattr(section, "cache_gb", None) is not None:
        folder = stores.fetched(place, without=is_streamed)
        if _is_streamed(section, folder):
            return folder
    return stores.fetched(place)


def _is_streamed(section: RawSection | PreparedSection, folder: Path) -> bool:
    """Whether the rows of prepared data are fetched while they are read."""
    most = getattr(section, "cache_gb", None)
    if most is None:
        return False
    manifest = read_manifest(folder)
    return most * 1e9 < sum(one.bytes for of in manifest.shards() for one in of.files.values())


def _opened(section: RawSection | PreparedSection, place: str, processes: Processes) -> Dataset:
    """The prepared data of a folder or URL, which `_fetched` has brought here."""
    folder = stores.local(place)
    if not _is_streamed(section, folder):
        return open_prepared(folder)
    manifest = read_manifest(folder)
    for key, found, wanted in (
        ("residence", section.residence, ("auto", "disk")),
        ("shuffle", section.shuffle, ("auto", "block", "none")),
    ):
        if found not in wanted:
            raise SettingsError(
                f"data.{key}: found {found!r}, which needs all rows at once; write "
                f"{' or '.join(wanted)}, or data.cache_gb=null to copy them before training"
            )
    if manifest.period:
        raise SettingsError(
            "data.cache_gb: delete it; a period is scored and trained on as a whole"
        )
    files = stores.scratch(f"{processes.on_main(lambda: uuid4().hex)}_{processes.host_number}")
    opening = partial(open_streamed, place.rstrip("/"), files, section.cache_gb * 1e9)
    opened: list[Dataset] = []
    try:
        processes.on_each_machine(lambda: make_files(files, manifest))
        together(lambda: opened.append(open_prepared(folder, opening)), processes.group)
    finally:
        # Once all have opened the files, they need no names: a killed run leaves nothing behind.
        if processes.is_first_of_host:
            remove(files)
    return opened[0]


def _last_rows(dataset: Dataset, most: int | None) -> Dataset:
    """The dataset with at most so many training rows, the last ones."""
    train = dataset.train
    if most is None or most >= train.rows or not isinstance(train, ShardedPart):
        return dataset
    if dataset.period:
        raise SettingsError(
            "data.train_rows: delete it; a period is scored and trained on as a whole"
        )
    return replace(dataset, train=train.last(most))


def _check_same_folder(folder: Path, processes: Processes) -> None:
    """Check that all hosts have the same prepared data, whose files the manifest describes."""

    def manifest() -> str:
        file = folder / MANIFEST
        return sha256(file) if file.is_file() else ""

    on_main = processes.on_main(manifest)

    def compare() -> None:
        here = manifest()
        if here != on_main:
            found = "these data differ from those" if here else "no prepared data here, unlike"
            raise DataError(
                f"{folder.absolute()}: {found} on {processes.hosts[0]}, the host of rank 0; mount "
                "one folder on all hosts at the same place, or copy it to all, and name it in "
                "data.path, or in data.cache for a raw log"
            )

    processes.on_each_machine(compare)


def prepared(config: Config) -> str:
    """The folder or URL of the prepared data; a log is prepared on first use."""
    if isinstance(config.data, PreparedSection):
        return config.data.path
    section, source, folder = _log(config)
    # Preparing may take hours; mistakes in the configuration are reported first.
    check_columns(config, source)
    if not (stores.is_url(folder) and stores.exists(os.path.join(folder, MANIFEST))):
        with engine_of(section.spark, "data.spark") as engine:
            prepare(source, section, stores.local(folder), engine)
        stores.published(folder, anew=True)
    return folder


def data_folder(config: Config, with_rows: bool = False) -> Path:
    """The folder with the prepared data; prepares nothing.

    Args:
        with_rows: also those of `data.cache_gb`.
    """
    section = config.data
    section.check_path()
    if isinstance(section, PreparedSection):
        return stores.fetched(section.path) if with_rows else _fetched(section, section.path)
    *_, place = _log(config)
    if stores.is_url(place) and stores.exists(os.path.join(place, MANIFEST)):
        stores.fetched(place)
    folder = stores.local(place)
    if not (folder / MANIFEST).exists():
        raise SettingsError(
            f"data.path: {section.path} is not prepared yet (no {place}), so the rows of its "
            "tables are not known. Train on it once, which prepares it; or prepare it by hand "
            f"with `stampede prepare {section.kind} FILE --out FOLDER` and write "
            "data.kind: prepared and data.path: FOLDER; or give the sizes by hand, as "
            "configs/plan_10b.yaml does"
        )
    return folder


def first_time(section: RawSection, file: Path) -> int | None:
    """The smallest time among the first rows of a file of a log, seconds since 1970."""
    source = section.model_copy(update={"path": str(file)}).source()
    if source.log.schema.time is None:
        raise SettingsError(
            "data.order_by: found 'time', but the schema names no time; write `time: {column: "
            "NAME}` in it, or data.order_by=name"
        )
    return source.log.first_time()


def _selects_on_validation(config: Config) -> bool:
    """Whether a validation part is needed; a period needs none."""
    in_periods = getattr(config.data, "split", "") == "periods"
    return config.evaluate.select_on == "validation" and not in_periods


def _log(config: Config) -> tuple[RawSection, Source, str]:
    """A log as it is prepared, and the folder or URL for the result.

    The folder is named after a hash of the log and of all else that the result depends on.
    """
    section = config.data
    if not _selects_on_validation(config):
        section = section.model_copy(update={"validation_fraction": 0.0})
    source = section.source()
    described = {
        "format": FORMAT,
        "on_bad_row": section.on_bad_row,
        "numbers_dtype": section.numbers_dtype,
        "shard_rows": section.shard_rows,
        **source.described(),
    }
    stem = source.log.files[0].name.split(".")[0] or "log"
    hashed = fingerprint(source.log.files, described)
    return section, source, os.path.join(section.cache, f"{stem}-{hashed}")
