"""Users' networks that ignore their embeddings, change their inputs, or draw random numbers."""

import pytest
import torch
from torch import nn

from stampede.models import CTRModel
from stampede.settings import SettingsError
from support.checkpoints import small_job
from support.gathering import gather_field
from support.jobs import run_small, small_config, train_an_epoch
from support.own_networks import DRAWING, NUMBERS_ONLY, drawn_in_training, own_network
from support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("registered")


# In one tile, and in several.
@pytest.mark.parametrize("tile_rows", [8192, 100])
def test_unused_embeddings_are_not_trained(tmp_path, monkeypatch, tile_rows):
    monkeypatch.setattr("stampede.engine.step.TILE_ROWS", tile_rows)
    overrides = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    overrides += ["data.rows=6000", "train.batch_size=256", "optim.embedding.l2=0"]
    with small_job(tmp_path, *overrides) as (here, job, config, dataset, _):
        before = {f: gather_field(job.model, f, 10, here) for f in dataset.vocabulary_sizes}
    trained = train_an_epoch(config)
    assert trained.losses[-1] < 1 and trained.evaluation["auc"] > 0.5
    for field, weights in before.items():
        assert torch.equal(trained.tables[field].embedding, weights.embedding)


CHANGES = {
    "embeddings[:, 0] = 1.0": "embeddings",
    "nn.functional.relu(embeddings.view(len(dense), -1), inplace=True)": "embeddings",
    "dense.add_(1)": "numbers",
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_network_that_changes_its_inputs_is_refused(tmp_path, line):
    changed = NUMBERS_ONLY.replace("        return", f"        {line}\n        return")
    with pytest.raises(SettingsError) as failure:
        run_small(tmp_path, own_network(tmp_path, "numbers_only", changed))
    said = str(failure.value)
    assert f"the network 'numbers_only' changes its {CHANGES[line]} in place; its forward" in said
    assert "must not: write" in said


def test_trying_a_network_leaves_its_state_alone(tmp_path):
    text = NUMBERS_ONLY.replace("nn.Linear(shape.numbers, 1)", "nn.Sequential(nn.BatchNorm1d("
                                "shape.numbers), nn.Linear(shape.numbers, 1))")  # fmt: skip
    small_config(tmp_path, *own_network(tmp_path, "numbers_only", text))
    model = CTRModel("numbers_only", {"a": 7}, 3, 4, [8], 0)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    assert norm.training and norm.num_batches_tracked == 0 and norm.running_var.eq(1).all()


@pytest.mark.slow
def test_ranks_and_steps_drop_different_samples(tmp_path):
    network = own_network(tmp_path, "dropping", DRAWING)
    drawn = run_ranks(2, drawn_in_training, tmp_path, network, 2)
    assert [len(of_rank) for of_rank in drawn] == [7, 7]
    assert len({value for of_rank in drawn for value in of_rank}) == 14
