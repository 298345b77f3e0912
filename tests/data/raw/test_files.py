"""Files found by glob, read in blocks of lines; damaged and truncated ones."""

import gzip
import os
from functools import partial

import numpy as np
import polars as pl
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data import DataError
from stampede.data.raw import files as blocks
from stampede.data.raw.files import expand, read_blocks
from support.raw_logs import GOOD, HEADER, log_of, read, write


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "log.csv")
    with pytest.raises(DataError, match=r"log.csv: is not a file; write the path of the click log"):
        expand(str(tmp_path / "*.csv"))


def test_expand(tmp_path):
    for name in ("day_10", "day_2", "day_1"):
        (tmp_path / name).touch()
    assert [path.name for path in expand(str(tmp_path / "day_*"))] == ["day_1", "day_2", "day_10"]
    (tmp_path / "_SUCCESS").touch()
    assert [path.name for path in expand(str(tmp_path / "*"))] == ["day_1", "day_2", "day_10"]
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary/part").touch()
    assert len(expand(str(tmp_path / "**/*1*"))) == 2
    assert [path.name for path in expand(str(tmp_path / "_temporary/*"))] == ["part"]
    assert expand(str(tmp_path / "_S*")) == expand(str(tmp_path / "_SUCCESS"))
    with pytest.raises(DataError, match="no such file"):
        expand(str(tmp_path / "*CC*"))
    (tmp_path / "odd[1].csv").touch()
    assert expand(str(tmp_path / "odd[1].csv")) == [tmp_path / "odd[1].csv"]
    with pytest.raises(DataError, match="no such file"):
        expand(str(tmp_path / "nothing*"))
    with pytest.raises(DataError, match="is a folder"):
        expand(str(tmp_path))
    with pytest.raises(DataError, match="is given twice"):
        expand([str(tmp_path / "day_1"), str(tmp_path / "day_1*")])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "bc", "", "\r", "x" * 40]), max_size=12),
    st.booleans(),
    st.integers(1, 50),
)
def test_blocks_hold_every_line_once(tmp_path_factory, lines, ended, size):
    path = tmp_path_factory.mktemp("blocks") / "log.csv"
    text = "\n".join(lines).encode() + b"\n" * ended
    path.write_bytes(text)
    expected = text.rstrip(b"\r\n").split(b"\n") if text.rstrip(b"\r\n") else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size)
        found, first = [], 1
        for block in read_blocks(path):
            assert block.first_line == first and block.data.endswith(b"\n")
            rows = block.data[:-1].split(b"\n")
            assert len(rows) == block.lines
            first += block.lines
            found += rows
    assert [row.rstrip(b"\r") for row in found] == [row.rstrip(b"\r") for row in expected]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("block_bytes", [1 << 14, 1 << 24])
def test_truncated_compressed_files(tmp_path, monkeypatch, suffix, block_bytes):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    draw = np.random.default_rng(0)
    lines = [f"1,{user},3,0.5,1,2024-01-31" for user in draw.integers(0, 10**9, 30_000)]
    text = "\n".join([HEADER, *lines, ""]).encode()
    content = gzip.compress(text) if suffix == "gz" else pyarrow.Codec("zstd").compress(text)
    content = bytes(content)
    whole, cut = tmp_path / f"whole.csv.{suffix}", tmp_path / f"cut.csv.{suffix}"
    whole.write_bytes(content)
    assert len(read(log_of(whole))[0]) == 30_000
    cut.write_bytes(content[: int(0.6 * len(content))])
    # Skipping bad rows does not help: the rest of the log is missing.
    for action in (log_of(cut).counts, *(partial(read, log_of(cut), p) for p in ("error", "skip"))):
        with pytest.raises(DataError, match=r"cut.csv.*damaged or truncated.*again"):
            action()
    damaged = [write(tmp_path / f"plain.csv.{suffix}", [HEADER, GOOD])]
    if suffix == "gz":
        # A bit of its checksum.
        whole.write_bytes(content[:-6] + bytes([content[-6] ^ 1]) + content[-5:])
        damaged.append(whole)
    for path in damaged:
        with pytest.raises(DataError, match=rf"{path}: damaged .* or not compressed as its name"):
            read(log_of(path))


def test_damaged_parquet(tmp_path):
    path = tmp_path / "log.parquet"
    columns = dict(zip(HEADER.split(","), GOOD.split(","), strict=True))
    pl.DataFrame({name: [value] * 50 for name, value in columns.items()}).write_parquet(path)
    assert len(read(log_of(path))[0]) == 50
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"log.parquet: cannot be read as Parquet"):
        read(log_of(path))
