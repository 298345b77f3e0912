"""The data set that a configuration asks for."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stampede.data import Dataset, SyntheticClicks
from stampede.data.learning.row_meanings import vocabulary_fingerprint
from stampede.data.prepare import prepare
from stampede.data.prepared.manifest import FORMAT, MANIFEST
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.verify import check_unchanged
from stampede.data.schema.schema import is_multi
from stampede.data.sources import Source, fingerprint, open_source
from stampede.engine.config import Config
from stampede.engine.config.data import (
    PreparedSection,
    RawSection,
    SizesSection,
    SyntheticSection,
)
from stampede.engine.processes import PATIENCE, Processes
from stampede.settings import SettingsError


def open_dataset(config: Config, processes: Processes) -> Dataset:
    """Open the data; rank 0 prepares them if they are not prepared yet.

    Raises:
        SettingsError: no file is given.
        DataError: the file cannot be used.
    """
    section = config.data
    selects = config.evaluate.select_on == "validation"
    if isinstance(section, SizesSection):
        raise SettingsError(
            "data.kind is 'sizes', which has no clicks to train on; plan it with `launch.py --plan "
            "--world-size N --device-memory SIZE`, or choose another data.kind"
        )
    if isinstance(section, SyntheticSection):
        dataset = _synthetic(section, selects)
    else:
        _check_path(section)
        if isinstance(section, PreparedSection):
            folder = Path(section.path)
        else:
            raw = _used(section, selects)
            # A preparation may take hours; what is wrong with the configuration is said before.
            group_by = config.evaluate.group_by
            folder = processes.on_main(lambda: _prepared(raw, group_by), patience=PATIENCE)
        processes.on_each_machine(lambda: check_unchanged(folder, _say), PATIENCE)
        dataset = replace(
            open_prepared(folder),
            vocabulary_sha256=processes.on_main(
                lambda: vocabulary_fingerprint(folder), patience=PATIENCE
            ),
        )
    if dataset.train.rows == 0 or dataset.test.rows == 0:
        raise SettingsError(
            "data: the training or the test part has no row; write data.split=random, or another "
            "data.test_fraction"
        )
    if selects and dataset.validation is None:
        raise SettingsError(
            f"the data have no validation part ({dataset.train.rows} training rows); write a "
            "larger data.validation_fraction, or evaluate.select_on=test"
        )
    _check_groups(config.evaluate.group_by, dataset.vocabulary_sizes, dataset.multi)
    return dataset


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_groups(field: str, fields: Iterable[str], multi: Collection[str]) -> None:
    single = [name for name in fields if name not in multi]
    if field and field not in single:
        found = "a field of several ids" if field in multi else "no id field"
        raise SettingsError(
            f"evaluate.group_by: {field!r} is {found}; write one of {', '.join(single)}"
        )


def _synthetic(section: SyntheticSection, selects: bool) -> Dataset:
    clicks = SyntheticClicks(seed=section.seed, scale=section.scale, zipf=section.zipf)
    fraction = section.validation_fraction if selects else 0.0
    return clicks.dataset(section.rows, section.test_rows, int(section.rows * fraction))


def check_files(config: Config) -> None:
    """Check that the files of raw logs are there, without preparing them.

    Raises:
        SettingsError: no file is given.
        DataError: a file is absent.
    """
    if isinstance(config.data, RawSection | PreparedSection):
        _check_path(config.data)
    if isinstance(config.data, RawSection):
        _check_groups_of_log(config.evaluate.group_by, _source(config.data))


def _check_groups_of_log(group_by: str, source: Source) -> None:
    ids = source.log.schema.ids
    _check_groups(group_by, ids, {name for name, field in ids.items() if is_multi(field)})


def data_folder(config: Config) -> Path:
    """The folder with the prepared data, without preparing them.

    Raises:
        SettingsError: no file is given, or it is not prepared yet.
        DataError: a file is absent.
    """
    section = config.data
    _check_path(section)
    if isinstance(section, PreparedSection):
        return Path(section.path)
    raw = _used(section, config.evaluate.select_on == "validation")
    folder = _folder(raw, _source(raw))
    if not (folder / MANIFEST).exists():
        raise SettingsError(
            f"data.path: {section.path} is not prepared yet (no {folder}), so the rows of its "
            "tables are not known. Train on it once, which prepares it; or prepare it by hand "
            f"with `stampede prepare {section.kind} FILE --out FOLDER` and write "
            "data.kind: prepared and data.path: FOLDER; or give the sizes by hand, as "
            "configs/plan_10b.yaml does"
        )
    return folder


def _check_path(section: RawSection | PreparedSection) -> None:
    if not section.path:
        raise SettingsError("data.path is not given; write data.path=FILE after the config file")


def _used(section: RawSection, selects: bool) -> RawSection:
    """Rows kept for validation would be lost where nothing is chosen on them."""
    return section if selects else section.model_copy(update={"validation_fraction": 0.0})


def _prepared(section: RawSection, group_by: str) -> Path:
    """The folder with the prepared form of a log, made on first use."""
    source = _source(section)
    _check_groups_of_log(group_by, source)
    folder = _folder(section, source)
    prepare(source, section, folder)
    return folder


def _source(section: RawSection) -> Source:
    return open_source(
        section.kind,
        section.path,
        section,
        schema=getattr(section, "schema_file", ""),
        split_hour=getattr(section, "split_hour", None),
        features=section.features,
    )


def _folder(section: RawSection, source: Source) -> Path:
    """Its name holds a hash of the log and of all that the result depends on besides."""
    described = {
        "format": FORMAT,
        "on_bad_row": section.on_bad_row,
        "numbers_dtype": section.numbers_dtype,
        "shard_rows": section.shard_rows,
        **source.described(),
    }
    name = f"{_stem(source.log.files)}-{fingerprint(source.log.files, described)}"
    return Path(section.cache) / name


def _stem(files: Sequence[Path]) -> str:
    return files[0].name.split(".")[0] or "log"
