"""Blocks of several sizes."""

import pytest

from stampede.data.raw import files as blocks


@pytest.fixture(params=[16, 1 << 20], ids=["tiny blocks", "one block"])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)
