"""Exported packages score as the trainer does, without stampede."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stampede.engine.config import load_config
from stampede.engine.datasets import open_dataset
from stampede.engine.errors import RunFolderError
from stampede.engine.export import main
from stampede.engine.inference.dense_part import DensePart, export_dense_part
from stampede.engine.inference.packaging import export
from stampede.engine.inference.row_types import stored_rows
from stampede.engine.inference.trained import open_trained
from stampede.engine.run import run as train
from stampede.engine.tables import FieldWeights, read_field
from stampede.models import CTRModel, network, network_names
from support.jobs import run_small
from support.movie_runs import ROWS, prepare_movies, rows_of_test_part, train_on_movies
from support.movies import movies, write_movies
from support.packages import loaded, logits_alone
from support.predicting import run_command, scores
from support.prepared import drawn_fields, drawn_rows, write_prepared


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


def test_samples_in_other_forms(packages, trainers):
    columns, logits = trainers
    model = loaded(packages / "fp32")
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    table = pd.DataFrame(columns)
    assert table["age"].isna().any()
    lists = [text.split("|") if text else None for text in columns["genres"]]
    for given in (
        iter(samples),
        (dict(sample) for sample in samples),
        table,
        table.set_index("user", drop=False).assign(more=1, city=table["city"].to_numpy()),
        table.assign(genres=lists, city=table["city"].where(table["city"] != "", np.nan)),
        table.assign(genres=[None if cell is None else np.array(cell) for cell in lists]),
        table.assign(when=pd.to_datetime(table["when"])),
        table.convert_dtypes(),
    ):
        np.testing.assert_allclose(model.logits(given), logits, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="no column 'movie'; the model needs user, movie"):
        model.logits(table.drop(columns="movie"))


def test_ids_that_are_floats_are_whole_numbers(packages, trainers):
    columns, _ = trainers
    model = loaded(packages / "fp32")
    known = pl.read_parquet(packages / "fp32/vocabularies/user.parquet").to_series().to_list()
    texts = [text if text in known else None for text in columns["user"]]
    assert None in texts and len(set(texts)) > 5
    expected = model.logits({**columns, "user": texts, "movie": in_every_other(columns, "5")})
    whole = [None if text is None else float(text) for text in texts]
    narrow = pl.Series(whole, dtype=pl.Float32)
    for user in (whole, narrow, [*texts[:9], *whole[9:]]):
        found = model.logits({**columns, "user": user, "movie": in_every_other(columns, 5.0)})
        assert np.array_equal(found, expected)
    for cell in ([3.0, 8.0], [3, 8], ["3", "8"]):
        one = {name: values[:1] for name, values in columns.items()}
        found = model._encoder({**one, "genres": [cell], "slot": [cell[0]]})
        again = model._encoder({**one, "genres": ["3|8"], "slot": ["3"]})
        assert [ids.tolist() for ids in found.ids] == [ids.tolist() for ids in again.ids]


def in_every_other(columns, value):
    """A column with a value in every other sample."""
    return [value if i % 2 else None for i in range(len(columns["user"]))]


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


def test_nothing_is_warned_of(packages, tmp_path):
    """In a process of its own: torch warns once."""
    log = rows_of_test_part().astype({"user": str, "movie": str, "when": str})
    script = (
        "import json, sys\n"
        "import numpy as np\n"
        "from load import load\n"
        "model = load()\n"
        "model.score(json.load(sys.stdin))\n"
        "ids = np.zeros(3, np.int64)\n"
        "numbers = np.zeros((3, 1), np.float32)\n"
        "for array in (ids, numbers): array.flags.writeable = False\n"
        "model.score_rows({name: ids for name in model.fields}, numbers, {'genres': ids + 1})\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script],
        input=json.dumps(columns_of(log)),
        cwd=packages / "fp32",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr


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


def test_numbers_of_a_prepared_folder_are_as_narrow_as_there(tmp_path):
    # Nobody knows what its ids mean.
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
        "evaluate: {batch_size: 20}\n"
        "optim: {dense: {lr: 0.1}}\n"
    )
    train(load_config(tmp_path / "rows.yaml"))
    export(open_trained(tmp_path / "rows"), tmp_path / "package", "fp32", overwrite=False)
    expected = scores(tmp_path / "rows", ["@run"], tmp_path)["score"]
    ids = dict(zip(("C1", "C2"), parts["test"]["ids"].T.tolist(), strict=True))
    found = loaded(tmp_path / "package").score({**ids, "I1": exact["test"][:, 0].tolist()})
    # With the numbers as they were the largest difference is above 1e-5.
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


# Another option of each network that has some.
VARIANTS = {
    "dcnv2": {"cross": "full"},
    "xdeepfm": {"cin": [4]},
    "dlrm": {"bottom": [4]},
    "autoint": {"layers": 1, "deep": True},
    "finalmlp": {"second": [4], "heads": 2, "gates": None},
    "masknet": {"structure": "serial", "blocks": 2},
}


@pytest.mark.parametrize(
    "name, numbers, options",
    [
        *((name, 2, {}) for name in network_names()),
        *((name, 0, VARIANTS.get(name, {})) for name in network_names()),
    ],
)
def test_every_network_is_exported_for_any_number_of_samples(name, numbers, options):
    chosen = network(name).options.model_validate(options)
    model = CTRModel(name, {"a": 7, "b": 5, "c": 9}, numbers, 10, [8, 8], 0, chosen).eval()
    # Zeros would hide what is left out.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.network.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator)
    program = export_dense_part(model).module()
    part = DensePart(model)
    for samples in (1, 2, 33):
        rows = torch.randn(samples, 3, 11, generator=generator)
        given = torch.randn(samples, numbers, generator=generator)
        with torch.no_grad():
            assert torch.equal(program(rows, given), part(rows, given))


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


def test_a_failure_without_a_text_is_named(monkeypatch):
    def fails(*_, **__):
        raise AssertionError

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(RunFolderError, match="the network DeepFM: AssertionError; its forward"):
        export_dense_part(CTRModel("deepfm", {"a": 7}, 2, 10, [8], 0).eval())
