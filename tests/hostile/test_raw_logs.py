"""Raw logs from people who mean harm, prepared as far as that goes."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import yaml
from hypothesis import strategies as st

from stampede.data import DataError
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.verify import verify
from stampede.data.raw import files as blocks
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import CRITEO
from stampede.settings import SettingsError
from support.fuzzing import changed_bytes, fuzz
from support.guarded import guarded
from support.mixed_log import HEADER, SCHEMA, mixed_rows
from support.preparing import prepared

CASES = [60, pytest.param(10_000, marks=pytest.mark.soak)]

_draw = np.random.default_rng(0)
_AVAZU = [
    "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id",
    "app_domain", "app_category", "device_id", "device_ip", "device_model", "device_type",
    "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
]  # fmt: skip

# By kind of log: the separator, and the cells line by line.
LOGS = {
    "criteo_kaggle": ("\t", [
        [str(_draw.integers(2)), *(str(_draw.integers(9)) if _draw.random() < 0.8 else ""
                                   for _ in range(13)),
         *(f"{_draw.integers(5):08x}" if _draw.random() < 0.9 else "" for _ in range(26))]
        for _ in range(30)
    ]),
    "avazu": (",", [_AVAZU, *(
        [str(i), str(i % 2), f"1410{21 + i // 24:02d}{i % 24:02d}", *(f"{j % 3}{i % 4}"
         for j in range(21))] for i in range(30)
    )]),
    "table": (",", [HEADER, *mixed_rows(30)]),
}  # fmt: skip

CELLS = [
    "", " ", "0", "1", "2", "-1", "1.0", "1.", ".5", "+1", "1e400", "-1e400", "1e-400", "nan",
    "NaN", "inf", "-Infinity", "99999999999999999999999", "-9223372036854775808", "3.5e38", "0x10",
    "1_0", "1,5", "true", "NULL", "NA", "\0", "a\0b", "\x1b[2J", "\ufeff", "\u202e", "é", "\uff11",
    "\u2028", "x" * 70_000, "9" * 5000, '"', '""', '"a', 'a"', '"a""b"', '"a\nb"', '"a,b"', "'",
    "\t", ",", "\r", "\n", "\r\n", "|", "||", "a|" * 3000, "#", "=cmd()", "%s", "24102100",
    "14102199", "2024-13-01 00", "2024-01-01 25", "9999-12-31 23", "0000-00-00 00", "../../canary",
]  # fmt: skip

_SNIPPETS = [
    b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b"\r\n",
    b"\n\n\n", b'"', b'""', b"\t", b",", b"\x1a", b"\n" * 5000, b"\t" * 5000, b"," * 5000,
]  # fmt: skip


@st.composite
def logs(draw):
    """Kind, options, name and content of a file."""
    kind = draw(st.sampled_from(sorted(LOGS)))
    separator, rows = LOGS[kind]
    count = draw(st.sampled_from([11, 1, 0])) if draw(st.integers(0, 9)) == 9 else len(rows)
    rows = [list(row) for row in rows[:count]]
    for _ in range(draw(st.integers(0, 2)) if rows else 0):
        line = draw(st.integers(0, len(rows) - 1))
        column = draw(st.integers(0, max(len(rows[0]) - 1, 0)))
        what = draw(st.sampled_from(["cell", "cell", "column", "more", "less", "blank", "head"]))
        if what == "cell" and column < len(rows[line]):
            rows[line][column] = draw(st.sampled_from(CELLS) | st.text(max_size=8))
        elif what == "column":
            cell = draw(st.sampled_from(CELLS))
            for row in rows[1:]:
                row[column : column + 1] = [cell]
        elif what == "more":
            rows[line].insert(column, draw(st.sampled_from(CELLS)))
        elif what == "less":
            del rows[line][column : column + 1]
        elif what == "blank":
            rows[line] = []
        elif what == "head":
            rows[0] = list(rows[line])
    end = draw(st.sampled_from(["\n", "\n", "\n", "\r\n", "\r"]))
    text = "".join(separator.join(row) + end for row in rows)
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 5)) == 5:
        content = draw(changed_bytes(content, _SNIPPETS))
    suffix = draw(st.sampled_from(["", "", ".gz", ".zst"]))
    packed = content
    if suffix == ".gz":
        packed = gzip.compress(content, 1, mtime=0)
        packed = packed + draw(st.sampled_from([b"", b"", b"", packed, b"\0" * 9, b"x" * 9]))
    elif suffix == ".zst":
        packed = bytes(pyarrow.Codec("zstd").compress(content))
        packed = packed + draw(st.sampled_from([b"", b"", b"", packed, b"\0" * 9, b"x" * 9]))
    if suffix and draw(st.integers(0, 5)) == 5:
        packed = draw(changed_bytes(packed))
    options = draw(st.fixed_dictionaries({}, optional={
        "on_bad_row": st.just("skip"),
        "split": st.sampled_from(["random", "highfreq"]),
        "spool": st.just(False),
        "shard_rows": st.just(7),
        "numbers_dtype": st.just("float16"),
        "validation_fraction": st.just(0.3),
    }))  # fmt: skip
    name = ("log.csv", "log.txt")[kind == "criteo_kaggle"] + suffix
    return kind, options, name, packed


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES)
def test_raw_logs(tmp_path, cases):
    schema = tmp_path / "schema.yaml"
    schema.write_text(yaml.safe_dump(SCHEMA))

    def check(case):
        kind, options, name, content = case
        path = tmp_path / name
        path.write_bytes(content)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with guarded(tmp_path, DataError, SettingsError) as said:
            prepared(
                tmp_path / "out", kind, str(path), schema=str(schema) * (kind == "table"), **options
            )
            # What is written can be read.
            verify(tmp_path / "out")
            try:
                open_prepared(tmp_path / "out")
            except DataError as failure:
                assert "part has no rows" in str(failure)
        left = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
        assert not left, left
        return said[0] if said else None

    seen = fuzz(logs(), check, cases)
    assert seen["accepted"] > cases / 10 and len(seen) > 4, seen


def bomb(path: Path, piece: bytes, times: int):
    """A compressed file that holds a piece many times over."""
    if path.suffix == ".gz":
        with gzip.open(path, "wb", 1) as file:
            for _ in range(times):
                file.write(piece)
    else:
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            for _ in range(times):
                file.write(piece)
    assert path.stat().st_size < len(piece) * times / 100


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(
    "piece, words",
    [
        (b"0" * (1 << 20), "a line after line 0 is longer than 4 MB"),
        (b"1\t" * (1 << 19), "a line after line 0 is longer than 4 MB"),
    ],
    ids=["a line", "columns"],
)
def test_files_that_unpack_to_far_more(tmp_path, monkeypatch, suffix, piece, words):
    """800 MB, of which less than half is ever in memory."""
    monkeypatch.setattr(blocks, "_LONGEST_LINE", 4 << 20)
    path = tmp_path / f"log.txt{suffix}"
    bomb(path, piece, 800)
    with guarded(tmp_path, DataError, memory=400 << 20) as said:
        for _ in RawLog(CRITEO, [path]).chunks(BadRows("error")):
            pass
    assert words in said[0]
