"""A log to describe."""

import pytest

from support.described import SCHEMA, made_up


@pytest.fixture
def log(tmp_path):
    """Three files of one log, and the whole of it; each file is read as a chunk of its own."""
    frame = made_up(3000)
    for i in range(3):
        frame[i * 1000 : (i + 1) * 1000].to_csv(tmp_path / f"log_{i}.csv", index=False)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    return tmp_path, frame
