"""Patterns of file names."""

import pytest

from stampede.data import DataError
from stampede.data.raw.files import expand


def test_expand(tmp_path):
    for name in ("day_10", "day_2", "day_1"):
        (tmp_path / name).touch()
    assert [path.name for path in expand(str(tmp_path / "day_*"))] == ["day_1", "day_2", "day_10"]
    (tmp_path / "odd[1].csv").touch()
    assert expand(str(tmp_path / "odd[1].csv")) == [tmp_path / "odd[1].csv"]
    with pytest.raises(DataError, match="no such file"):
        expand(str(tmp_path / "nothing*"))
    with pytest.raises(DataError, match="is a folder"):
        expand(str(tmp_path))
    with pytest.raises(DataError, match="stands twice"):
        expand([str(tmp_path / "day_1"), str(tmp_path / "day_1*")])
