"""On a CPU the dense layers take a batch tile by tile; the tables see it whole."""

import pytest
import torch

from stampede.engine import step as step_module
from stampede.models import CTRModel
from stampede.models.embedding_front import EmbeddingFront
from support.jobs import small_config, train_an_epoch

BATCH = 256


def trained_in_tiles(folder, monkeypatch, rows):
    """What an epoch leaves, and samples in the order in which they were looked up and computed."""
    order = []
    logits, lookup = CTRModel.logits, EmbeddingFront.lookup_sent

    def noted_logits(model, part, dense):
        order.append(("dense", len(part)))
        return logits(model, part, dense)

    def noted_lookup(front, ids):
        found = lookup(front, ids)
        order.append(("lookup", len(found)))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "TILE_ROWS", rows)
        patch.setattr(CTRModel, "logits", noted_logits)
        patch.setattr(EmbeddingFront, "lookup_sent", noted_lookup)
        folder.mkdir()
        trained = train_an_epoch(small_config(folder, f"train.batch_size={BATCH}"))
    # Planning computes before the first lookup.
    return trained, order[order.index(("lookup", BATCH)) :]


# Of one size, and with a rest.
@pytest.mark.parametrize("rows, sizes", [(64, [64] * 4), (100, [100, 100, 56])])
def test_tiles_make_one_step_of_the_whole_batch(tmp_path, monkeypatch, rows, sizes):
    whole, order = trained_in_tiles(tmp_path / "whole", monkeypatch, BATCH)
    assert order[:3] == [("lookup", BATCH), ("dense", BATCH), ("lookup", BATCH)]
    found, order = trained_in_tiles(tmp_path / "tiles", monkeypatch, rows)
    a_step = [("lookup", BATCH), *(("dense", size) for size in sizes)]
    assert order[: 2 * len(a_step)] == 2 * a_step
    assert found.losses == pytest.approx(whole.losses, rel=1e-6)
    for name, weights in whole.dense.items():
        torch.testing.assert_close(found.dense[name], weights, rtol=1e-4, atol=2e-6)
    # Rows are clipped from the start: by counts, and by the norm of the gradient, of the batch.
    for field, weights in whole.tables.items():
        other = found.tables[field]
        torch.testing.assert_close(other.embedding, weights.embedding, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(other.first_order, weights.first_order, rtol=1e-4, atol=2e-6)
