"""What is planned is what a run allocates: weights and states to the byte, layers nearly."""

import pytest
import torch
from torch import nn

from stampede.engine.checkpoint.tensors import local_parts
from stampede.engine.job.build import build
from stampede.engine.planning.dry_run import dry_run
from stampede.engine.planning.planner import Cluster
from stampede.engine.planning.workload import activation_bytes_per_sample
from stampede.engine.processes import processes
from stampede.engine.reading import Reader, open_dataset
from stampede.engine.step import send, train_step
from stampede.engine.training.averaging import EpochMean
from stampede.models import CTRModel, network
from stampede.native_library import switched_off
from stampede.optim import local_cowclip_tables
from stampede.optim.sharded.supported import SHARDING_TYPES
from support.checkpoints import small_job
from support.jobs import small_config
from support.memory import peak_memory
from support.networks import VARIANTS, goals_of, variant_id
from support.ranks import run_ranks

SAMPLES, FIELDS, NUMBERS = 256, 12, 5


def model_of(name, options):
    sizes = {f"C{field}": 10 for field in range(FIELDS)}
    checked = network(name).options.model_validate(options)
    return CTRModel(name, sizes, NUMBERS, 8, [64, 48], 0, checked, goals=goals_of(name))


def allocated(model, samples):
    """Peak memory of forward and backward."""
    rows = torch.randn(samples, FIELDS * model.front.columns.stored, requires_grad=True)
    numbers = torch.randn(samples, NUMBERS)
    return peak_memory(lambda: torch.autograd.grad(model.logits(rows, numbers).sum(), rows))


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize("name, options", VARIANTS, ids=variant_id)
def test_the_estimate_is_close_to_what_is_allocated(name, options):
    model = model_of(name, options)
    planned = SAMPLES * activation_bytes_per_sample(model)
    with switched_off():
        assert allocated(model, SAMPLES) == pytest.approx(planned, rel=0.15)
    # The kernels' memory for weights does not grow with the samples, and they write gradients over
    # activations.
    by_kernels = allocated(model, 9 * SAMPLES) - allocated(model, SAMPLES)
    assert by_kernels <= 1.3 * 8 * planned


def test_estimating_does_not_change_the_model():
    model = model_of("deepfm", {})
    model.network.mlp.hidden = nn.Sequential(model.network.mlp.hidden, nn.BatchNorm1d(48))
    torch.manual_seed(0)
    before = [torch.get_rng_state(), *map(torch.clone, model.network.state_dict().values())]
    assert activation_bytes_per_sample(model) > 0
    after = [torch.get_rng_state(), *model.network.state_dict().values()]
    assert all(map(torch.equal, before, after))
    assert all(parameter.grad is None for parameter in model.parameters())


def planned_and_real(folder, overrides, here):
    """Bytes of weights, their mean and states on this rank, as planned and as they are."""
    averaged = (*overrides, "train.averaging=3")
    config = small_config(folder, *averaged, world_size=here.world_size)
    job = build(config, open_dataset(config, here), here)
    done = dry_run(config, Cluster(here.world_size, here.world_size, "cpu", 10**10))
    assert str(done.plan) == str(job.model.plan)
    memory, dense = done.memory, done.work.common_bytes()[[0, 2]].tolist()
    moments = job.dense_optimizer.state.values()
    assert dense == [
        4 * sum(p.numel() for p in job.dense_parameters.values()),
        sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in moments),
    ]
    kinds = ("weights", "mean_of_weights", "optimizer_state")
    planned = [memory[kind][here.rank] for kind in kinds]
    EpochMean(job, steps=8, snapshots=3).after_step(3)
    mean = sum(part.nbytes for one in job.mean.values() for part, _ in local_parts(one))
    weights = states = 0
    for tables in local_cowclip_tables(job.model):
        for backend in tables.backends:
            weights += backend.array.weights.nbytes
            states += sum(state.nbytes for state in backend.array.states.values())
            if backend.waiting is not None:
                states += backend.waiting.last.nbytes
    return planned, [weights + dense[0], mean, states + dense[1]]


@pytest.mark.slow
@pytest.mark.cases(5)
@pytest.mark.parametrize(
    "overrides",
    [
        *(
            [f"optim.embedding.optimizer={name}"]
            for name in ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")
        ),
        ["optim.embedding.rows=touched"],
        ["optim.embedding.optimizer=sgd", "optim.embedding.momentum=0.9"],
        ["optim.embedding.clip.granularity=none"],
        ["model.dims={C1: 3, C2: 33}"],
        ["model.pretrained={C1: {path: none, train: false}}"],
        *(
            [f"model.name={name}", "data.scale=0.0001", f"data.conversions={bool(goals_of(name))}"]
            for name in ("lr", "dcnv2", "autoint", "masknet", "ple")
        ),
    ],
    ids=" ".join,
)
def test_one_rank(tmp_path, overrides):
    with processes("cpu") as here:
        planned, real = planned_and_real(tmp_path, overrides, here)
    assert planned == real and real[0] > 1e5


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam", "sgd"])
def test_a_step_takes_no_more_than_its_estimate(tmp_path, optimizer):
    large = ["data.rows=20000", "model.hidden=[200,200]", "train.batch_size=4096"]
    with small_job(tmp_path, f"optim.embedding.optimizer={optimizer}", *large) as made:
        here, job, config, dataset, _ = made
        memory = dry_run(config, Cluster(1, 1, "cpu", 10**10)).memory
        first, second, *_ = Reader(config, dataset, here).training()
        first, second = (send(batch, job.front, here.device) for batch in (first, second))
        train_step(job, first, 1, here)
        peak = peak_memory(lambda: train_step(job, second, 2, here))
    estimate = memory["activations"][0]
    assert 0.05 * estimate < peak < estimate


def every_sharding_type(folder):
    with processes("cpu") as here:
        for kind in SHARDING_TYPES:
            # Its states are of both kinds, a value for each element and for each row.
            given = [f"sharding.plan={kind}", "optim.embedding.optimizer=rowwise_adam"]
            planned, real = planned_and_real(folder, given, here)
            assert planned == real, given


@pytest.mark.wide
def test_two_ranks_under_every_sharding_type(tmp_path):
    run_ranks(2, every_sharding_type, tmp_path)
