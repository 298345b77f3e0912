"""Counts on disk and a log read twice give the same."""

import polars as pl
import pytest

from support.preparing import check_criteo, prepared, sequential_parts, write


@pytest.mark.parametrize("counts_gb", [2.0, 1e-4])
def test_counts_on_disk_give_the_same_ids(made_up, tmp_path, monkeypatch, counts_gb):
    written = []
    write_parquet = pl.DataFrame.write_parquet

    def watched(frame, file, **options):
        written.append(file)
        return write_parquet(frame, file, **options)

    monkeypatch.setattr(pl.DataFrame, "write_parquet", watched)
    monkeypatch.setattr("stampede.data.raw.files.BLOCK_BYTES", 1 << 16)
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, counts_gb=counts_gb, shard_rows=700)
    check_criteo(folder, made_up, sequential_parts(3000, 1 / 7, 0.1))
    assert any("counts" in file.parts for file in written) == (counts_gb < 1)
    assert not (folder / "counts").exists()


def test_reading_the_log_twice_gives_the_same(made_up, tmp_path, monkeypatch):
    """Without a spool, and where two ids of a vocabulary have one hash."""
    monkeypatch.setattr("stampede.data.raw.files.BLOCK_BYTES", 1 << 16)
    path = write(tmp_path / "log.tsv", made_up)
    parts = sequential_parts(3000, 1 / 7, 0.1)
    check_criteo(prepared(tmp_path / "out", "criteo_kaggle", path, spool=False), made_up, parts)
    honest = pl.Series.hash

    def colliding(series, seed=0):
        hashes = honest(series, seed)
        if seed == 0 and series.dtype == pl.String and len(series) > 1:
            hashes[1] = hashes[0]
        return hashes

    monkeypatch.setattr(pl.Series, "hash", colliding)
    check_criteo(prepared(tmp_path / "again", "criteo_kaggle", path), made_up, parts)
    assert not list(tmp_path.rglob("*.arrow")) and not list(tmp_path.rglob("spool"))
