"""Criteo-shaped clicks from a known truth, so that the attainable AUC is known too."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stampede.data.samples import Bag, Dataset, Samples, Slice
from stampede.files import new_file

# A GPU machine without Polars can train on synthetic clicks; only log files need it.
if TYPE_CHECKING:
    import polars as pl

# Rows and distinct ids of the 26 id columns of Criteo Kaggle (display advertising challenge).
CRITEO_ROWS = 45_840_617
CRITEO_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
NUMBERS = 13

# Rows drawn from one random stream; any row is reached by drawing its block.
BLOCK_ROWS = 1024

TRAIN, TEST, TRUTH, _CALIBRATION, _DRIFT, _CONVERSION = range(6)

# Goals with conversions, and the mean logit of a conversion after a click.
GOALS = ("click", "conversion")
_CONVERSION_BIAS = -2.5

# Of `CriteoClicks`: fields of more ids than the first number have no end of ids, of which those
# that are the same modulo it share their hidden weights; ids end here all the same.
_ENDLESS, _LAST_ID = 1 << 20, 1 << 31

# Fields of more ids than this have new ones in later files of a log.
_STABLE = 1000

# Of a log: rows written together, share of missing values of every third column.
_CHUNK, _MISSING = 1 << 18, 0.1
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


@dataclass(frozen=True)
class SyntheticClicks:
    """A factorization machine over Zipf-distributed ids, as hidden truth.

    The logit is `bias + numbers + first order + interactions`: a linear function of the numbers, a
    weight per id, and `sum_{i<j} <v_i, v_j>` with a hidden vector per id. The three parts have the
    standard deviations given here. Nothing is kept in memory but the truth, which grows with the
    number of ids, not of rows.

    Attributes:
        seed: seed of truth and samples.
        scale: cardinalities relative to Criteo Kaggle's; fields of up to 1000 ids keep theirs.
        zipf: exponent of the ids' distribution, above 1.
        rank: width of the hidden vectors.
        numbers_std, first_order_std, interactions_std: spread of the logit's parts.
        bias: mean logit.
        conversions: whether there is a second goal. Some clicks convert: the logit of a conversion
            after a click is half the click's own, from the ids' weights, and a weight per id of its
            own. So clicks tell much of conversions, which are rarer.
    """

    seed: int = 0
    scale: float = 0.01
    zipf: float = 1.2
    rank: int = 2
    numbers_std: float = 0.4
    first_order_std: float = 1.0
    interactions_std: float = 1.1
    bias: float = -1.2
    conversions: bool = False

    def cardinalities(self) -> tuple[int, ...]:
        """Ids of each field."""
        return tuple(
            max(min(size, 1000), round(size * self.scale)) for size in CRITEO_CARDINALITIES
        )

    def exponents(self) -> np.ndarray:
        """Exponent of the Zipf distribution of each field's ids."""
        return np.full(len(CRITEO_CARDINALITIES), self.zipf)

    def is_endless(self) -> np.ndarray:
        """Of each field: whether its ids have no end."""
        return np.zeros(len(CRITEO_CARDINALITIES), dtype=bool)

    def dataset(self, train_rows: int, test_rows: int, validation_rows: int = 0) -> Dataset:
        """Parts of that many rows; validation is the end of the training rows."""
        truth = _Truth(self)
        train = SyntheticPart(truth, TRAIN, train_rows)
        kept = train_rows - validation_rows
        return Dataset(
            vocabulary_sizes={f"C{i + 1}": n for i, n in enumerate(self.cardinalities())},
            numbers=NUMBERS,
            train=Slice(train, 0, kept),
            validation=Slice(train, kept, train_rows) if validation_rows else None,
            test=SyntheticPart(truth, TEST, test_rows),
            goals=GOALS if self.conversions else (),
            shuffle=False,
        )


@dataclass(frozen=True)
class CriteoClicks(SyntheticClicks):
    """Clicks of a log whose ids are as many and as frequent as Criteo Kaggle's; see `--criteo`.

    The five large fields have no end of ids: however many rows, new ones occur. In Criteo Kaggle's
    45.8 million rows as many distinct ones occur as there, so a part of the log has those that a
    part of Criteo's would have. `scale`, and `zipf` for the large fields, do not matter.
    """

    def cardinalities(self) -> tuple[int, ...]:
        """Hidden weights of each field; of fields with an end, its ids."""
        return tuple(min(size, _ENDLESS) for size in CRITEO_CARDINALITIES)

    def exponents(self) -> np.ndarray:
        """Exponent of the Zipf distribution of each field's ids."""
        endless = zip(CRITEO_CARDINALITIES, self.is_endless(), strict=True)
        return np.array([_exponent(size) if no_end else self.zipf for size, no_end in endless])

    def is_endless(self) -> np.ndarray:
        """Of each field: whether its ids have no end."""
        return np.array(CRITEO_CARDINALITIES) > _ENDLESS


def _exponent(distinct: int) -> float:
    """Of the Zipf distribution without an end of which so many ids occur in Criteo's rows.

    `P(id k) = (s - 1) k^-s` gives `Gamma(1 - 1/s) ((s - 1) n)^(1/s)` distinct ids in n rows.
    """
    low, high = 1.01, 2.0
    for _ in range(50):
        exponent = (low + high) / 2
        occur = math.gamma(1 - 1 / exponent) * ((exponent - 1) * CRITEO_ROWS) ** (1 / exponent)
        low, high = (exponent, high) if occur > distinct else (low, exponent)
    return low


class Drawn(NamedTuple):
    """Independent samples: `Samples` in numpy; with conversions, labels are `[n, 2]`.

    `history` is `[n, most]`, -1 where a sample has fewer ids; None without histories.
    """

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    true_probability: np.ndarray
    history: np.ndarray | None = None


class _Truth:
    """The hidden weights, and the drawing of samples from them."""

    def __init__(self, clicks: SyntheticClicks) -> None:
        self.clicks = clicks
        self.sizes = np.array(clicks.cardinalities())
        self.exponents = 1.0 - clicks.exponents()
        # Of each field, the share of the power law that is beyond its last id.
        ends = (self.sizes + 1.0) ** self.exponents
        self.is_endless = clicks.is_endless()
        self.beyond = np.where(self.is_endless, 0.0, ends)
        # Ids of all fields are in one array, field after field.
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        draw = np.random.default_rng([clicks.seed, TRUTH])
        total = int(self.sizes.sum())
        self.number_weights = draw.standard_normal(NUMBERS).astype(np.float32)
        self.weights = draw.standard_normal(total, dtype=np.float32)
        self.vectors = draw.standard_normal((total, clicks.rank), dtype=np.float32)
        # Of conversions after a click.
        draw = np.random.default_rng([clicks.seed, _CONVERSION])
        self.own_weights = draw.standard_normal(total, dtype=np.float32)
        # Give each field's weights and vectors mean zero over its samples. The interactions then
        # have no first-order part: no sum over single fields explains them.
        for size, offset, exponent, end, beyond in zip(
            self.sizes, self.offsets, self.exponents, ends, self.beyond, strict=True
        ):
            field = slice(offset, offset + size)
            # A power law `x^-zipf` over [1, size + 1), cut into ids.
            below = (1.0 - (np.arange(size + 1) + 1.0) ** exponent) / (1.0 - beyond)
            # Later ids share the weights of these about evenly.
            share = np.diff(below) + (end - beyond) / size
            self.weights[field] -= share @ self.weights[field]
            self.own_weights[field] -= share @ self.own_weights[field]
            self.vectors[field] -= share @ self.vectors[field]
        # Scale the parts of the logit to the standard deviations asked for.
        draw = np.random.default_rng([clicks.seed, _CALIBRATION])
        ids, dense = self.draw_inputs(draw, 16 * BLOCK_ROWS)
        numbers, first_order, interactions = self.parts(ids, dense)
        self.number_weights *= clicks.numbers_std / numbers.std()
        self.weights *= clicks.first_order_std / first_order.std()
        self.own_weights *= 0.5 / self.own_weights[self.rows_of(ids)].sum(1).std()
        self.vectors *= np.sqrt(clicks.interactions_std / interactions.std())
        self.number_mean = self.parts(ids, dense)[0].mean()

    def drifted(self, replaced: float) -> tuple[_Truth, np.ndarray]:
        """The truth after some of the ids were replaced by new ones with weights of their own.

        `replaced` is the mean number of replacements per id. Also returns the replacements of each,
        `[ids of all fields]` int64.
        """
        draw = np.random.default_rng([self.clicks.seed, _DRIFT])
        times = np.floor(draw.random(len(self.weights)) + replaced).astype(np.int64)
        sizes = np.repeat(self.sizes, self.sizes)
        starts = np.repeat(self.offsets, self.sizes)
        times[sizes <= _STABLE] = 0
        ids = np.arange(len(times)) - starts
        # Each new id takes the weights of another; stepping by a large prime visits every id once.
        others = (ids + times * 7919) % sizes + starts
        after = copy(self)
        after.weights, after.vectors = self.weights[others], self.vectors[others]
        after.own_weights = self.own_weights[others]
        return after, times

    def draw_inputs(self, draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids `[rows, fields]` int64 and numbers `[rows, 13]` float32 in [0, 1]."""
        uniform = draw.random((rows, len(self.sizes)), dtype=np.float64)
        # The inverse of the power law; 0 is the most frequent id.
        x = (1.0 - uniform * (1.0 - self.beyond)) ** (1.0 / self.exponents)
        last = np.where(self.is_endless, _LAST_ID, self.sizes)
        ids = np.minimum(x, last).astype(np.int64) - 1
        if self.is_endless.any():
            # The rare ones beyond the last occur once each, nearly.
            rare = draw.integers(_LAST_ID, 2 * _LAST_ID, uniform.shape)
            ids = np.where(x > last, np.where(self.is_endless, rare, ids), ids)
        # Counts in click logs are mostly small; min-max scaling leaves them skewed to 0.
        dense = draw.random((rows, NUMBERS), dtype=np.float32) ** 3
        return ids, dense

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Places of ids in the hidden weights."""
        return (ids % self.sizes if self.is_endless.any() else ids) + self.offsets

    def parts(self, ids: np.ndarray, dense: np.ndarray) -> tuple[np.ndarray, ...]:
        """The three parts of the logit, `[rows]` each: numbers, first order, interactions."""
        rows = self.rows_of(ids)
        vectors = self.vectors[rows]
        total = vectors.sum(1)
        return (
            dense @ self.number_weights,
            self.weights[rows].sum(1),
            0.5 * ((total**2).sum(1) - (vectors**2).sum((1, 2))),
        )

    def draw_samples(self, draw: np.random.Generator, rows: int) -> Drawn:
        """Independent samples with their true click probability."""
        ids, dense = self.draw_inputs(draw, rows)
        numbers, first_order, interactions = self.parts(ids, dense)
        logit = self.clicks.bias + numbers - self.number_mean + first_order + interactions
        probability = (1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
        label = draw.random(rows, dtype=np.float32) < probability
        if self.clicks.conversions:
            own = self.own_weights[self.rows_of(ids)].sum(1)
            after = 1.0 / (1.0 + np.exp(-_CONVERSION_BIAS - 0.5 * first_order - own))
            converted = label & (draw.random(rows, dtype=np.float32) < after)
            label = np.stack([label, converted], 1)
            probability = np.stack([probability, probability * after.astype(np.float32)], 1)
        return Drawn(ids, dense, label.astype(np.uint8), probability)


class Truth(Protocol):
    """What decides clicks; `clicks` has a `seed`."""

    clicks: Any

    def draw_samples(self, draw: np.random.Generator, rows: int) -> Drawn:
        """Independent samples."""
        ...


@dataclass(frozen=True)
class SyntheticPart:
    """Rows of one stream; row i does not depend on which other rows are read."""

    truth: Truth
    stream: int
    rows: int

    device = torch.device("cpu")

    def read(self, rows: Tensor) -> Samples:
        """See `Part`."""
        drawn = self._drawn(rows.numpy())
        ids, dense, label, probability = map(torch.from_numpy, drawn[:4])
        bags = ()
        if drawn.history is not None:
            history = torch.from_numpy(drawn.history)
            bags = (Bag(history[history >= 0], (history >= 0).sum(1)),)
        return Samples(ids, dense, label, bags, true_probability=probability)

    def label(self, rows: Tensor) -> Tensor:
        """See `Part`."""
        return torch.from_numpy(self._drawn(rows.numpy()).label)

    def weight(self, rows: Tensor) -> None:
        """See `Part`."""
        return None

    @cached_property
    def _block(self) -> Callable[[int], Drawn]:
        """The rows of a block; batches smaller than one need it several times in a row."""

        @lru_cache(maxsize=2)
        def drawn(block: int) -> Drawn:
            key = np.random.SeedSequence([self.truth.clicks.seed, self.stream, block])
            draw = np.random.Generator(np.random.Philox(key))
            return self.truth.draw_samples(draw, BLOCK_ROWS)

        return drawn

    def _drawn(self, rows: np.ndarray) -> Drawn:
        blocks, of_row = np.unique(rows // BLOCK_ROWS, return_inverse=True)
        drawn = [self._block(block) for block in blocks.tolist() or [0]]
        places = of_row * BLOCK_ROWS + rows % BLOCK_ROWS
        return Drawn(
            *(
                None if one[0] is None else np.concatenate(one)[places]
                for one in zip(*drawn, strict=True)
            )
        )


def write_criteo_log(
    path: Path, rows: int, clicks: SyntheticClicks, number: int = 0, drift: float = 0.0
) -> None:
    """Write a file of a log in Criteo's layout, tab separated without a header, atomically.

    Label, 13 whole numbers, 26 ids of 8 hexadecimal digits; some are missing. With conversions, a
    label of these at the end. Rows follow those of files with a smaller `number`, from 0; `drift`
    is the share of the ids of large fields that are replaced by new ones from file to file.
    """
    import polars as pl
    from tqdm import tqdm

    truth, times = _Truth(clicks).drifted(drift * number)
    part = SyntheticPart(truth, TRAIN, (number + 1) * rows)
    with new_file(path) as unfinished, unfinished.open("wb") as file:
        starts = range(number * rows, part.rows, _CHUNK)
        for start in tqdm(starts, desc=f"writing {path.name}", mininterval=10, disable=None):
            read = part.read(torch.arange(start, min(start + _CHUNK, part.rows)))
            draw = np.random.default_rng([clicks.seed, start])
            click, *others = read.label.reshape(len(read.label), -1).numpy().astype(np.int8).T
            columns = {"label": click}
            for i, values in enumerate(read.dense.numpy().T):
                whole = (values * 10.0 ** (i % 4 + 1)).astype(np.int64)
                columns[f"I{i + 1}"] = _with_missing(pl.Series(whole), draw, i)
            for i, ids in enumerate(read.ids.numpy().T):
                if drift:
                    ids = ids + truth.sizes[i] * times[truth.offsets[i] + ids]
                columns[f"C{i + 1}"] = _with_missing(_hex(ids, i), draw, i)
            columns |= dict(zip(GOALS[1:], others, strict=False))
            frame = pl.DataFrame(columns)
            frame.write_csv(file, separator="\t", include_header=False, null_value="")


def conversions_schema() -> dict[str, Any]:
    """The schema of such a log with conversions."""
    from stampede.data.schema.schema import CRITEO

    goals = dict(zip(GOALS, ("label", GOALS[1]), strict=True))
    return {
        "separator": CRITEO.separator,
        "quote": CRITEO.quote,
        "columns": [*CRITEO.columns, GOALS[1]],
        "label": goals,
        "numbers": list(CRITEO.numbers),
        "ids": list(CRITEO.ids),
    }


def _with_missing(values: pl.Series, draw: np.random.Generator, column: int) -> pl.Series:
    import polars as pl

    if column % 3:
        return values
    return values.set(pl.Series(draw.random(len(values)) < _MISSING), None)


def _hex(ids: np.ndarray, field: int) -> pl.Series:
    """Eight hex digits for an id, different in every field."""
    import polars as pl
    import pyarrow as pa

    mixed = (ids.astype(np.uint64) * 2654435761 + field * 40503) & 0xFFFFFFFF
    shifts = np.arange(28, -1, -4, dtype=np.uint64)
    digits = _HEX[((mixed[:, None] >> shifts) & 15).astype(np.uint8)]
    offsets = np.arange(0, 8 * len(ids) + 1, 8, dtype=np.int32)
    text = pa.StringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(digits))
    return pl.from_arrow(text)
