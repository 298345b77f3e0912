"""Ranks that read one prepared data set: the same batches, and the same training, on any number."""

import numpy as np
import pytest
import torch

from stampede.engine.job.build import build
from stampede.engine.processes import processes
from stampede.engine.reading import Reader, open_dataset
from stampede.engine.step import send, train_step
from support.jobs import assert_same_training, train_an_epoch, without_times
from support.ranks import run_ranks
from support.reading import prepared, prepared_config, run_prepared

pytestmark = pytest.mark.slow


def train_prepared(folder, data, overrides=(), world_size=1):
    """An epoch on a prepared folder."""
    return train_an_epoch(prepared_config(folder, data, *overrides, world_size=world_size))


def batches_of_this_rank(folder, data, overrides, world_size, epochs, state=None, stop=None):
    """Rows of this rank's batches, by their first number, and the reader's state after them."""
    config = prepared_config(folder, data, *overrides, world_size=world_size)
    with processes("cpu") as here:
        batches = Reader(config, open_dataset(config, here), here).training()
        if state is not None:
            batches.load_state_dict(state)
        seen = []
        for _ in range(epochs):
            for batch in batches:
                seen.append(batch.dense[: batch.samples, 0].long().tolist())
                if len(seen) == stop:
                    return seen, batches.state_dict()
        return seen, batches.state_dict()


def first_loss_and_its_parts(folder, data):
    """Loss of the first step beside logits, labels and weights of its batch, in numpy."""
    config = prepared_config(folder, data)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        batch = next(iter(Reader(config, dataset, here).training()))
        with torch.no_grad():
            logits = job.model(batch.sparse, batch.dense)
        parts = [np.asarray(part) for part in (logits, batch.label, batch.weight)]
        loss = train_step(job, send(batch, job.front, here.device), 1, here).item()
        finite = all(bool(p.isfinite().all()) for p in job.dense_parameters.values())
        return loss, parts, finite


def joined(ranks):
    """Sorted rows of each global batch."""
    seen = [batches for batches, _ in ranks]
    assert len({len(batches) for batches in seen}) == 1
    return [sorted(sum(parts, [])) for parts in zip(*seen, strict=True)]  # noqa: RUF017


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_ranks_share_the_batches_and_resume_for_each_other(tmp_path, shuffle):
    # 333 rows are 6 batches of 64, the last of 13: with 4 ranks 4, 4, 4 and 1 of them.
    data = prepared(tmp_path / "data")
    overrides = [f"data.shuffle={shuffle}"]

    def read(ranks, epochs, state=None, stop=None):
        arguments = (tmp_path, data, overrides, ranks, epochs, state, stop)
        if ranks == 1:
            return [batches_of_this_rank(*arguments)]
        return run_ranks(ranks, batches_of_this_rank, *arguments)

    alone = joined(read(1, 2))
    assert [len(batch) for batch in alone] == 2 * [64, 64, 64, 64, 64, 13]
    assert sorted(sum(alone[:6], [])) == list(range(333))  # noqa: RUF017
    assert alone[:6] != alone[6:]
    assert joined(read(4, 2)) == alone
    two = read(2, 2, stop=8)
    assert joined(two) == alone[:8]
    states = [state for _, state in two]
    assert states[0] == states[1]
    assert joined(read(4, 1, states[0])) == alone[8:]
    assert joined(read(1, 1, states[0])) == alone[8:]


@pytest.mark.wide
@pytest.mark.parametrize("ranks, plan", [(4, "row_wise"), (2, "data_parallel")])
def test_ranks_whose_part_of_a_batch_is_empty(tmp_path, ranks, plan):
    """Of a sample, as the last batch of training and of evaluation has here."""
    data = prepared(tmp_path / "data", train=2 * 64 + 1, test=32 + 1)
    batches = run_ranks(ranks, batches_of_this_rank, tmp_path, data, [], ranks, 1)
    assert [len(read[-1]) for read, _ in batches] == [1, *[0] * (ranks - 1)]
    alone = train_prepared(tmp_path, data)
    assert len(alone[0]) == 3 and alone[1]["samples"] == 33
    together = run_ranks(ranks, train_prepared, tmp_path, data, [f"sharding.plan={plan}"], ranks)
    assert_same_training(alone, together[0])
    assert len({tuple(losses) for losses, *_ in together}) == 1


def test_two_ranks_train_without_numbers_as_one(tmp_path):
    data = prepared(tmp_path / "data", multi=0, weight=False, numbers=0)
    alone = train_prepared(tmp_path, data)
    assert not any("number_weights" in name for name in alone.dense)
    assert_same_training(alone, run_ranks(2, train_prepared, tmp_path, data, (), 2)[0])


def test_where_the_data_are_changes_nothing(tmp_path):
    data = prepared(tmp_path / "data")
    runs = {}
    for residence in ("disk", "memory", "device"):
        folder = tmp_path / residence
        folder.mkdir()
        run_prepared(folder, data, [f"data.residence={residence}", "data.shuffle=block",
                                    "data.memory_gb=1e-5", "train.epochs=2"])  # fmt: skip
        runs[residence] = without_times(folder / "small")
    assert runs["disk"] == runs["memory"] == runs["device"]


def test_the_loss_is_the_weighted_mean(tmp_path):
    data = prepared(tmp_path / "data")
    loss, (logits, label, weight), _ = first_loss_and_its_parts(tmp_path, data)
    assert set(weight.tolist()) == {0.0, 0.5, 1.0, 1.5}
    losses = np.logaddexp(0, np.where(label == 1, -logits, logits))
    assert loss == pytest.approx((losses * weight).sum() / weight.sum(), rel=1e-5)
    none = prepared(tmp_path / "none", change=lambda arrays: arrays["weight"].fill(0))
    loss, _, finite = first_loss_and_its_parts(tmp_path, none)
    assert loss == 0 and finite


def train_weighted(folder, scale, *overrides):
    """An epoch on samples whose weights are 0, 1 and 2 times the scale."""

    def fill(arrays):
        arrays["weight"][:] = np.arange(333) % 3 * np.float64(scale)

    folder.mkdir()
    return train_prepared(folder, prepared(folder / "data", change=fill), overrides)


@pytest.mark.parametrize("factor", [1e38, 2e-38])
def test_only_the_ratios_of_weights_matter(tmp_path, factor):
    """Also where the sum of the weights, or a loss times a weight, is no float32."""
    one, other = train_weighted(tmp_path / "one", 1), train_weighted(tmp_path / "other", factor)
    assert other.losses == pytest.approx(one.losses, rel=2e-3)
    torch.testing.assert_close(other.dense, one.dense, rtol=1e-2, atol=1e-4)


def test_counts_of_ids_ignore_weights(tmp_path):
    """Weights four times as large change nothing, although every table's rows are clipped."""
    clip = "optim.embedding.clip.ratio=1e-3"
    one, other = (train_weighted(tmp_path / str(scale), scale, clip) for scale in (1, 4))
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
    for field, weights in one.tables.items():
        torch.testing.assert_close(other.tables[field].embedding, weights.embedding)
