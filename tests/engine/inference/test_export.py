"""Exported packages score as the trainer does, without stampede; what the command writes."""

from contextlib import ExitStack

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError
from stampede.engine.inference import export_command as command
from stampede.engine.inference import packaging
from stampede.engine.inference.packaging import export, stored_rows
from stampede.engine.inference.trained import open_trained
from stampede.engine.run import run as train
from stampede.engine.tables import FieldWeights, read_field
from support.full_disk import files_of_at_most
from support.movie_runs import ROWS, prepare_movies, train_on_movies
from support.movies import movies, write_movies
from support.packages import loaded, logits_alone
from support.predicting import refused, run_command, scores
from support.prepared import drawn_fields, drawn_rows, write_prepared


@pytest.mark.slow
def test_a_package_alone_equals_the_trainer(packages, trainers, tmp_path):
    columns, logits = trainers
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    found = logits_alone(packages / "fp32", [columns, samples[4:5]], tmp_path)
    for one, expected in zip(found, [logits, logits[4:5]], strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-6, rtol=0)
    assert logits.std() > 0.05


@pytest.mark.slow
def test_samples_in_other_forms(packages, trainers):
    columns, logits = trainers
    model = loaded(packages / "fp32")
    assert set(model.columns) == set(columns)
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    table = pd.DataFrame(columns)
    assert table["age"].isna().any()
    lists = [text.split("|") if text else None for text in columns["genres"]]
    for given in (
        iter(samples),
        table,
        pl.DataFrame(columns, strict=False),
        table.set_index("user", drop=False).assign(more=1, city=table["city"].to_numpy()),
        table.assign(genres=lists, city=table["city"].where(table["city"] != "", np.nan)),
        table.assign(genres=[None if cell is None else np.array(cell) for cell in lists]),
        table.assign(when=pd.to_datetime(table["when"])),
        table.convert_dtypes(),
    ):
        found = model.logits(given, batch_size=7)
        np.testing.assert_allclose(found, logits, atol=1e-6, rtol=0)
    probability = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(model.score(columns), probability, atol=1e-7)
    # Rows of tables, of which genres has up to max_ids.
    encoded = model._encoder(columns)
    lengths = {"genres": encoded.lengths[model.fields.index("genres")]}
    assert lengths["genres"].max() == 2
    ids = dict(zip(model.fields, encoded.ids, strict=True))
    found = model.score_rows(ids, encoded.numbers, lengths)
    np.testing.assert_allclose(found, probability, atol=1e-7)
    assert model.score({name: [] for name in columns}).shape == (0,)
    with pytest.raises(ValueError, match="no column 'movie'; the model needs user, movie"):
        model.logits(table.drop(columns="movie"))


def test_ids_that_are_floats_are_whole_numbers(packages, trainers):
    columns, _ = trainers
    model = loaded(packages / "fp32")
    known = pl.read_parquet(packages / "fp32/vocabularies/user.parquet").to_series().to_list()
    texts = [text if text in known else None for text in columns["user"]]
    assert None in texts and len(set(texts)) > 5
    expected = model.logits({**columns, "user": texts})
    whole = [None if text is None else float(text) for text in texts]
    for user in (whole, pl.Series(whole, dtype=pl.Float32), [*texts[:9], *whole[9:]]):
        assert np.array_equal(model.logits({**columns, "user": user}), expected)
    for cell in ([3.0, 8.0], [3, 8], ["3", "8"]):
        one = {name: values[:1] for name, values in columns.items()}
        found = model._encoder({**one, "genres": [cell], "slot": [cell[0]]})
        again = model._encoder({**one, "genres": ["3|8"], "slot": ["3"]})
        assert [ids.tolist() for ids in found.ids] == [ids.tolist() for ids in again.ids]


@pytest.mark.slow
def test_ids_that_were_floats_in_training(tmp_path):
    prepare_movies(tmp_path)
    frame = movies(ROWS).astype({"user": "float64"})
    write_movies(tmp_path / "log.parquet", frame)
    run = train_on_movies(tmp_path, f"data.path={tmp_path}/log.parquet")
    export(open_trained(run), tmp_path / "package", "fp32", overwrite=False)
    frame = frame[-60:]
    expected = scores(run, [write_movies(tmp_path / "new.parquet", frame)], tmp_path)["score"]
    model = loaded(tmp_path / "package")
    found = model.score(frame)
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert abs(found - model.score(frame.assign(user=None))).max() > 1e-4


@pytest.mark.wide
def test_numbers_of_a_prepared_folder_are_as_narrow_as_there(tmp_path):
    # Its ids are rows without a vocabulary.
    parts = {
        part: drawn_rows(rows, single=2, weight=True, seed=seed)
        for seed, (part, rows) in enumerate({"train": 100, "validation": 20, "test": 30}.items())
    }
    exact = {part: 3 * arrays["numbers"][:, 1:] for part, arrays in parts.items()}
    for part, arrays in parts.items():
        arrays["numbers"] = exact[part].astype(np.float16)
    folder = write_prepared(tmp_path / "prepared", parts, drawn_fields(single=2))
    (tmp_path / "rows.yaml").write_text(
        f"run: {{dir: {tmp_path}}}\n"
        f"data: {{kind: prepared, path: {folder}}}\n"
        "model: {hidden: [8]}\n"
        "train: {batch_size: 20}\n"
        "evaluate: {batch_size: 20, compare_with_lr: false}\n"
        "optim: {dense: {lr: 0.1}}\n"
    )
    train(load_config(tmp_path / "rows.yaml"))
    export(open_trained(tmp_path / "rows"), tmp_path / "package", "fp32", overwrite=False)
    expected = scores(tmp_path / "rows", ["@run"], tmp_path)["score"]
    ids = dict(zip(("C1", "C2"), parts["test"]["ids"].T.tolist(), strict=True))
    found = loaded(tmp_path / "package").score({**ids, "I1": exact["test"][:, 0].tolist()})
    # Numbers that are not narrowed to float16 give differences above 1e-5.
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_no_element_is_off_by_more_than_its_type_says(packages, trained_run, trainers):
    checkpoint = open_trained(trained_run).checkpoint
    for field in ("user", "genres"):
        weights = read_field(checkpoint, field)
        exact, half, int8 = (
            load_file(packages / kind / f"tables/{field}.safetensors")
            for kind in ("fp32", "fp16", "int8")
        )
        assert torch.equal(exact["embedding"], weights.embedding)
        assert torch.equal(exact["first_order"], weights.first_order[:, 0])
        # 11 bits: half of the last one is 2^-11 of the value; below 2^-14 steps are of 2^-24.
        for name, true in exact.items():
            error = (half[name].float() - true).abs()
            assert bool((error <= (true.abs() * 2**-11).clamp_min(2**-25)).all())
        error = int8["embedding"].float() * int8["scale"][:, None] - weights.embedding
        assert bool((error.abs() <= int8["scale"][:, None] * 0.5001).all())
        assert int8["embedding"].abs().amax(1).eq(127).all()
    # Of logits whose standard deviation is 1.7; 1.6e-4 and 2.8e-3 were found.
    columns, logits = trainers
    for kind, least, most in (("fp16", 1e-7, 2e-4), ("int8", 1e-5, 5e-3)):
        error = np.abs(loaded(packages / kind).logits(columns) - logits).max()
        assert least < error < most, error


def test_rows_of_zeros_and_weights_too_large():
    weights = FieldWeights(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), torch.tensor([[0.0], [3.0]]))
    found = stored_rows(weights, "int8", "user")
    assert found["embedding"].tolist() == [[0, 0], [64, -127]]
    assert found["scale"].tolist() == pytest.approx([0.0, 2 / 127])
    large = FieldWeights(torch.tensor([[1e5]]), torch.tensor([[0.0]]))
    with pytest.raises(RunFolderError, match=r"user: a weight of 100000 .*--rows fp32"):
        stored_rows(large, "fp16", "user")


def exported(*arguments):
    return run_command(command.main, *arguments)


@pytest.mark.wide
def test_an_existing_folder_is_replaced_only_where_it_is_a_package(trained_run, tmp_path):
    out = tmp_path / "package"
    status, said = exported(trained_run, out, "--rows", "int8")
    assert status == 0 and "7 tables in int8" in said and "load.py" in said
    before = (out / "package.json").read_bytes()
    status, said = exported(trained_run, out)
    assert status == 2 and "already exists; write --overwrite" in said
    assert (out / "package.json").read_bytes() == before
    assert exported(trained_run, out, "--overwrite")[0] == 0
    assert loaded(out).about["rows"] == "fp32"
    # Files are readable by others.
    modes = {path.stat().st_mode & 0o777 for path in (out / "tables").iterdir()}
    assert modes == {(out / "package.json").stat().st_mode & 0o777}
    (tmp_path / "thesis").mkdir()
    status, said = exported(trained_run, tmp_path / "thesis", "--overwrite")
    assert status == 2 and "is not an exported package" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "thesis"]
    said = refused(command.main, tmp_path, trained_run, tmp_path / ("long" * 100))
    assert "longlong: cannot be written (File name too long)" in said


def full(tmp_path, run, name, *options):
    """The command finds no room and leaves nothing."""
    said = refused(command.main, tmp_path, run, tmp_path / name, *options)
    assert f"{tmp_path}/{name}: cannot be written (" in said and "File too large" in said


@pytest.mark.wide
def test_a_full_disk_leaves_nothing(trained_run, tmp_path):
    with files_of_at_most(5000):
        full(tmp_path, trained_run, "package")
        full(tmp_path, trained_run, "model.onnx", "--format", "onnx")


@pytest.mark.parametrize(
    "owner, name", [(pl.DataFrame, "write_parquet"), (packaging, "read_stored_field")]
)
def test_a_disk_that_becomes_full(trained_run, tmp_path, monkeypatch, owner, name):
    """Libraries in Rust write the vocabularies and tables, with errors of their own."""
    function = getattr(owner, name)
    with ExitStack() as stack:

        def fill_up(*arguments):
            stack.enter_context(files_of_at_most(100))
            return function(*arguments)

        monkeypatch.setattr(owner, name, fill_up)
        full(tmp_path, trained_run, "package")


@pytest.mark.wide
def test_the_working_folder_is_replaced(trained_run, tmp_path, monkeypatch):
    assert exported(trained_run, tmp_path / "package")[0] == 0
    (tmp_path / "link").symlink_to("package")
    for folder in ("package", "link"):
        monkeypatch.chdir(tmp_path / folder)
        status, said = exported(trained_run, ".", "--overwrite", "--rows", "int8")
        assert status == 0 and f"{tmp_path}/package" in said
    assert exported(trained_run, tmp_path / "link", "--overwrite", "--rows", "fp16")[0] == 0
    assert loaded(tmp_path / "package").about["rows"] == "fp16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "package"]
