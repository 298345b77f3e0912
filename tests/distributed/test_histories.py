"""Histories that a query attends to train as plain PyTorch does in float64, on any plan and ranks.

Their tables have pooled fields as well, tables have several widths, and one rank may have no id of
any history.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from stampede.engine.job.build import build
from stampede.engine.processes import processes
from stampede.engine.reading import Reader, open_dataset
from support.gathering import gather_field
from support.in_float64 import compute_in_float64
from support.jobs import same_end, train_an_epoch_in
from support.prepared import drawn_rows, write_prepared
from support.ranks import run_ranks
from support.reading import prepared_config, run_prepared
from support.reference import ReferenceTables

pytestmark = pytest.mark.slow

# Stored as 8 columns, which column-wise plans split.
DIM, ROWS, BATCH = 7, 50, 64
ATTENDS = {"pooling": "attention", "query": "C1"}
FIELDS = {
    "C1": (ROWS, False),
    "C2": (ROWS, False, {"table": "C1"}),
    "C3": (ROWS, False),
    "C4": (ROWS, False),
    "M1": (ROWS, True, {"table": "C1", **ATTENDS}),
    "M2": (ROWS, True, {"table": "C1", "pooling": "mean", "weighted": True}),
    "M3": (ROWS, True, ATTENDS),
    "M4": (ROWS, True, ATTENDS),
    "M5": (ROWS, True, {"weighted": True}),
}
TABLES = {"C1": ["C1", "C2", "M1", "M2"], "C3": ["C3"], "C4": ["C4"], "M3": ["M3"], "M4": ["M4"]}
TABLES["M5"] = ["M5"]
HISTORIES = ("M1", "M3", "M4")
# The first is pooled, the other one is in an EmbeddingCollection of its own.
DIMS = {"C3": 3, "M3": 12}
FROZEN = ("C4", "M4")
JOB = [
    f"model.dim={DIM}", "model.dims={C3: 3, M3: 12}",
    f"model.pretrained={{{', '.join(f'{f}: {{path: none, train: false}}' for f in FROZEN)}}}",
    "model.name=din", "model.hidden=[6, 5]",
    "model.init_std=0.3", "model.attention.hidden=[8, 3]", "optim.embedding.l2=1e-3",
    "optim.embedding.clip.ratio=0.002", f"train.batch_size={BATCH}",
]  # fmt: skip
# Plans, and whether weights of a history add up to 1.
CASES = [
    ("table_wise", False), ("row_wise", False), ("column_wise", False), ("data_parallel", False),
    ("row_wise", True),
]  # fmt: skip
# Of the largest value of a tensor: moments are float32.
EXACT = 1e-5


def without_histories_of_a_rank(arrays):
    """The second half of the first batch of an epoch has no history."""
    start, stop = BATCH // 2, BATCH
    for name in ("0", "2", "3"):
        offsets = arrays[f"offsets_{name}"]
        begin, end = offsets[start], offsets[stop]
        arrays[f"values_{name}"] = np.delete(arrays[f"values_{name}"], slice(begin, end))
        offsets[start : stop + 1] = begin
        offsets[stop + 1 :] -= end - begin
    return arrays


def with_weights(arrays):
    """Some are negative, some 0."""
    draw = np.random.default_rng(3)
    for number in (1, 4):
        drawn = draw.integers(-3, 6, len(arrays[f"values_{number}"]))
        arrays[f"weights_{number}"] = drawn.astype(np.float32) / 4
    return arrays


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    parts = {
        name: without_histories_of_a_rank(with_weights(drawn_rows(rows, 4, 0, multi=5, seed=seed)))
        for seed, (name, rows) in enumerate({"train": 333, "test": 67}.items())
    }
    return write_prepared(tmp_path_factory.mktemp("data") / "data", parts, FIELDS, 100)


def config_of(folder, data, *job, **more):
    return prepared_config(folder, data, *JOB, "data.shuffle=none", *job, **more)


def trained_in_float64(folder, data, ranks, cases):
    compute_in_float64()
    with processes("cpu") as here:
        found = []
        for plan, softmax in cases:
            job = [f"sharding.plan={plan}", f"model.attention.softmax={softmax}"]
            found.append(train_an_epoch_in(here, config_of(folder, data, *job, world_size=ranks)))
        return found


def prelu(x, slope):
    return torch.where(x > 0, x, x * slope)


def layers_of(layers, prefix):
    found = []
    while f"{prefix}.hidden._mlp.{len(found)}._linear.weight" in layers:
        at = f"{prefix}.hidden._mlp.{len(found)}"
        names = ("_linear.weight", "_linear.bias", "_activation_fn.activation.weight")
        found.append([layers[f"{at}.{name}"] for name in names])
    return found


def attended(layers, field, query, keys, softmax):
    """DIN's unit for one sample: its query's embedding, and those of its history."""
    if not len(keys):
        return keys.new_zeros(DIM)
    x = torch.cat([query.expand_as(keys), keys, query - keys, query * keys], 1)
    for weight, bias, slope in layers_of(layers, f"attention.of_{field}"):
        x = prelu(x @ weight.T + bias, slope)
    prefix = f"attention.of_{field}.output"
    weights = (x @ layers[f"{prefix}.weight"].T + layers[f"{prefix}.bias"]).squeeze(1)
    return (weights.softmax(0) if softmax else weights) @ keys


def logits_of(tables, layers, batch, softmax):
    table_of = {field: name for name, fields in TABLES.items() for field in fields}

    def rows_of(table, ids):
        embeddings = tables[table][ids.long()][:, : DIMS.get(table, DIM)]
        projection = layers.get(f"projections.of_{table}")
        return embeddings if projection is None else embeddings @ projection.T

    cells = {
        name: [
            rows_of(table_of[name], ids)
            for ids in batch.sparse[name].values().split(batch.sparse[name].lengths().tolist())
        ]
        for name in FIELDS
    }
    weights = {
        name: one.weights().split(one.lengths().tolist())
        for name, one in batch.sparse.to_dict().items()
    }
    embeddings = []
    for sample in range(len(batch.label)):
        query = cells["C1"][sample].sum(0)
        parts = []
        for name in FIELDS:
            rows = cells[name][sample]
            if name in HISTORIES:
                parts.append(attended(layers, name, query, rows, softmax))
            else:
                if FIELDS[name][2:] and FIELDS[name][2].get("weighted"):
                    rows = rows * weights[name][sample].double().unsqueeze(1)
                parts.append(rows.sum(0) / (max(len(rows), 1) if name == "M2" else 1))
        embeddings.append(torch.cat(parts))
    x = torch.stack(embeddings)
    for weight, bias, slope in layers_of(layers, "network.mlp"):
        x = prelu(x @ weight.T + bias, slope)
    return (x @ layers["network.mlp.output.weight"].T).squeeze(1) + layers["bias"]


def trained_by_reference(folder, data, softmax):
    """Losses, and the tables `[rows, dim + 1]` and dense layers at the end."""
    config = config_of(folder, data, f"model.attention.softmax={softmax}")
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        scaled, clip = job.scaling.scaled, config.optim.embedding.clip
        tables = ReferenceTables(
            {
                name: torch.cat(gather_field(job.model, name, DIMS.get(name, DIM), here), 1)
                for name in TABLES
            },
            lr=scaled.embedding_lr, l2=scaled.embedding_l2, granularity="cowclip",
            bound=clip.bound, ratio=clip.ratio, columns={n: DIMS.get(n, DIM) for n in TABLES},
            rows=config.optim.embedding.rows,
        )  # fmt: skip
        dense = {name: p.detach().view(-1, 1) for name, p in job.dense_parameters.items()}
        shapes = {name: p.shape for name, p in job.dense_parameters.items()}
        dense, losses, empty = ReferenceTables(dense, lr=scaled.dense_lr), [], 0
        for batch in Reader(config, dataset, here).training():
            half = len(batch.label) // 2
            empty += not any(batch.sparse[name].lengths()[half:].any() for name in HISTORIES)
            given = {name: w.requires_grad_() for name, w in tables.weights.items()}
            layers = {n: w.view(shapes[n]).requires_grad_() for n, w in dense.weights.items()}
            of_samples = functional.binary_cross_entropy_with_logits(
                logits_of(given, layers, batch, softmax), batch.label.double(), reduction="none"
            )
            loss = of_samples[: batch.samples].mean()
            losses.append(loss.item())
            found = torch.autograd.grad(loss, [*given.values(), *layers.values()])
            for weights in given.values():
                weights.requires_grad_(False)
            counts = {
                name: sum(batch.sparse[f].values().long().bincount(minlength=ROWS) for f in fields)
                for name, fields in TABLES.items()
            }
            tables.step(dict(zip(TABLES, found, strict=False)), counts, frozen=FROZEN)
            of_layers = (grad.view(-1, 1) for grad in found[len(TABLES) :])
            ones = {name: torch.ones(len(w)) for name, w in dense.weights.items()}
            dense.step(dict(zip(layers, of_layers, strict=True)), ones)
    assert empty == 1
    return losses, tables, dense.weights


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    return {
        softmax: trained_by_reference(tmp_path_factory.mktemp("reference"), data, softmax)
        for softmax in (False, True)
    }


@pytest.mark.cases(2)
@pytest.mark.parametrize("ranks, cases", [(1, CASES[::4]), (2, CASES), (4, CASES[1:3])])
def test_training_is_that_of_the_reference(tmp_path, data, expected, ranks, cases):
    # One launch goes through all plans.
    trained = run_ranks(ranks, trained_in_float64, tmp_path, data, ranks, cases)[0]
    for (plan, softmax), found in zip(cases, trained, strict=True):
        losses, tables, dense = expected[softmax]
        # Some rows are clipped and some are not, and ids repeat across fields.
        assert 0.1 < tables.clipped / tables.touched < 0.9 and tables.largest_count > 10
        assert found.plan == {plan}
        assert found.losses == pytest.approx(losses, rel=EXACT)
        assert list(found.tables) == list(TABLES)
        assert found.without_state <= set(FROZEN) and (ranks > 1 or found.without_state)
        for name, weights in found.tables.items():
            largest = tables.weights[name].abs().max()
            deviation = (torch.cat(weights, 1) - tables.weights[name]).abs().max()
            assert deviation < EXACT * largest, (plan, name)
        for name, weights in found.dense.items():
            torch.testing.assert_close(weights.view(-1, 1), dense[name], rtol=0, atol=EXACT)


@pytest.mark.wide
def test_reproducible_runs_end_with_the_same_bits(tmp_path, data):
    job = [one for one in JOB if not one.startswith("model.pretrained")]
    runs = []
    for ranks, plan in ((1, "auto"), (2, "auto"), (2, "row_wise")):
        folder = tmp_path / f"{plan}_{ranks}"
        folder.mkdir()
        given = ["train.reproducible=true", f"sharding.plan={plan}", *job]
        run_ranks(ranks, run_prepared, folder, data, given, ranks)
        runs.append(folder / "small")
    alone, *together = runs
    for run in together:
        same_end(run, alone)
