"""Exported packages score as the trainer does, without stampede."""

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stampede.engine.datasets import open_dataset
from stampede.engine.errors import RunFolderError
from stampede.engine.export import main
from stampede.engine.inference.dense_part import DensePart, export_dense_part
from stampede.engine.inference.packaging import export
from stampede.engine.inference.row_types import stored_rows
from stampede.engine.inference.trained import open_trained
from stampede.engine.tables import FieldWeights, read_field
from stampede.models import CTRModel, network_names
from support.jobs import run_small
from support.movie_runs import prepare_movies, rows_of_test_part, train_on_movies
from support.movies import write_movies
from support.packages import loaded, logits_alone
from support.predicting import run_command, scores


def columns_of(frame):
    """Values by column as JSON has them: text, numbers, and None where a number is missing."""
    return {
        name: [None if value != value else value for value in frame[name].tolist()]
        for name in frame
    }


@pytest.fixture(scope="module")
def trainers(trained_run, tmp_path_factory):
    """Columns of the test part, some of them as no training row was, and the trainer's logits."""
    folder = tmp_path_factory.mktemp("trainers")
    frame = rows_of_test_part().reset_index(drop=True).drop(columns=["rating", "importance"])
    frame = frame.astype({"user": str, "movie": str})
    frame.loc[3, ["user", "genres", "city"]] = ["never seen", "", ""]
    frame.loc[4, "genres"] = "war|western|drama"
    path = write_movies(folder / "log.csv", frame)
    score = scores(trained_run, [path], folder)["score"].to_numpy()
    return columns_of(frame.assign(when=frame["when"].astype(str))), np.log(score / (1 - score))


def test_a_package_alone_equals_the_trainer(packages, trainers, tmp_path):
    columns, logits = trainers
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lists = [text.split("|") if text else None for text in columns["genres"]]
    inputs = [columns, {**columns, "genres": lists}, samples, samples[4:5]]
    found = logits_alone(packages / "fp32", inputs, tmp_path)
    for one, expected in zip(found, [logits, logits, logits, logits[4:5]], strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-6, rtol=0)
    assert logits.std() > 0.05


def test_batches_and_tables_make_no_difference(packages, trainers):
    columns, logits = trainers
    model = loaded(packages / "fp32")
    assert set(model.columns) == set(columns)
    for samples in (columns, pl.DataFrame(columns, strict=False)):
        found = model.logits(samples, batch_size=7)
        np.testing.assert_allclose(found, logits, atol=1e-6, rtol=0)
    np.testing.assert_allclose(model.score(columns), 1 / (1 + np.exp(-logits)), atol=1e-7)
    assert model.score({name: [] for name in columns}).shape == (0,)


# Largest difference of a logit from fp32 on the test part, where their standard deviation is 1.7;
# 1.6e-4 and 2.8e-3 were found.
@pytest.mark.parametrize("kind, least, most", [("fp16", 1e-7, 2e-4), ("int8", 1e-5, 5e-3)])
def test_the_error_of_narrow_rows(packages, trainers, kind, least, most):
    columns, logits = trainers
    error = np.abs(loaded(packages / kind).logits(columns) - logits).max()
    assert least < error < most, error


def test_narrow_rows_take_less(packages):
    sizes = {}
    for kind in ("fp32", "fp16", "int8"):
        table = load_file(packages / kind / "tables/user.safetensors")
        sizes[kind] = sum(tensor.nbytes for tensor in table.values()) / len(table["embedding"])
    # Of an embedding of 10 columns, a first-order weight and, in int8, a scale.
    assert sizes == {"fp32": 44, "fp16": 22, "int8": 16}


def test_no_element_is_off_by_more_than_its_type_says(packages, trained_run):
    checkpoint = open_trained(trained_run).checkpoint
    for field in ("user", "genres", "city"):
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


def test_rows_of_zeros_and_weights_too_large(tmp_path):
    weights = FieldWeights(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), torch.tensor([[0.0], [3.0]]))
    found = stored_rows(weights, "int8", "user")
    assert found["embedding"].tolist() == [[0, 0], [64, -127]]
    assert found["scale"].tolist() == pytest.approx([0.0, 2 / 127])
    large = FieldWeights(torch.tensor([[1e5]]), torch.tensor([[0.0]]))
    with pytest.raises(RunFolderError, match=r"user: a weight of 100000 .*--rows fp32"):
        stored_rows(large, "fp16", "user")


def test_numbers_are_as_narrow_as_in_training(tmp_path):
    run = train_on_movies(prepare_movies(tmp_path), "data.numbers_dtype=float16")
    export(open_trained(run), tmp_path / "package", "fp32", overwrite=False)
    frame = rows_of_test_part()
    expected = scores(run, [write_movies(tmp_path / "new.csv", frame)], tmp_path)["score"]
    frame = frame.astype({"user": str, "movie": str, "when": str})
    found = loaded(tmp_path / "package").score(columns_of(frame))
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_a_run_without_vocabularies_takes_rows_of_tables(tmp_path):
    run_small(tmp_path, [])
    export(open_trained(tmp_path / "small"), tmp_path / "package", "fp32", overwrite=False)
    expected = scores(tmp_path / "small", ["@run"], tmp_path)["score"].to_numpy()[:50]
    drawn = open_test_part(tmp_path / "small")
    model = loaded(tmp_path / "package")
    ids = {name: drawn.ids[:, i].numpy() for i, name in enumerate(model.fields)}
    found = model.score_rows(ids, drawn.dense.numpy())
    np.testing.assert_allclose(found, expected, atol=1e-7)
    numbers = {name: drawn.dense[:, i].numpy() for i, name in enumerate(model.numbers)}
    np.testing.assert_allclose(model.score({**ids, **numbers}), expected, atol=1e-7)
    with pytest.raises(ValueError, match="field C1: an id is no row, 0 to"):
        model.score_rows({**ids, "C1": ids["C1"] + 10**6}, drawn.dense)
    with pytest.raises(ValueError, match="field C1: an id is missing"):
        model.score({**ids, **numbers, "C1": [None] * 50})


def open_test_part(run):
    """The first rows of the test part of a run on synthetic clicks."""
    trained = open_trained(run, allow_import=True)
    return open_dataset(trained.config, None).test.read(torch.arange(50))


def test_encoded_samples_with_several_ids(packages, trainers):
    columns, logits = trainers
    model = loaded(packages / "fp32")
    encoded = model._encoder(columns)
    ids = dict(zip(model.fields, encoded.ids, strict=True))
    lengths = {"genres": encoded.lengths[model.fields.index("genres")]}
    assert lengths["genres"].max() == 2  # max_ids
    found = model.score_rows(ids, encoded.numbers, lengths)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-7)
    with pytest.raises(ValueError, match="samples; write equally many"):
        model.score_rows(ids, encoded.numbers[1:], lengths)
    with pytest.raises(ValueError, match="no ids of 'user'"):
        model.score_rows({}, encoded.numbers)


@pytest.mark.parametrize("name", network_names())
def test_every_network_is_exported_for_any_number_of_samples(name):
    model = CTRModel(name, {"a": 7, "b": 5, "c": 9}, 2, 10, [8, 8], 0).eval()
    # Zeros would hide what is left out.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.network.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator)
    program = export_dense_part(model).module()
    part = DensePart(model)
    for samples in (1, 2, 33):
        rows = torch.randn(samples, 3, 11, generator=generator)
        numbers = torch.randn(samples, 2, generator=generator)
        with torch.no_grad():
            assert torch.equal(program(rows, numbers), part(rows, numbers))


OWN = """
from torch import nn
from stampede.models import register

@register("own_network")
class Own(nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.layer = nn.Linear(shape.inputs, 1)

    def forward(self, embeddings, dense):
        return self.layer(nn.functional.pad(embeddings.flatten(1), [0, dense.shape[1]])).squeeze(1)
"""


def test_a_network_of_the_users_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    run_small(tmp_path, [f"model.import={tmp_path}/own.py", "model.name=own_network"])
    run = tmp_path / "small"
    status, said = run_command(main, run, tmp_path / "package", "--allow-import")
    assert status == 0 and f"model.import: {tmp_path}/own.py was executed" in said
    drawn = open_test_part(run)
    expected = scores(run, ["@run"], tmp_path, "--allow-import")["score"].to_numpy()[:50]
    # The package has no need of it.
    (tmp_path / "own.py").unlink()
    model = loaded(tmp_path / "package")
    ids = {name: drawn.ids[:, i].numpy() for i, name in enumerate(model.fields)}
    found = model.score_rows(ids, drawn.dense.numpy())
    np.testing.assert_allclose(found, expected, atol=1e-7)


class Deciding(nn.Module):
    def forward(self, embeddings, dense):
        return embeddings.sum((1, 2)) if embeddings.sum() > 0 else dense.sum(1)


def test_a_network_that_torch_cannot_export_is_named():
    model = CTRModel("deepfm", {"a": 7}, 2, 10, [8], 0).eval()
    model.network = Deciding()
    with pytest.raises(RunFolderError, match="cannot export the network Deciding"):
        export_dense_part(model)
