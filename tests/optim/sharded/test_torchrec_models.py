"""TorchRec's own models, which no one here wrote, trained with the two changed lines."""

import pytest
import torch
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.test_utils import test_model as theirs
from torchrec.models.deepfm import SimpleDeepFMNNWrapper
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders, local_cowclip_tables
from support.unsharded import Unsharded, process_group, relative_deviation, whole_tables

CPU = torch.device("cpu")
DIM = 8
# So that some rows are clipped and others are not.
CLIP = {"ratio": 1e-3, "bound": 1e-3}
SETTINGS = {"lr": 1e-2, "l2": 1e-3}


@pytest.fixture(scope="module", autouse=True)
def group():
    with process_group():
        yield


def tables(count, first=0, kind=EmbeddingBagConfig, **more):
    return [
        kind(
            name=f"t{i}",
            num_embeddings=30 + 10 * i,
            embedding_dim=DIM,
            # The second table has two features.
            feature_names=[f"f{i}", f"g{i}"] if i == 1 else [f"f{i}"],
            **more,
        )
        for i in range(first, first + count)
    ]


class WithLoss(torch.nn.Module):
    """As TorchRec's wrappers of some of its models."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        predicted = self.model(batch.float_features, batch.idlist_features).squeeze()
        return functional.binary_cross_entropy_with_logits(predicted, batch.label), predicted


def dlrm(bags, weighted):
    return WithLoss(DLRM(EmbeddingBagCollection(bags), 10, [16, DIM], [16, 1]))


def dlrm_dcn(bags, weighted):
    return WithLoss(DLRM_DCN(EmbeddingBagCollection(bags), 10, [16, DIM], [16, 1], 2, 4))


def dlrm_projection(bags, weighted):
    sizes = [16, 3 * DIM]
    collection = EmbeddingBagCollection(bags)
    return WithLoss(DLRM_Projection(collection, 10, [16, DIM], [16, 1], sizes, sizes))


def deepfm(bags, weighted):
    return SimpleDeepFMNNWrapper(10, EmbeddingBagCollection(bags), 16, 8)


def sparse_nn(bags, weighted):
    return theirs.TestSparseNN(bags, weighted_tables=weighted)


def towers(bags, weighted):
    return theirs.TestTowerCollectionSparseNN(bags, weighted_tables=weighted)


def tower(bags, weighted):
    return theirs.TestTowerSparseNN(bags, weighted_tables=weighted)


def pooled_and_sequences(bags, weighted):
    return theirs.TestMixedEmbeddingSparseArch(bags)


MEAN = {"pooling": PoolingType.MEAN}
MODELS = {
    "DLRM": (dlrm, tables(3), []),
    "DLRM_DCN": (dlrm_dcn, tables(3), []),
    "DLRM_Projection": (dlrm_projection, tables(3), []),
    "SimpleDeepFMNN": (deepfm, tables(2) + tables(1, 2, **MEAN), []),
    "TestSparseNN": (sparse_nn, tables(3), tables(2, 3)),
    "TestTowerSparseNN": (tower, tables(3), tables(2, 3)),
    "TestTowerCollectionSparseNN": (towers, tables(3), tables(2, 3)),
    "TestMixedEmbeddingSparseArch": (
        pooled_and_sequences,
        tables(2) + tables(2, 2, kind=EmbeddingConfig),
        [],
    ),
}


def batch_of(bags, weighted, step, double=False):
    batch, _ = theirs.ModelInput.generate(
        batch_size=64,
        world_size=1,
        num_float_features=10,
        tables=bags,
        weighted_tables=weighted,
        pooling_avg=4,
        random_seed=step,
        power_law_alpha=1.2,
    )
    if double:
        batch.float_features = batch.float_features.double()
        batch.label = batch.label.double()
    return batch


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    torch.manual_seed(0)
    build, bags, weighted = MODELS[name]
    model = build(bags, weighted)
    with_clip = Unsharded(model, dense_lr=0.1, granularity="cowclip", **CLIP, **SETTINGS)
    without = Unsharded(model, dense_lr=0.1, **SETTINGS)
    embeddings = [p for n, p in model.named_parameters() if "embedding" in n]
    apply_optimizer_in_backward(CowClipAdam, embeddings, {**SETTINGS, "clip": CowClip(**CLIP)})
    model = DistributedModelParallel(model, device=CPU, sharders=cowclip_sharders())
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    start = whole_tables(model)
    with_clip.copy_tables(start)
    without.copy_tables(start)
    for step in range(5):
        dense.zero_grad()
        loss, _ = model(batch_of(bags, weighted, step))
        loss.backward()
        dense.step()
        batch = batch_of(bags, weighted, step, double=True)
        expected = with_clip.step(lambda plain, batch=batch: plain(batch)[0])
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
        without.step(lambda plain, batch=batch: plain(batch)[0])
    found = whole_tables(model)
    print(relative_deviation(found, with_clip.weights, start))
    print(relative_deviation(found, without.weights, start))
    assert relative_deviation(found, with_clip.weights, start) < 1e-4
    assert relative_deviation(found, without.weights, start) > 1e-2
    touched, clipped, skipped = sum(t.row_counts for t in local_cowclip_tables(model)).tolist()
    (reference,) = with_clip.groups
    assert (touched, clipped, skipped) == (reference.touched, reference.clipped, 0)
    assert 0 < clipped < touched
    assert reference.largest_count > 10
