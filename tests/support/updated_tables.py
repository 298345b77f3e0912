"""A TBE whose tables are updated in backward, trained beside float64 plain PyTorch."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from unittest import mock

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    PoolingMode,
)
from torchrec.distributed.types import ShardingEnv

from stampede.engine.job.threads import using_threads
from stampede.optim import CowClip, CowClipTables, native, triton, waiting_rows
from stampede.optim.backends import choose_backend
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from stampede.optim.sharded.backward_update import BackwardUpdate
from stampede.optim.sharded.collections import tell_when_reached
from stampede.optim.table_array import TableShard
from stampede.optim.update_settings import UpdateSettings
from support.reference import ReferenceTables

CLIP = CowClip(ratio=0.5, bound=1e-3)
SETTINGS = UpdateSettings(l2=1e-4, clip=CLIP)
LR = 1e-2

# How an update may be computed: in plain torch; by the C++ kernels, with a sweep of all rows or
# with rows that take their steps later; or, as on a GPU, queued for Triton kernels, here
# interpreted.
WAYS = ("torch", "kernels", "waiting", "queued")


@contextmanager
def computed(way, window=3):
    """Within it tables are made and updated in one of `WAYS`; no row waits beyond `window`."""
    with ExitStack() as stack:
        if way == "torch":
            stack.enter_context(native.switched_off())
        changed = {
            "kernels": {"FEWEST_ROWS": 1 << 60},
            "waiting": {"FEWEST_ROWS": 0, "ROWS_A_TOUCHED_ROW": 0, "WINDOW": window},
            "queued": {"FEWEST_ROWS": 0, "WINDOW": window},
        }
        if way == "queued":
            stack.enter_context(mock.patch.object(triton, "handles", lambda _weights: True))
            # It has its own tests in `test_check.py`.
            check = import_module("stampede.optim.triton.check")
            stack.enter_context(mock.patch.object(check, "why_not_trusted", lambda *_, **__: None))
            for name in ("sum_runs", "steps"):
                kernels = import_module(f"stampede.optim.triton.{name}")
                stack.enter_context(mock.patch.object(kernels, "block_sizes", _large_blocks))
        for name, value in changed.get(way, {}).items():
            stack.enter_context(mock.patch.object(waiting_rows, name, value))
        yield


def _large_blocks(dim, occurrences):
    """The interpreter takes as long for a large program as for a small one."""
    from stampede.optim.triton import block_sizes

    return replace(block_sizes(dim, occurrences), runs=1024, unroll=1, rows=1024, elements=1 << 14)


class Tables:
    """A TBE of shards, with the owner that TorchRec's collections would give it."""

    def __init__(
        self,
        shards,
        widths,
        features,
        pooling=PoolingMode.SUM,
        setting=SETTINGS,
        dim=None,
        lr=LR,
        precision=SparseType.FP32,
        device="cpu",
        kernels="auto",
    ):
        self.device = torch.device(device)
        self.tbe = CowClipTables(
            shards,
            widths,
            setting,
            dim or widths[0],
            device=self.device,
            feature_table_map=features,
            pooling_mode=pooling,
            weights_precision=precision,
            learning_rate=lr,
        )
        self.shards, self.widths, self.features = shards, widths, features
        self.setting = setting
        names = tuple(sorted({shard.table for shard in shards}))
        split_blocks = {(s.table, s.row_offset): (0,) for s in shards if s.column_offset}
        owner = BackwardUpdate(None, kernels)
        number = owner.add_collection(
            self,
            [self.tbe],
            split_blocks,
            dict.fromkeys(names, setting),
            env=ShardingEnv.from_local(1, 0),
            device=self.device,
        )
        self.owner, flag = owner, owner.queue_of(number)
        self.tbe.settle = lambda: owner.check_queued(up_to_now=True)
        self.tbe.backends = [
            choose_backend(array, defers=True, flag=flag) for array in self.tbe.arrays
        ]
        # The owner does not keep its collections alive.
        self.tbe.collection = self
        self.tbe.register_forward_hook(lambda _m, _i, out: tell_when_reached(out, owner, number))

    def fill(self, draw):
        """Random weights, row norms over three decades; returns them as whole tables."""
        for weights in self.tbe.split_embedding_weights():
            scale = 10.0 ** -torch.randint(0, 3, (len(weights), 1), generator=draw)
            weights.copy_((torch.randn(weights.shape, generator=draw) * scale).to(weights.device))
        return self.whole_tables()

    def whole_tables(self):
        pieces = zip(self.shards, self.tbe.split_embedding_weights(), strict=True)
        whole = {}
        for shard, weights in sorted(pieces, key=lambda piece: piece[0].column_offset):
            whole.setdefault(shard.table, []).append(weights.double().cpu())
        return {name: torch.cat(parts, 1) for name, parts in whole.items()}

    def train(self, draw, reference, batch, weighted=False, mean=False, sequence=False):
        """One random step here and in the reference; ids repeat within and across bags."""
        lengths, ids, factors = [], [], []
        drawn = {}
        for position, table in enumerate(self.features):
            # Column shards of one feature receive the same ids.
            feature = self.shards[table].table, self.features[:position].count(table)
            if feature not in drawn:
                own, rows = torch.randint(0, 4, (batch,), generator=draw), self.shards[table].rows
                total = int(own.sum())
                bags = torch.randint(0, rows, (total,), generator=draw)
                drawn[feature] = own, bags, torch.rand(total, generator=draw)
            for whole, part in zip((lengths, ids, factors), drawn[feature], strict=True):
                whole.append(part)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
        factor = torch.cat(factors).requires_grad_() if weighted else None
        inputs = [
            None if t is None else t.to(self.device) for t in (torch.cat(ids), offsets, factor)
        ]
        output = self.tbe(*inputs)
        upstream = torch.randn(output.shape, generator=draw)
        output.backward(upstream.to(self.device))

        leaves = {n: w.clone().requires_grad_() for n, w in reference.weights.items()}
        exact = [f.double().requires_grad_(weighted) for f in factors]
        counts = {n: torch.zeros(len(w), dtype=torch.int64) for n, w in leaves.items()}
        expected = []
        for table, own, bags, of_bags in zip(self.features, lengths, ids, exact, strict=True):
            shard, width = self.shards[table], self.widths[table]
            rows = leaves[shard.table][bags, shard.column_offset : shard.column_offset + width]
            if weighted:
                rows = rows * of_bags[:, None]
            if not sequence:
                samples = torch.arange(batch).repeat_interleave(own)
                rows = rows.new_zeros(batch, width).index_add(0, samples, rows)
            expected.append(rows / own.clamp_min(1)[:, None] if mean else rows)
            if not shard.column_offset:
                counts[shard.table] += bags.bincount(minlength=shard.rows)
        expected = torch.cat(expected, 0 if sequence else 1)
        expected.backward(upstream.double())
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(output.double().cpu(), expected, **close)
        if weighted:
            found = torch.cat([f.grad for f in exact])
            torch.testing.assert_close(factor.grad.double(), found, **close)
        grads = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
        reference.step(grads, counts, lr=LR)


NAMES = {
    Adam: "adam",
    RowWiseAdam: "rowwise_adam",
    Adagrad: "adagrad",
    RowWiseAdagrad: "rowwise_adagrad",
    SGD: "sgd",
}


def reference_of(weights, settings):
    """Tables that are updated by the same settings in float64."""
    rule = settings.rule
    arguments = {**vars(rule), **vars(settings.clip), "rule": NAMES[type(rule)]}
    for key in ("l2", "weight_decay", "rows"):
        arguments[key] = getattr(settings, key)
    return ReferenceTables(weights, **arguments)


def assert_follows(tables, reference):
    for name, weights in tables.whole_tables().items():
        torch.testing.assert_close(weights, reference.weights[name], rtol=1e-4, atol=1e-5)
    touched, clipped, skipped = tables.tbe.row_counts.tolist()
    assert (touched, skipped) == (reference.touched, 0)
    # A GPU adds up in another order: a norm beside its threshold may fall on the other side.
    assert abs(clipped - reference.clipped) <= (3 if tables.device.type == "cuda" else 0)


def of_rows(*rows):
    return [TableShard(f"t{i}", n) for i, n in enumerate(rows)]


# Settings whose rows can wait for their steps.
CAN_WAIT = [
    UpdateSettings(l2=1e-3, clip=CowClip(bound=1e-3)),
    UpdateSettings(clip=CowClip(granularity="none"), l2=1e-2),
    UpdateSettings(clip=CowClip(columns=10), l2=1e-3, weight_decay=0.1),
    UpdateSettings(rule=Adam((0.5, 0.9), 1e-3, "torch"), weight_decay=0.3),
    UpdateSettings(clip=CowClip(granularity="row", threshold=0.1)),
]


def two_tables(setting=CAN_WAIT[0], **options):
    """Of 300 and 41 rows and 12 columns, always with the same weights."""
    tables = Tables(of_rows(300, 41), [12] * 2, [0, 1], setting=setting, **options)
    tables.fill(torch.Generator().manual_seed(0))
    return tables


def one_step(tbe, number, lookups=1, bags=4, poison=None):
    """A step of `two_tables` whose batch, gradient and learning rate depend on its number alone."""
    draw = torch.Generator().manual_seed(number)
    tbe.set_learning_rate(1e-3 * (1 + number % 5))
    outputs = []
    for _ in range(lookups):
        lengths = torch.randint(0, 3, (2, bags), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        # Some ids are frequent, most are rare.
        ids = [
            (torch.rand(int(own.sum()), generator=draw) ** 3 * rows).long()
            for own, rows in zip(lengths, (300, 41), strict=True)
        ]
        outputs.append(tbe(torch.cat(ids), offsets))
    grad = torch.randn(outputs[0].shape, generator=draw)
    if poison is not None:
        grad[:] = poison
    torch.autograd.backward(outputs, [grad] * lookups)


def state_of(tbe):
    """Copies of weights, moments and counts."""
    states = [s for _, of_shard in tbe.shard_states() for s in of_shard.values()]
    everything = [*tbe.split_embedding_weights(), *states, tbe.step_count, tbe.row_counts]
    return [tensor.clone() for tensor in everything]


def trained(
    way, setting, steps, *, first=0, window=3, threads=1, at_step=None, lookups=lambda _: 1
):
    """The state of `two_tables` after some steps.

    Args:
        first: number of the first step.
        at_step: is called after each step with its number and the TBE.
        lookups: how many a step has, by its number.
    """
    with using_threads(threads), computed(way, window):
        tables = two_tables(setting)
        for number in range(first, first + steps):
            one_step(tables.tbe, number, lookups(number))
            if at_step is not None:
                at_step(number, tables.tbe)
        assert (tables.owner.flag is not None) == (way == "queued")
        return state_of(tables.tbe)


def assert_same_bits(one, other):
    assert len(one) == len(other) > 4
    assert all(map(torch.equal, one, other))
