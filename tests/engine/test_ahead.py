"""Batches are on their way while the one before is computed."""

import torch

from stampede.data import GlobalBatches
from stampede.engine.build import build
from stampede.engine.processes import processes
from stampede.engine.reading import open_dataset
from stampede.engine.step import prefetch
from stampede.optim import local_cowclip_tables
from support.jobs import small_config


class Front:
    """Notes what is sent."""

    def __init__(self, happened):
        self.happened = happened

    def send(self, sparse):
        self.happened.append(f"sent {sparse}")


class Numbered:
    """A batch that is copied nowhere."""

    def __init__(self, number):
        self.sparse = number

    def to(self, device, non_blocking):
        return self


def test_each_batch_is_sent_before_the_one_ahead_of_it_is_computed():
    happened, read = [], []

    def batches():
        for number in range(3):
            read.append(number)
            yield Numbered(number)

    sent = prefetch(batches(), Front(happened), torch.device("cpu"), lambda: len(read))
    for one in sent:
        happened.append(f"step {one.batch.sparse} of {one.position}")
    assert happened == [
        *("sent 0", "sent 1", "step 0 of 1"),
        *("sent 2", "step 1 of 2"),
        "step 2 of 3",
    ]


def test_all_fields_with_their_first_order_weights_are_looked_up_at_once(tmp_path):
    config = small_config(tmp_path)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        (tables,) = local_cowclip_tables(job.model)
        fields = list(dataset.vocabulary_sizes)
        assert len(fields) == 26 and len(tables.feature_table_map) == 26
        (array,) = tables.arrays
        assert [shard.table for shard in array.shards] == [
            f"front.ebc.t_{field}" for field in fields
        ]
        assert len(array.weights) == sum(dataset.vocabulary_sizes.values())
        assert array.weights.shape[1] > config.model.dim
        batch = next(GlobalBatches(dataset.train, fields, 25, 0, 1).epoch(0))
        calls = []
        tables.register_forward_hook(lambda *_: calls.append(1))
        rows = job.front.lookup(batch.sparse)
    assert len(calls) == 1 and rows.shape == (25, 26 * array.weights.shape[1])
