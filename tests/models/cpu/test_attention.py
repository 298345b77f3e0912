"""The kernels of DIN's unit and its activations, against torch in float64."""

import copy

import pytest
import torch
from torch import nn

from stampede.models import cpu
from stampede.models.activations import Dice, PReLU
from stampede.models.batch_norm import use_global_batches
from stampede.models.histories import Jagged
from stampede.models.options import AttentionOptions
from stampede.models.target_attention import TargetAttention

DIM, WIDTH = 5, 20
LENGTHS = {
    "some": [3, 0, 1, 70, 2, 0, 200, 1, 5], "one": [1], "none": [0, 0], "no sample": [],
    "many": [17] * 100,
}  # fmt: skip


def unit_of(activation, hidden, softmax):
    options = AttentionOptions(hidden=hidden, activation=activation, softmax=softmax)
    unit = TargetAttention(DIM, options, torch.Generator().manual_seed(0))
    use_global_batches(unit)
    torch.manual_seed(1)
    for parameter in unit.parameters():
        nn.init.normal_(parameter, 0.0, 0.4)
    return unit


def computed(unit, lengths, dtype):
    """The sums, all gradients, and running statistics."""
    torch.manual_seed(2)
    query, rows = torch.randn(len(lengths), DIM), torch.randn(sum(lengths), WIDTH)
    leaves = [query.to(dtype).requires_grad_(), rows.to(dtype).requires_grad_()]
    history = Jagged(leaves[1], torch.tensor(lengths, dtype=torch.int32))
    found = unit(leaves[0], history)
    factors = torch.randn(found.shape).to(dtype)
    leaves += list(unit.parameters())
    grads = torch.autograd.grad((found * factors).sum(), leaves, allow_unused=True)
    buffers = [buffer for name, buffer in unit.named_buffers() if "running" in name]
    return [found, *grads, *buffers]


@pytest.mark.parametrize("activation", ["prelu", "dice", "relu"])
@pytest.mark.parametrize("hidden, softmax", [([64], False), ([7, 33], True), ([1], False)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_unit(activation, hidden, softmax, lengths):
    unit = unit_of(activation, hidden, softmax)
    exact = copy.deepcopy(unit).double()
    ours, theirs = computed(unit, lengths, torch.float32), computed(exact, lengths, torch.float64)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        scale = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


@pytest.mark.parametrize("width", [1, 16, 37])
def test_dice_of_large_values(width):
    layers = nn.Sequential(Dice(width))
    use_global_batches(layers)
    torch.manual_seed(3)
    nn.init.normal_(layers[0].alpha)
    exact = copy.deepcopy(layers).double()
    x = 300.0 + 50.0 * torch.randn(1000, width)
    x[0] = 1e4  # Its share is 1 to the last bit, and that of others far below the mean 0.
    grads = torch.randn(1000, width)
    found = []
    for module, dtype in ((layers, torch.float32), (exact, torch.float64)):
        given = x.to(dtype).requires_grad_()
        output = module(given)
        of_given, of_alpha = torch.autograd.grad(output, [given, module[0].alpha], grads.to(dtype))
        found.append([output, of_given, of_alpha])
    for mine, other in zip(*found, strict=True):
        bound = 1e-4 * other.abs().max().item()
        torch.testing.assert_close(mine.double(), other, rtol=1e-3, atol=bound)


def test_no_number_stays_no_number():
    layers = nn.Sequential(Dice(3), PReLU(3))
    use_global_batches(layers)
    x = torch.randn(5, 3)
    x[2, 1] = float("nan")
    assert layers(x.requires_grad_()).isnan()[:, 1].all()


def test_gradients_cannot_be_differentiated_again():
    unit = unit_of("dice", [4], False)
    rows = torch.randn(3, WIDTH, requires_grad=True)
    found = unit(torch.randn(2, DIM), Jagged(rows, torch.tensor([1, 2])))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(found.sum(), rows, create_graph=True)


def test_the_first_layer_gives_the_same_bits_on_any_number_of_threads():
    torch.manual_seed(4)
    assert cpu.available()
    lengths = torch.tensor(LENGTHS["some"] * 60)
    query, rows = torch.randn(len(lengths), DIM), torch.randn(int(lengths.sum()), WIDTH)
    weights = torch.randn(64, DIM), torch.randn(64, DIM)
    of_sample, grad = torch.randn(len(lengths), 64), torch.randn(len(rows), 64)
    found, threads = [], torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        operators = torch.ops.stampede_dense
        output = operators.first_layer(of_sample, query, rows, *weights, lengths)
        given = (grad, query, rows, *weights, lengths)
        found.append([output, *operators.first_layer_backward(*given)])
    torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
