"""Planned weights and states are what a run allocates, byte for byte."""

from itertools import accumulate

import pytest
from torch.profiler import ProfilerActivity, profile

from stampede.engine.ahead import send
from stampede.engine.build import build
from stampede.engine.datasets import open_dataset
from stampede.engine.processes import processes
from stampede.engine.reading import Reader
from stampede.engine.step import train_step
from stampede.optim import local_cowclip_tables
from stampede.optim.sharded.supported import SHARDING_TYPES
from support.jobs import small_config
from support.networks import OURS
from support.planning import figures_of
from support.ranks import run_ranks

OPTIMIZERS = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd", "helen")


def on_one_rank(folder, overrides):
    with processes("cpu") as here:
        return planned_and_real(folder, overrides, here)


def planned_and_real(folder, overrides, here):
    """Bytes of weights and states on this rank, as planned and as they are."""
    config = small_config(folder, *overrides, world_size=here.world_size)
    job = build(config, open_dataset(config, here), here)
    work, found = figures_of(config, job.model.plan, here.world_size)
    planned = (
        found.memory["weights"][here.rank] - work.dense_weight_bytes(),
        found.memory["optimizer_state"][here.rank] - work.dense_state_bytes(),
    )
    weights = states = 0
    for tables in local_cowclip_tables(job.model):
        for backend in tables.backends:
            array = backend.array
            weights += array.weights.nbytes
            states += sum(state.nbytes for state in array.states.values())
            if backend.waiting is not None:
                states += backend.waiting.last.nbytes
    moments = job.dense_optimizer.state.values()
    dense = sum(p.numel() for p in job.dense_parameters.values())
    assert work.dense_weight_bytes() == 4 * dense
    assert work.dense_state_bytes() == sum(
        s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in moments
    )
    return planned, (weights, states)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rows", ["all", "touched"])
def test_one_rank(tmp_path, optimizer, rows):
    overrides = [f"optim.embedding.optimizer={optimizer}", f"optim.embedding.rows={rows}"]
    planned, real = on_one_rank(tmp_path, overrides)
    assert planned == real
    assert real[0] > 1e6


@pytest.mark.parametrize("name", [name for name in OURS if name != "deepfm"])
def test_networks(tmp_path, name):
    planned, real = on_one_rank(tmp_path, [f"model.name={name}", "data.scale=0.0001"])
    assert planned == real


@pytest.mark.parametrize("granularity", ["none", "field_adaptive", "cowclip"])
def test_clips(tmp_path, granularity):
    planned, real = on_one_rank(tmp_path, [f"optim.embedding.clip.granularity={granularity}"])
    assert planned == real


def test_momentum(tmp_path):
    momentum = ["optim.embedding.optimizer=sgd", "optim.embedding.momentum=0.9"]
    planned, real = on_one_rank(tmp_path, momentum)
    assert planned == real
    assert real[0] == real[1]


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam", "sgd", "helen"])
def test_a_step_takes_no_more_than_its_estimate(tmp_path, optimizer):
    config = small_config(
        tmp_path,
        f"optim.embedding.optimizer={optimizer}",
        "data.rows=20000",
        "model.hidden=[200,200]",
        "train.batch_size=4096",
    )
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        _, found = figures_of(config, job.model.plan, 1)
        first, second, *_ = Reader(config, dataset, here).training()
        first, second = (send(batch, job.front, here.device) for batch in (first, second))
        train_step(job, first, 1, here)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            train_step(job, second, 2, here)
    allocations = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    peak = max(accumulate(event.nbytes() for event in allocations))
    estimate = found.memory["activations"][0]
    assert 0.05 * estimate < peak < estimate


def every_sharding_type(folder):
    with processes("cpu") as here:
        return [
            planned_and_real(
                folder, [f"sharding.plan={kind}", f"optim.embedding.optimizer={optimizer}"], here
            )
            for kind in SHARDING_TYPES
            for optimizer in ("adam", "rowwise_adam")
        ]


def test_two_ranks_under_every_sharding_type(tmp_path):
    for of_rank in run_ranks(2, every_sharding_type, tmp_path):
        for planned, real in of_rank:
            assert planned == real


@pytest.mark.parametrize("optimizer", ["fbgemm_rowwise_adagrad", "fbgemm_cowclip"])
def test_states_of_fbgemm(tmp_path, optimizer):
    config = small_config(tmp_path, f"optim.embedding.optimizer={optimizer}")
    with processes("cpu") as here:
        job = build(config, open_dataset(config, here), here)
        work, found = figures_of(config, job.model.plan, 1)
        (lookup,) = job.model.module.front.ebc._lookups
        real = sum(
            state.nbytes
            for kernel in lookup._emb_modules
            for name, state in [
                *kernel.emb_module.named_buffers(),
                *kernel.emb_module.named_parameters(),
            ]
            # FBGEMM puts a placeholder of a few values where a state is not used.
            if name in ("momentum1_host", "prev_iter_host", "row_counter_host")
            and state.numel() > 100
        )
    assert found.memory["optimizer_state"][0] - work.dense_state_bytes() == real > 0
