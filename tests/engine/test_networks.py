"""Every network trains: in one process, in two, and in bf16."""

import pytest
import torch

from stampede.engine.precision import DensePrecision
from support.networks import VARIANTS, train_networks, variant_id
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

LEARNS = ["data.test_rows=2000", "train.batch_size=256"]
SHORT = ["data.rows=600", "data.test_rows=300", "train.batch_size=256", "sharding.plan=row_wise"]


def learning(variant):
    # Layer norm makes rare ids' vectors as large as all others, so that Wukong learns later.
    return [*LEARNS, f"data.rows={48000 if variant[0] == 'wukong' else 16000}"]


@pytest.fixture(scope="module", params=VARIANTS, ids=variant_id)
def trained(request, tmp_path_factory):
    """A variant, and an epoch of its training."""
    folder = tmp_path_factory.mktemp("trained")
    return request.param, *train_networks(folder, [request.param], learning(request.param))


def test_it_learns(trained):
    _, done = trained
    # Of 2000 samples, chance is within 0.03 of 0.5.
    assert done.evaluation.auc > 0.58
    assert sum(done.losses[-5:]) < sum(done.losses[:5])


def test_two_processes_give_the_weights_of_one(tmp_path):
    alone = train_networks(tmp_path, VARIANTS, SHORT)
    for rank, of_rank in enumerate(run_ranks(2, train_networks, tmp_path, VARIANTS, SHORT, 2)):
        for variant, one, other in zip(VARIANTS, alone, of_rank, strict=True):
            which = f"{variant} rank {rank}"
            assert other.losses == pytest.approx(one.losses, rel=1e-5), which
            for name, weight in one.dense.items():
                torch.testing.assert_close(
                    other.dense[name], weight, rtol=1e-3, atol=1e-5, msg=f"{which} {name}"
                )


def test_bf16(trained, tmp_path, monkeypatch):
    variant, exact = trained
    # A CPU without instructions for it would not choose it.
    monkeypatch.setattr(
        "stampede.engine.build.choose_precision", lambda *_: DensePrecision(True, "bf16")
    )
    (rounded,) = train_networks(tmp_path, [variant], learning(variant))
    assert rounded.evaluation.auc > 0.58
    assert rounded.losses == pytest.approx(exact.losses, rel=0.1)
    has_products = any(weight.ndim > 1 for weight in exact.dense.values())
    assert (rounded.losses != exact.losses) == has_products
    assert all(weight.dtype == torch.float32 for weight in rounded.dense.values())
