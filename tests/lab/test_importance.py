"""The command `stampede importance`: its table, its files, and mistakes."""

import pandas as pd
import pytest

from stampede import open_run
from stampede.lab.importance import main, table
from support.movie_runs import prepare_movies, train_on_movies


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train_on_movies(prepare_movies(tmp_path_factory.mktemp("movies")))


@pytest.mark.slow
def test_a_table_a_picture_and_a_file(folder, capsys):
    assert main([str(folder), "--repeats", "2", "--rows", "50"]) == 0
    printed = capsys.readouterr().out
    expected = open_run(folder).importance(repeats=2, rows=50)
    written = pd.read_csv(folder / "importance/importance.csv", index_col="column")
    pd.testing.assert_frame_equal(written, expected, check_like=True)
    assert (folder / "importance/importance.png").read_bytes().startswith(b"\x89PNG")
    assert "test part, 50 of 60 rows: AUC 0." in printed
    rows = [line.split() for line in printed.splitlines() if " +- " in line and "  " in line]
    shown = {row[0]: float(row[1]) for row in rows if row[0] in expected.index}
    assert list(shown) == list(expected.index)
    for name, lost in shown.items():
        assert lost == pytest.approx(expected["auc_lost"][name], abs=6e-6)


def test_long_names_fit(folder):
    found = open_run(folder).importance(repeats=2, rows=50)
    long = found.rename(index={"user": "user_" * 30})
    long.attrs = found.attrs
    assert max(map(len, table(long))) <= 100


def test_mistakes(folder, tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert main([str(folder), "--goal", "buy"]) == 2
    assert "the run has one label" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([str(folder), "--repeats", "2", "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
