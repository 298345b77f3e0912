"""Batch norm trains on any number of ranks as on one, also where some have no sample of a batch."""

import pytest
import torch

from stampede.engine.checkpoint.retention import newest
from stampede.settings import SettingsError
from support.in_float64 import compute_in_float64
from support.jobs import losses_and_weights, run_small, tensors_of
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

# The last of three batches has two samples.
JOB = ["data.rows=514", "data.validation_fraction=0", "evaluate.select_on=test"]
JOB += ["optim.embedding.optimizer=sgd", "model.init_std=0.1", "model.normalization=batch"]


def trained_in_float64(folder, overrides, ranks):
    compute_in_float64()
    return losses_and_weights(folder, [*JOB, *overrides], ranks)


DEEPFM = ["model.dropout=0.2"]
MMOE = ["model.name=mmoe", "data.conversions=true", "train.goal_weighting=uncertainty"]
DIN = ["model.name=din", "data.histories=attention", "model.attention.activation=dice",
       "model.options.activation=dice"]  # fmt: skip


# The update of tables adds float32 gradients.
@pytest.mark.cases(2)
@pytest.mark.parametrize("overrides, lr, exact, ranks", [
    (DEEPFM, 1e-15, 1e-10, 4), (DEEPFM, 0.1, 1e-6, 2),
    (MMOE, 1e-15, 1e-10, 2), (DIN, 1e-15, 1e-10, 4),
])  # fmt: skip
def test_any_number_of_ranks(tmp_path, overrides, lr, exact, ranks):
    given = [*overrides, f"optim.embedding.lr={lr}"]
    alone = run_ranks(1, trained_in_float64, tmp_path, given, 1)[0]
    assert len(alone.losses) == 3
    found = run_ranks(ranks, trained_in_float64, tmp_path, given, ranks)[0]
    assert found.losses == pytest.approx(alone.losses, rel=exact)
    # With the running statistics.
    assert found.evaluation["logloss"] == pytest.approx(alone.evaluation["logloss"], rel=exact)
    for name, weights in alone.dense.items():
        if name.endswith("_linear.bias"):
            # The norm takes its share away again, so its gradient is rounding.
            continue
        torch.testing.assert_close(found.dense[name], weights, rtol=exact, atol=exact)
    for field, weights in alone.tables.items():
        for one, expected in zip(found.tables[field], weights, strict=True):
            torch.testing.assert_close(one, expected, rtol=exact, atol=exact)


@pytest.mark.wide
def test_a_compiled_network_waits_for_the_others_too(tmp_path):
    # Each size of a batch is compiled anew, as is what lies between two norms.
    given = [*JOB, "data.rows=512", "data.test_rows=256", "evaluate.batch_size=256",
             "model.hidden=[16]", "optim.embedding.lr=0.1"]  # fmt: skip
    plain = run_ranks(1, losses_and_weights, tmp_path, given)[0]
    compiled = [*given, "train.compile=default"]
    found = run_ranks(2, losses_and_weights, tmp_path, compiled, 2)[0]
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.wide
def test_a_run_goes_on_with_other_ranks(tmp_path):
    """The running statistics are in the checkpoint, and scores are those of the run."""
    given = [*JOB, "optim.embedding.lr=1e-3", "train.epochs=2", "run.name=once"]
    run_small(tmp_path, given)
    run_ranks(2, run_small, tmp_path, [*given[:-2], "run.name=then"], 2)
    run_small(tmp_path, [*given[:-1], "run.name=then", "checkpoint.resume=auto"])
    once, then = (tensors_of(newest(tmp_path / name / "checkpoints")) for name in ("once", "then"))
    names = [name for name in once if "running" in name or "num_batches" in name]
    assert len(names) == 6
    for name in names:
        torch.testing.assert_close(then[name], once[name], rtol=1e-2, atol=1e-3)


def test_reproducible_runs_have_none(tmp_path):
    with pytest.raises(SettingsError, match=r"train.reproducible: found true, .* batch norm, .* "):
        run_small(tmp_path, [*JOB, "train.reproducible=true"])
