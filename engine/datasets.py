"""The data set that a configuration asks for."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from stampede.data import Dataset, SyntheticClicks
from stampede.data.criteo_kaggle import CriteoSplit, prepare
from stampede.data.prepared.old import cached, open_prepared
from stampede.engine.config import Config
from stampede.engine.config.sections import CriteoKaggleSection, SyntheticSection
from stampede.engine.processes import Processes
from stampede.settings import SettingsError


def open_dataset(config: Config, processes: Processes) -> Dataset:
    """Open the data; rank 0 prepares them if they are not prepared yet.

    Raises:
        SettingsError: no file is given.
        DataError: the file cannot be used.
    """
    section = config.data
    # Rows kept for validation would be lost where nothing is chosen on them.
    selects = config.evaluate.select_on == "validation"
    fraction = section.validation_fraction if selects else 0.0
    if isinstance(section, SyntheticSection):
        dataset = _synthetic(section, fraction)
    else:
        dataset = _criteo_kaggle(section, fraction, processes)
    if selects and dataset.validation is None:
        raise SettingsError(
            f"data.validation_fraction: {fraction} of {dataset.train.rows} training rows is no "
            "row at all; write a larger fraction, or evaluate.select_on=test"
        )
    return dataset


def _synthetic(section: SyntheticSection, validation_fraction: float) -> Dataset:
    clicks = SyntheticClicks(seed=section.seed, scale=section.scale, zipf=section.zipf)
    return clicks.dataset(section.rows, section.test_rows, int(section.rows * validation_fraction))


def _criteo_kaggle(
    section: CriteoKaggleSection, validation_fraction: float, processes: Processes
) -> Dataset:
    if not section.path:
        raise SettingsError("data.path is not given; write data.path=FILE after the config file")
    source = Path(section.path)
    split = CriteoSplit(section.split, section.seed, validation_fraction)
    folder = processes.on_main(
        lambda: cached(source, split, lambda: prepare(source, split), Path(section.cache)),
        patience=timedelta(hours=6),
    )
    return open_prepared(folder)
