"""Fields that share a table train as plain PyTorch does in float64, on any plan and ranks."""

import copy

import pytest
import torch
from torch.nn import functional

from stampede.engine.job.build import build
from stampede.engine.processes import processes
from stampede.engine.reading import Reader, open_dataset
from support.gathering import gather_field
from support.in_float64 import compute_in_float64
from support.jobs import same_end, train_an_epoch
from support.prepared import drawn_rows, write_prepared
from support.ranks import run_ranks
from support.reading import prepared_config, run_prepared
from support.reference import ReferenceTables

pytestmark = pytest.mark.slow

# Stored as 8 columns, which column-wise plans split.
DIM, ROWS = 7, 50
FIELDS = {
    "C1": (ROWS, False),
    "C2": (ROWS, False, {"table": "C1"}),
    "C3": (ROWS, False),
    "M1": (ROWS, True, {"table": "C1", "pooling": "mean"}),
    "M2": (ROWS, True, {"pooling": "mean"}),
    "M3": (ROWS, True, {"table": "M2"}),
}
MEAN = ("M1", "M2")
TABLES = {"C1": ["C1", "C2", "M1"], "C3": ["C3"], "M2": ["M2", "M3"]}
JOB = [
    f"model.dim={DIM}", "model.init_std=1e-2", "optim.embedding.l2=1e-3",
    "optim.embedding.clip.ratio=0.05",
]  # fmt: skip
PLANS = ("table_wise", "row_wise", "column_wise", "data_parallel")
# Of the largest value of a tensor: moments are float32.
EXACT = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    parts = {
        name: drawn_rows(rows, 3, 0, multi=3, seed=seed)
        for seed, (name, rows) in enumerate({"train": 333, "test": 67}.items())
    }
    return write_prepared(tmp_path_factory.mktemp("data") / "data", parts, FIELDS, 100)


def trained_in_float64(folder, data, plan, ranks):
    compute_in_float64()
    job = [*JOB, f"sharding.plan={plan}"]
    return train_an_epoch(prepared_config(folder, data, *job, world_size=ranks))


def pooled(table, jagged, mean):
    """Sums or means of the rows of each sample's ids; zeros without ids."""
    cells = jagged.values().long().split(jagged.lengths().tolist())
    return torch.stack([table[ids].sum(0) / (len(ids) or 1 if mean else 1) for ids in cells])


def trained_by_reference(folder, data):
    """Losses, and the tables `[rows, dim + 1]` and dense layers at the end."""
    config = prepared_config(folder, data, *JOB)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        scaled, clip = job.scaling.scaled, config.optim.embedding.clip
        tables = ReferenceTables(
            {name: torch.cat(gather_field(job.model, name, DIM, here), 1) for name in TABLES},
            lr=scaled.embedding_lr, l2=scaled.embedding_l2, granularity="cowclip",
            bound=clip.bound, ratio=clip.ratio, columns=DIM, rows=config.optim.embedding.rows,
        )  # fmt: skip
        dense = {name: p.detach().view(-1, 1) for name, p in job.dense_parameters.items()}
        dense = ReferenceTables(dense, lr=scaled.dense_lr)
        network, losses = copy.deepcopy(job.ctr_model.network).double(), []
        for batch in Reader(config, dataset, here).training():
            given = {name: w.requires_grad_() for name, w in tables.weights.items()}
            layers = {
                name: dense.weights[name].view_as(p).requires_grad_()
                for name, p in job.dense_parameters.items()
            }
            table_of = {field: name for name, fields in TABLES.items() for field in fields}
            looked_up = [
                pooled(given[table_of[name]], batch.sparse[name], name in MEAN) for name in FIELDS
            ]
            rows = torch.stack(looked_up, 1)
            of_network = {n.removeprefix("network."): p for n, p in layers.items() if n != "bias"}
            numbers = torch.zeros(len(rows), 0, dtype=torch.float64)
            logits = torch.func.functional_call(network, of_network, (rows[..., :DIM], numbers))
            logits = logits + rows[..., DIM].sum(1) + layers["bias"]
            of_samples = functional.binary_cross_entropy_with_logits(
                logits, batch.label.double(), reduction="none"
            )
            loss = of_samples[: batch.samples].mean()
            losses.append(loss.item())
            found = torch.autograd.grad(loss, [*given.values(), *layers.values()])
            for weights in given.values():
                weights.requires_grad_(False)
            counts = {
                name: sum(
                    batch.sparse[field].values().long().bincount(minlength=ROWS) for field in fields
                )
                for name, fields in TABLES.items()
            }
            tables.step(dict(zip(TABLES, found, strict=False)), counts)
            of_layers = (grad.view(-1, 1) for grad in found[len(TABLES) :])
            ones = {name: torch.ones(len(w)) for name, w in dense.weights.items()}
            dense.step(dict(zip(layers, of_layers, strict=True)), ones)
    return losses, tables, dense.weights


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    return trained_by_reference(tmp_path_factory.mktemp("reference"), data)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_that_of_the_reference(tmp_path, data, expected, plan, ranks):
    losses, tables, dense = expected
    # Some rows are clipped and some are not, and ids repeat across fields.
    assert 0.1 < tables.clipped / tables.touched < 0.9 and tables.largest_count > 10
    found = run_ranks(ranks, trained_in_float64, tmp_path, data, plan, ranks)[0]
    assert found.plan == {plan}
    assert found.losses == pytest.approx(losses, rel=EXACT)
    assert list(found.tables) == list(TABLES)
    for name, weights in found.tables.items():
        largest = tables.weights[name].abs().max()
        deviation = (torch.cat(weights, 1) - tables.weights[name]).abs().max()
        assert deviation < EXACT * largest, name
    for name, weights in found.dense.items():
        torch.testing.assert_close(weights.view(-1, 1), dense[name], rtol=0, atol=EXACT)


@pytest.mark.parametrize("plan", ["auto", "row_wise"])
def test_reproducible_runs_end_with_the_same_bits(tmp_path, data, plan):
    given = ["train.reproducible=true", f"sharding.plan={plan}", *JOB]
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run_ranks(ranks, run_prepared, folder, data, given, ranks)
    same_end(tmp_path / "2/small", tmp_path / "1/small")
