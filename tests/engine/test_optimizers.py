"""Schedules of a run, what reaches the optimizers, and which parameters decay."""

import json

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.engine.job import Job
from stampede.engine.processes import processes
from stampede.optim import CowClipAdam, DenseAdam, Schedule, cowclip_sharders, learning_rate
from support.checkpoints import small_job
from support.jobs import lines, run_small

# 2000 rows in batches of 256: 7 whole ones and another step.
ROWS = ["train.log_every=1", "evaluate.select_on=test"]
PER_EPOCH = 2000 / 256
EMBEDDING_LR = 1e-2
# The scaling rule's factor for a quarter of the base batch is 1/2.
DENSE_LR = 1e-3 / 2


def logged(folder, key):
    return [line[key] for line in lines(folder / "small") if line["kind"] == "train"]


def test_both_schedules_are_followed(tmp_path):
    run_small(tmp_path, [
        *ROWS, "train.epochs=3",
        "optim.embedding.schedule={warmup: 3, decay: step, unit: steps, every: 5, factor: 0.5}",
        "optim.dense.schedule={warmup: 0.5, decay: cosine, final: 0.1}",
    ])  # fmt: skip
    embedding = Schedule(3, "step", "steps", every=5, factor=0.5)
    dense = Schedule(0.5, "cosine", final=0.1)
    for key, schedule, lr in (
        ("embedding_lr", embedding, EMBEDDING_LR),
        ("dense_lr", dense, DENSE_LR),
    ):
        expected = [learning_rate(schedule, lr, step, PER_EPOCH, 24) for step in range(24)]
        assert logged(tmp_path, key) == pytest.approx(expected, rel=1e-12)
    assert logged(tmp_path, "embedding_lr")[3:9] == [EMBEDDING_LR] * 5 + [EMBEDDING_LR / 2]


def test_a_schedule_may_change_on_resume(tmp_path, capsys):
    run_small(tmp_path, ROWS)
    run_small(tmp_path, [*ROWS, "train.epochs=2", "checkpoint.resume=auto",
                         "optim.dense.schedule={decay: step, warmup: 0}"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "new setting: optim.dense.schedule.decay=" in printed
    assert logged(tmp_path, "dense_lr")[8:] == pytest.approx([DENSE_LR / 10] * 8)


def test_the_rate_reaches_tables_with_torchrecs_own_optimizer_too():
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=5, feature_names=[name])
        for name in ("ours", "sgd", "adagrad")
    ]
    ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    for name, optimizer in (
        ("ours", CowClipAdam), ("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)
    ):  # fmt: skip
        weight = ebc.embedding_bags[name].weight
        apply_optimizer_in_backward(optimizer, [weight], {"lr": 0.5})
    layer = torch.nn.Linear(2, 1)
    with processes("cpu") as here:
        model = DistributedModelParallel(ebc, device=here.device, sharders=cowclip_sharders())
        job = Job(model, {}, DenseAdam(layer.parameters()), None, None)
        for embedding, dense in ((0.25, 0.125), (0.0, 0.0)):
            job.set_learning_rates(embedding, dense)
            assert [group["lr"] for group in job.dense_optimizer.param_groups] == [dense]
            tbes = [
                kernel.emb_module
                for module in model.modules()
                if isinstance(module, ShardedEmbeddingBagCollection)
                for lookup in module._lookups
                for kernel in lookup._emb_modules
            ]
            assert [tbe.get_learning_rate() for tbe in tbes] == [embedding] * 3


def decays(folder, *overrides):
    """Weight decay and L2 of each dense parameter, by name."""
    with small_job(folder, "optim.dense.weight_decay=0.1", *overrides) as (_, job, *_):
        names = {id(parameter): name for name, parameter in job.dense_parameters.items()}
        return {
            names[id(parameter)]: (group["weight_decay"], group["l2"])
            for group in job.dense_optimizer.param_groups
            for parameter in group["params"]
        }


def test_matrices_of_the_network_decay(tmp_path):
    found = decays(tmp_path, "model.normalization=layer", "optim.scaling.rule=none")
    layer, norm = (
        "network.mlp.hidden._mlp.{}._linear",
        "network.mlp.hidden._mlp.{}._activation_fn.0",
    )
    assert found == {
        "bias": (0.0, 0.0),
        # As the first-order weights of ids.
        "number_weights.weight": (0.0, 1e-5),
        "network.mlp.output.weight": (0.1, 0.0),
        **{f"{layer.format(i)}.weight": (0.1, 0.0) for i in (0, 1)},
        **{f"{layer.format(i)}.bias": (0.0, 0.0) for i in (0, 1)},
        **{f"{norm.format(i)}.{name}": (0.0, 0.0) for i in (0, 1) for name in ("weight", "bias")},
    }


@pytest.mark.parametrize(
    "name, options, others",
    [
        ("dcn", {"layers": 2}, {"network.cross.bias.0", "network.cross.bias.1"}),
        ("masknet", {"blocks": 1}, {"network.norm_weight", "network.norm_bias"}),
    ],
)
def test_biases_and_norms_that_are_matrices_do_not(tmp_path, name, options, others):
    found = decays(tmp_path, f"model.name={name}", f"model.options={json.dumps(options)}")
    still = {key for key, (decay, _) in found.items() if not decay}
    assert others <= still
    assert all("bias" in key or "norm" in key for key in still - {"number_weights.weight"})
    if name == "dcn":
        assert found["network.cross.kernels.0"] == (0.1, 1e-5)
