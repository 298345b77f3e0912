"""Other projects' models on a raw log, for the comparison in `quality.py`.

Each reads the log itself, learns from the training rows, is tuned on the validation rows and scores
the test rows. One process, one model; the last line it prints is JSON.

    python benchmarks/peers/raw_logs.py lr criteo LOG --parts PARTS.npy --seed 1 --scratch FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import product, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from sklearn.metrics import log_loss, roc_auc_score

if TYPE_CHECKING:
    import torch

CRITEO_NUMBERS = [f"I{i}" for i in range(1, 14)]
CRITEO_IDS = [f"C{i}" for i in range(1, 27)]


@dataclass(frozen=True)
class Layout:
    """What the columns of a log mean; all are read as text.

    Attributes:
        clicked: whether a row is a click.
        numbers, ids: columns.
        lists: separators of columns with several ids a cell, by name.
        times: ids made of a time, by name.
        csv: options of `polars.read_csv`.
    """

    clicked: pl.Expr
    ids: Sequence[str]
    numbers: Sequence[str] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    times: Mapping[str, pl.Expr] = field(default_factory=dict)
    csv: Mapping[str, object] = field(default_factory=dict)


_SCHEDULED = pl.col("scheduled").str.to_datetime("%Y-%m-%d %H:%M:%S")
LAYOUTS = {
    "criteo": Layout(
        pl.col("label") == "1",
        CRITEO_IDS,
        CRITEO_NUMBERS,
        csv={
            "separator": "\t",
            "quote_char": None,
            "has_header": False,
            "new_columns": ["label", *CRITEO_NUMBERS, *CRITEO_IDS],
        },
    ),
    "avazu": Layout(
        pl.col("click") == "1",
        [
            *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id"),
            *("app_domain", "app_category", "device_id", "device_ip", "device_model"),
            *("device_type", "device_conn_type"),
            *(f"C{i}" for i in range(14, 22)),
        ],
        times={"hour": pl.col("hour").str.slice(6, 2)},
    ),
    "movielens": Layout(
        pl.col("rating").cast(pl.Float64) >= 4,
        ["user_id", "age", "gender", "occupation", "zip", "movie_id", "year"],
        lists={"genres": "|"},
    ),
    "adult": Layout(
        pl.col("income").str.strip_chars() == ">50K",
        [
            *("workclass", "education", "marital_status", "occupation", "relationship", "race"),
            *("sex", "native_country"),
        ],
        ["age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"],
    ),
    "flights": Layout(
        pl.col("late") == "1",
        ["carrier", "flight", "tailnum", "origin", "dest"],
        ["sched_arr_time", "distance"],
        times={
            "hour": _SCHEDULED.dt.hour().cast(pl.String),
            "weekday": _SCHEDULED.dt.weekday().cast(pl.String),
        },
    ),
}

LR_STRENGTHS, HASHED_BITS = (0.01, 0.03, 0.1, 0.3, 1), 20

TREE_GRID = {"num_leaves": (15, 31, 63), "min_data_in_leaf": (20, 100)}
TREES = {
    "objective": "binary",
    "metric": "auc",
    "learning_rate": 0.1,
    "feature_fraction": 0.5,
    "lambda_l2": 5,
    "feature_pre_filter": False,
    "deterministic": True,
    "verbose": -1,
}
MOST_TREES, TREE_PATIENCE = 1000, 30

# BARS' best settings of DeepFM for these logs, DeepFM_criteo_x4_001 and DeepFM_avazu_x4_001, tuned
# on the whole logs, not on samples: rare ids have fewer occurrences than the first number.
BARS = {
    "criteo": (10, {"hidden_units": [1000] * 5, "net_dropout": 0.2, "embedding_regularizer": 1e-5}),
    "avazu": (2, {"hidden_units": [2000] * 4, "net_dropout": 0, "embedding_regularizer": 0}),
}
BARS_BATCH, BARS_EPOCHS, BARS_DIM = 10_000, 100, 16


@dataclass(frozen=True)
class Rows:
    """A log in memory.

    Attributes:
        kind: one of `LAYOUTS`.
        frame: its columns as text, missing cells as null.
        label: `[n]` int8.
        parts: `[n]` int8: 0 training, 1 validation, 2 test.
    """

    kind: str
    frame: pl.DataFrame
    label: np.ndarray
    parts: np.ndarray

    @property
    def layout(self) -> Layout:
        """What the columns mean."""
        return LAYOUTS[self.kind]

    def part(self, number: int) -> np.ndarray:
        """Indices of a part's rows."""
        return np.flatnonzero(self.parts == number)


def read_rows(kind: str, log: Path, parts: np.ndarray) -> Rows:
    """Read a log.

    Raises:
        ValueError: the log and the parts differ in their number of rows.
    """
    layout = LAYOUTS[kind]
    frame = pl.read_csv(log, infer_schema=False, **layout.csv)
    if len(frame) != len(parts):
        raise ValueError(f"{log} has {len(frame)} rows, but parts were given for {len(parts)}")
    label = frame.select(layout.clicked.cast(pl.Int8)).to_series().to_numpy()
    return Rows(kind, frame, label, parts)


def tokens(rows: Rows) -> Iterator[list[str]]:
    """`column=value` for each column of a row, and for each id of a list.

    A number becomes floor(2 ln(1 + max(x, 0))), or `m` if missing.
    """
    layout = rows.layout
    numbers = [pl.col(name).cast(pl.Float64, strict=False).clip(0) for name in layout.numbers]
    buckets = [(number.log1p() * 2).floor().cast(pl.Int64).cast(pl.String) for number in numbers]
    times = [value.fill_null("").alias(name) for name, value in layout.times.items()]
    ids = [pl.col(name).fill_null("") for name in layout.ids]
    plain = rows.frame.select([bucket.fill_null("m") for bucket in buckets] + times + ids)
    plain = plain.select(pl.format(f"{name}={{}}", name).alias(name) for name in plain.columns)
    cells = rows.frame.select(pl.col(name).fill_null("") for name in layout.lists)
    several = cells.iter_rows() if layout.lists else repeat(())
    for row, lists in zip(plain.iter_rows(), several, strict=False):
        of_lists = zip(layout.lists.items(), lists, strict=True)
        yield [*row, *(f"{name}={one}" for (name, by), cell in of_lists for one in cell.split(by))]


def logistic_regression(rows: Rows, seed: int, scratch: Path) -> dict:
    """scikit-learn's model on hashed tokens; validation AUC chooses the regularisation."""
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import LogisticRegression

    hasher = FeatureHasher(2**HASHED_BITS, input_type="string")
    hashed = hasher.transform(tokens(rows))
    train, validation, test = map(rows.part, range(3))
    tried = []
    for strength in LR_STRENGTHS:
        model = LogisticRegression(solver="liblinear", C=strength, random_state=seed)
        model.fit(hashed[train], rows.label[train])
        predicted = [model.predict_proba(hashed[at])[:, 1] for at in (validation, test)]
        tried.append({**scores(rows, *predicted), "chosen": {"C": strength}})
    return max(tried, key=lambda one: one["validation_auc"])


def tree_inputs(rows: Rows) -> np.ndarray:
    """Plain numbers, parts of the time, frequency and frequency rank of each id, lists as 0 or 1.

    Frequencies are from the training part; other ids have 0 and the last rank. Labels are not used.

    Returns:
        `[n, inputs]` float64, missing numbers as NaN.
    """
    layout = rows.layout
    numbers = [pl.col(name) for name in layout.numbers] + list(layout.times.values())
    inputs = [
        rows.frame.select(one.cast(pl.Float64, strict=False)).to_series().to_numpy()
        for one in numbers
    ]
    for name, separator in layout.lists.items():
        cells = rows.frame[name].fill_null("").str.split(separator)
        known = sorted(set(cells.explode()))
        inputs += [cells.list.contains(one).cast(pl.Float64).to_numpy() for one in known]
    train = pl.Series(rows.parts == 0)
    for name in layout.ids:
        ids = rows.frame.select(pl.col(name).fill_null("").alias("id"))
        counts = ids.filter(train).group_by("id").len("count")
        counts = counts.sort(["count", "id"], descending=[True, False]).with_row_index("rank")
        known = ids.join(counts, on="id", how="left", maintain_order="left")
        for column, unknown in (("count", 0), ("rank", len(counts))):
            inputs.append(known[column].fill_null(unknown).cast(pl.Float64).to_numpy())
    return np.column_stack(inputs)


def boosted_trees(rows: Rows, seed: int, scratch: Path) -> dict:
    """LightGBM on frequencies; validation AUC chooses the leaves and the end of boosting."""
    import lightgbm

    inputs = tree_inputs(rows)
    train, validation, test = map(rows.part, range(3))
    settings = {**TREES, "seed": seed, "num_threads": int(os.environ.get("OMP_NUM_THREADS", 0))}
    stop = lightgbm.early_stopping(TREE_PATIENCE, verbose=False)
    tried = []
    for values in product(*TREE_GRID.values()):
        grid = dict(zip(TREE_GRID, values, strict=True))
        data = lightgbm.Dataset(inputs[train], rows.label[train], free_raw_data=False)
        held = data.create_valid(inputs[validation], rows.label[validation])
        model = lightgbm.train(
            {**settings, **grid}, data, MOST_TREES, valid_sets=[held], callbacks=[stop]
        )
        predicted = [model.predict(inputs[at]) for at in (validation, test)]
        chosen = {**grid, "trees": model.best_iteration}
        tried.append({**scores(rows, *predicted), "chosen": chosen})
    best = max(tried, key=lambda one: one["validation_auc"])
    return {**best, "version": f"lightgbm {metadata.version('lightgbm')}"}


def fuxictr_deepfm(rows: Rows, seed: int, scratch: Path) -> dict:
    """FuxiCTR's DeepFM: its own preparation, layers and training loop, with BARS' settings."""
    from fuxictr.pytorch.torch_utils import seed_everything

    seed_everything(seed)
    fewest, settings = BARS[rows.kind]
    feature_map, (train, validation, test) = _fuxictr_parts(rows, fewest, scratch)
    model = _fuxictr_network()(
        feature_map,
        model_root=str(scratch),
        embedding_dim=BARS_DIM,
        metrics=["logloss", "AUC"],
        monitor={"AUC": 1, "logloss": -1},
        verbose=0,
        **settings,
    )
    model.fit(Batches(train, shuffle=True), BARS_EPOCHS, Batches(validation))
    predicted = [model.predict(Batches(part)) for part in (validation, test)]
    return {
        **scores(rows, *predicted),
        "chosen": {"epochs": model._epoch_index + 1},
        "version": f"fuxictr {metadata.version('fuxictr')}",
    }


@dataclass
class Batches:
    """FuxiCTR's batches; its loaders, which yield the same, start a Ray cluster."""

    columns: dict[str, torch.Tensor]
    shuffle: bool = False

    def __len__(self) -> int:
        return -(-len(self.columns["label"]) // BARS_BATCH)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch

        count = len(self.columns["label"])
        order = torch.randperm(count) if self.shuffle else torch.arange(count)
        for at in order.split(BARS_BATCH):
            yield {name: column[at] for name, column in self.columns.items()}


def _fuxictr_network() -> type:
    """DeepFM as in FuxiCTR's model zoo; the package has only the layers and the loop."""
    from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    class DeepFM(BaseModel):
        def __init__(self, feature_map: object, **settings: object) -> None:
            super().__init__(feature_map, model_id="DeepFM", **settings)
            self.embedding_layer = FeatureEmbedding(feature_map, BARS_DIM)
            self.fm = FactorizationMachine(feature_map)
            self.mlp = MLP_Block(
                input_dim=feature_map.num_fields * BARS_DIM,
                output_dim=1,
                hidden_units=settings["hidden_units"],
                dropout_rates=settings["net_dropout"],
            )
            self.compile("adam", "binary_crossentropy", 1e-3)
            self.reset_parameters()
            self.model_to_device()

        def forward(self, inputs: dict) -> dict:
            ids = self.get_inputs(inputs)
            embedded = self.embedding_layer(ids)
            logits = self.fm(ids, embedded) + self.mlp(embedded.flatten(start_dim=1))
            return {"y_pred": self.output_activation(logits)}

    return DeepFM


def _fuxictr_parts(
    rows: Rows, fewest: int, scratch: Path
) -> tuple[object, list[dict[str, torch.Tensor]]]:
    """FuxiCTR's feature map, and the three parts as it prepares them."""
    import torch
    from fuxictr.datasets.avazu import CustomizedFeatureProcessor as AvazuProcessor
    from fuxictr.datasets.criteo import CustomizedFeatureProcessor as CriteoProcessor

    processor = {"criteo": CriteoProcessor, "avazu": AvazuProcessor}[rows.kind](
        feature_cols=_fuxictr_columns(rows),
        label_col={"name": "label", "dtype": "float"},
        dataset_id=rows.kind,
        data_root=str(scratch),
    )
    numbers = [pl.col(name).cast(pl.Float64) for name in rows.layout.numbers]
    log = rows.frame.with_columns(pl.Series("label", rows.label.astype(float)), *numbers)
    parts = [processor.preprocess(log[rows.part(number)].lazy()) for number in range(3)]
    processor.fit(parts[0], min_categr_count=fewest)

    def columns(part: pl.LazyFrame) -> dict[str, torch.Tensor]:
        ids = processor.transform({c.name: c.to_numpy() for c in part.collect()})
        return {name: torch.as_tensor(np.asarray(column)) for name, column in ids.items()}

    return processor.feature_map, list(map(columns, parts))


def _fuxictr_columns(rows: Rows) -> list[dict]:
    ids = {"active": True, "type": "categorical", "dtype": "str", "fill_na": ""}
    ids["name"] = list(rows.layout.ids)
    if rows.kind == "criteo":
        bucket = {"dtype": "float", "fill_na": 0, "preprocess": "convert_to_bucket"}
        return [{**ids, **bucket, "name": list(rows.layout.numbers)}, ids]
    # `hour` comes before the columns made from it, as FuxiCTR goes backwards.
    times = ("hour", "weekday", "weekend")
    return [ids, *({**ids, "name": name, "preprocess": f"convert_{name}"} for name in times)]


def scores(rows: Rows, validation: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """AUC and logloss of both parts, named as in a run's summary."""
    found = {}
    for prefix, number, predicted in (("validation_", 1, validation), ("", 2, test)):
        label, p = rows.label[rows.part(number)], predicted.astype(np.float64)
        found[f"{prefix}auc"] = float(roc_auc_score(label, p))
        found[f"{prefix}logloss"] = float(log_loss(label, p))
    return found


PEERS: dict[str, Callable[[Rows, int, Path], dict]] = {
    "lr": logistic_regression,
    "lightgbm": boosted_trees,
    "fuxictr": fuxictr_deepfm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("kind", choices=LAYOUTS)
    parser.add_argument("log", type=Path)
    parser.add_argument("--parts", type=Path, required=True, help="part of each row, .npy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for what it writes")
    options = parser.parse_args()
    rows = read_rows(options.kind, options.log, np.load(options.parts))
    found = PEERS[options.peer](rows, options.seed, options.scratch)
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
