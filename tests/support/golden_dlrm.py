"""TorchRec's golden training example (examples/golden_training), with the two lines changed."""

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders
from support.gathering import whole_tables
from support.unsharded import Unsharded, process_group, relative_deviation

CPU = torch.device("cpu")
RANKS = 2
DIM, BATCH, STEPS, LEARNING_RATE = 10, 32, 5, 0.1
# In the first, rows wait for their steps.
ROWS = [70_000, *[40] * (len(DEFAULT_CAT_NAMES) - 1)]
SETTINGS = {"lr": 1e-2, "l2": 1e-3, "rows": "all"}
CLIP = {"ratio": 1e-3, "bound": 1e-3}


def dlrm(device):
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in zip(DEFAULT_CAT_NAMES, ROWS, strict=True)
    ]
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(configs, device=device),
            dense_in_features=len(DEFAULT_INT_NAMES),
            dense_arch_layer_sizes=[16, DIM],
            over_arch_layer_sizes=[16, 1],
            dense_device=CPU,
        )
    )


def batches_of(rank):
    return RandomRecDataset(
        keys=DEFAULT_CAT_NAMES,
        batch_size=BATCH,
        hash_sizes=ROWS,
        ids_per_feature=1,
        num_dense=len(DEFAULT_INT_NAMES),
        manual_seed=rank,
        num_batches=STEPS,
    )


def train_golden(precisions):
    """The example's calls; on rank 0: how far tables are from float64, with and without clip."""
    with process_group():
        return _train_golden(precisions)


def _train_golden(precisions):
    torch.manual_seed(0)
    plain = dlrm(CPU)
    train_model = dlrm(torch.device("meta"))
    dense = {k: v for k, v in plain.state_dict().items() if ".embedding_bags." not in k}
    train_model.load_state_dict(dense, strict=False)
    apply_optimizer_in_backward(  # line 1
        CowClipAdam,
        train_model.model.sparse_arch.parameters(),
        {**SETTINGS, "clip": CowClip(**CLIP)},
    )
    registry = get_qcomm_codecs_registry(QCommsConfig(*map(CommType, precisions)))
    model = DistributedModelParallel(
        module=train_model,
        device=CPU,
        sharders=cowclip_sharders(qcomm_codecs_registry=registry),  # line 2
    )
    non_fused_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=LEARNING_RATE),
    )
    train_pipeline = TrainPipelineSparseDist(model, non_fused_optimizer, CPU)
    start = whole_tables(model)
    train_iterator = iter(batches_of(dist.get_rank()))
    for _ in range(STEPS):
        train_pipeline.progress(train_iterator)
    found = whole_tables(model)
    deviations = []
    if dist.get_rank() == 0:
        for clip in ({"granularity": "cowclip", **CLIP}, {}):
            reference = Unsharded(
                plain, LEARNING_RATE, dense=torch.optim.Adagrad, **SETTINGS, **clip
            )
            train_reference(reference, start)
            deviations.append(relative_deviation(found, reference.weights, start))
    return deviations


def train_reference(reference, start):
    """The same on the batches of all ranks together."""
    reference.copy_tables(start)
    for parts in zip(*(batches_of(rank) for rank in range(RANKS)), strict=True):
        features = stacked([part.sparse_features for part in parts])
        numbers = torch.cat([part.dense_features for part in parts]).double()
        labels = torch.cat([part.labels for part in parts]).double()

        def loss_of(model, given=(numbers, features), labels=labels):
            return model.loss_fn(model.model(*given).squeeze(-1), labels)

        reference.step(loss_of)


def stacked(parts):
    keys = parts[0].keys()
    ids = [part[key].values() for key in keys for part in parts]
    lengths = [part[key].lengths() for key in keys for part in parts]
    return KeyedJaggedTensor(keys, torch.cat(ids), lengths=torch.cat(lengths))
