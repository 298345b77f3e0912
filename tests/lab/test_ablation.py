"""The six clips of the paper's ablation in plain PyTorch."""

import pytest
import torch

from stampede.data import SyntheticClicks
from stampede.lab import ablation
from stampede.lab.ablation import CLIPS, Clip, DeepFM, Training
from stampede.optim import CowClip, CowClipAdam, DenseAdam, Hyperparameters
from support.reference import ReferenceTables

SIZES = (40, 7)
SETTINGS = Hyperparameters(embedding_lr=1e-2, embedding_l2=1e-3, dense_lr=1e-3)


def drawn(step, batch=32):
    draw = torch.Generator().manual_seed(step)
    ids = [(rows * torch.rand(batch, generator=draw) ** 2).long() for rows in SIZES]
    numbers = torch.randn(batch, 3, generator=draw)
    return torch.stack(ids), numbers, (torch.rand(batch, generator=draw) > 0.6).float()


@pytest.mark.parametrize(
    "clip",
    [
        Clip("none"),
        Clip("global", threshold=4.0),
        Clip("field", threshold=3.0),
        Clip("row", threshold=0.3),
        Clip("field_adaptive", ratio=0.5),
        Clip("cowclip", ratio=0.5, bound=0.1),
    ],
    ids=lambda clip: clip.granularity,
)
def test_factors_are_those_of_the_formulas_in_float64(clip):
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, 4, generator=draw) for rows in SIZES]
    sizes = [10.0 ** -torch.randint(0, 3, (rows, 1), generator=draw) for rows in SIZES]
    grads = [torch.randn(w.shape, generator=draw) * s for w, s in zip(weights, sizes, strict=True)]
    counts = [torch.randint(0, 4, (rows,), generator=draw) for rows in SIZES]
    reference = ReferenceTables(dict(enumerate(weights)), **vars(clip))
    expected = {name: grad.double() for name, grad in enumerate(grads)}
    everything = {name: torch.ones(rows) > 0 for name, rows in enumerate(SIZES)}
    is_clipped = reference._clip(expected, dict(enumerate(counts)), everything)
    factors = clip.factors(grads, weights, counts)
    for name, (grad, factor) in enumerate(zip(grads, factors, strict=True)):
        torch.testing.assert_close((grad * factor).double(), expected[name], rtol=1e-6, atol=1e-9)
    clipped = torch.cat([*is_clipped.values()])
    assert clip.granularity == "none" or clipped.any()
    if clip.granularity in ("row", "cowclip"):
        assert not clipped.all()


def test_a_zero_gradient_on_zero_weights_stays_zero():
    zero = [torch.zeros(3, 2)]
    for name in ("field_adaptive", "cowclip"):
        (factor,) = Clip(name, bound=0.0).factors(zero, zero, [torch.tensor([0, 1, 2])])
        assert torch.equal(zero[0] * factor, zero[0])


def test_training_under_cowclip_is_that_of_the_core():
    ours, cores = (DeepFM(SIZES, 3, hidden=(16,), std=0.1, seed=1) for _ in range(2))
    training = Training(ours, Clip("cowclip", ratio=0.05, bound=1e-3), SETTINGS)
    for table in (*cores.tables, *cores.first_order):
        table.sparse = True
    tables, first = ([table.weight for table in of] for of in (cores.tables, cores.first_order))
    of_tables = {"lr": SETTINGS.embedding_lr, "l2": SETTINGS.embedding_l2}
    dense = [
        {"params": [cores.numbers.weight], "l2": SETTINGS.embedding_l2},
        {"params": [cores.numbers.bias, *cores.network.parameters()]},
    ]
    optimizers = [
        CowClipAdam(tables, clip=CowClip(ratio=0.05, bound=1e-3), **of_tables),
        CowClipAdam(first, clip=None, **of_tables),
        DenseAdam(dense, lr=SETTINGS.dense_lr),
    ]
    start = [weight.detach().clone() for weight in tables]
    for step in range(6):
        ids, numbers, label = drawn(step)
        loss = training.step(ids, numbers, label)
        logits = cores(ids, numbers)
        expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    for found, weight in zip(ours.parameters(), cores.parameters(), strict=True):
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-6)
    assert all((w - s).abs().max() > 0.01 for w, s in zip(tables, start, strict=True))
    other = Training(DeepFM(SIZES, 3, hidden=(16,), std=0.1, seed=1), Clip("none"), SETTINGS)
    for step in range(6):
        other.step(*drawn(step))
    assert (other.embeddings[0] - tables[0]).abs().max() > 1e-3


@pytest.mark.slow
def test_the_table_has_all_clips(monkeypatch, capsys):
    few = SyntheticClicks(scale=0.0001).dataset(512, 256)
    monkeypatch.setattr(SyntheticClicks, "dataset", lambda *_: few)
    assert ablation.main(["--batch", "128"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("|")[1].strip(" `") for line in lines] == list(CLIPS)
    assert all(0.4 < float(line.split("|")[3]) < 1 for line in lines)
