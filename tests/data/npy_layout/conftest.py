"""TorchRec's own readers, and a folder to export."""

import builtins
import sys
import types

import pytest

from support.prepared import drawn_fields, drawn_rows, write_prepared


@pytest.fixture
def criteo(monkeypatch):
    """TorchRec's module; where iopath is absent, which it opens local files with, `open` does."""
    try:
        import iopath  # noqa: F401
    except ImportError:
        manager = types.SimpleNamespace(
            open=builtins.open, set_strict_kwargs_checking=lambda _: None
        )
        factory = types.SimpleNamespace(get=lambda _: manager)
        file_io = types.ModuleType("iopath.common.file_io")
        file_io.PathManagerFactory = lambda: factory
        file_io.PathManager = object
        for name in ("iopath", "iopath.common"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "iopath.common.file_io", file_io)
    return pytest.importorskip("torchrec.datasets.criteo")


@pytest.fixture
def prepared(tmp_path):
    rows = {"train": 250, "validation": 40, "test": 71}
    parts = {
        part: drawn_rows(count, single=26, numbers=13, seed=seed)
        for seed, (part, count) in enumerate(rows.items())
    }
    folder = tmp_path / "prepared"
    write_prepared(folder, parts, drawn_fields(single=26), shard_rows=100)
    return folder
