"""What dense layers are measured to keep is what they allocate."""

from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from stampede.engine.planning.activations import activation_bytes_per_sample
from stampede.models import CTRModel, network
from stampede.native_library import switched_off
from support.networks import VARIANTS, variant_id

SAMPLES, FIELDS, NUMBERS = 256, 12, 5


def model_of(name, options):
    sizes = {f"C{field}": 10 for field in range(FIELDS)}
    checked = network(name).options.model_validate(options)
    return CTRModel(name, sizes, NUMBERS, 8, [64, 48], 0, checked)


def allocated(model, samples):
    """Most bytes alive at a time in forward and backward."""
    rows = torch.randn(samples, FIELDS * model.front.columns.stored, requires_grad=True)
    numbers = torch.randn(samples, NUMBERS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.autograd.grad(model.logits(rows, numbers).sum(), rows)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("name, options", VARIANTS, ids=variant_id)
def test_it_is_what_is_allocated(name, options):
    model = model_of(name, options)
    planned = SAMPLES * activation_bytes_per_sample(model)
    with switched_off():
        assert allocated(model, SAMPLES) == pytest.approx(planned, rel=0.15)
    # What the kernels need for weights does not grow with the samples; gradients take the memory of
    # activations.
    by_kernels = allocated(model, 9 * SAMPLES) - allocated(model, SAMPLES)
    assert by_kernels <= 1.25 * 8 * planned


def test_the_model_is_left_as_it_is():
    model = model_of("deepfm", {})
    model.network.mlp.hidden = nn.Sequential(model.network.mlp.hidden, nn.BatchNorm1d(48))
    torch.manual_seed(0)
    drawn = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    assert activation_bytes_per_sample(model) > 0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(model.network.state_dict()[name], was) for name, was in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
