"""Blocks of whole lines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data.raw import files as blocks
from stampede.data.raw.files import count_lines, read_blocks


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
    assert count_lines(path) == len(expected)
