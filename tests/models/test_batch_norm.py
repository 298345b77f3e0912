"""Batch norm over the samples of all ranks, against torch's own on the whole batch in float64."""

import pytest
import torch
from torch import nn

from stampede.models.batch_norm import use_global_batches
from support.ranks import process_group, run_ranks

FEATURES = 3


def norms(kind, **options):
    """Torch's norm and ours, with the same weights."""
    norm = nn.BatchNorm1d(FEATURES, **options).double()
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    holder = nn.Sequential(nn.BatchNorm1d(FEATURES, **options).double())
    holder[0].load_state_dict(norm.state_dict())
    (ours,) = use_global_batches(holder)
    assert holder[0] is ours
    return norm if kind == "torch" else ours


def drawn(samples, *more):
    torch.manual_seed(samples)
    # Far from 0: the mean matters.
    return (5 + 2 * torch.randn(samples, FEATURES, *more, dtype=torch.float64)).requires_grad_()


def step(norm, values, whole):
    """Outputs, gradients of the inputs, and all else that a step leaves; whole: of the batch."""
    found = norm(values)
    torch.manual_seed(7)
    factors = torch.randn(whole.shape, dtype=torch.float64)
    start = values.storage_offset() // max(values.stride(0), 1)
    (found.tanh() * factors[start : start + len(values)]).sum().backward()
    grads = [parameter.grad for parameter in norm.parameters()]
    norm.zero_grad()
    state = {key: value.clone() for key, value in norm.state_dict().items()}
    return found.detach(), values.grad, grads, state


def on_a_rank(parts, more, options):
    torch.manual_seed(0)
    with process_group():
        rank = torch.distributed.get_rank()
        norm = norms("ours", **options)
        norm.ranks = len(parts)
        steps = []
        for _ in range(2):
            whole = drawn(sum(parts), *more)
            begin = sum(parts[:rank])
            mine = whole.detach()[begin : begin + parts[rank]].requires_grad_()
            steps.append(step(norm, mine, whole))
        return steps


@pytest.mark.slow
@pytest.mark.parametrize("parts, more, options", [
    ([4, 5], (), {}),
    ([1, 0], (), {}),
    ([1, 1], (), {"affine": False, "eps": 1e-8}),
    ([0, 7, 2, 1], (), {"momentum": None}),
    ([3, 0, 2], (4,), {"momentum": 0.3}),
])  # fmt: skip
def test_ranks_share_their_statistics(parts, more, options):
    found = run_ranks(len(parts), on_a_rank, parts, more, options)
    norm = norms("torch", **options)
    for number in range(2):
        whole = drawn(sum(parts), *more)
        if sum(parts) == 1:
            # Torch refuses it; its own output is the bias, whatever the input.
            outputs, of_values = norm.bias.detach()[None], torch.zeros_like(whole)
            state = {**norm.state_dict(), "num_batches_tracked": torch.tensor(number + 1)}
            of_parameters = None
        else:
            outputs, of_values, of_parameters, state = step(norm, whole, whole)
        steps = [of_rank[number] for of_rank in found]
        close(torch.cat([one[0] for one in steps]), outputs)
        close(torch.cat([one[1] for one in steps]), of_values)
        for place, expected in enumerate(of_parameters or []):
            close(sum(one[2][place] for one in steps), expected)
        for one in steps:
            assert one[3].keys() == state.keys()
            for key, value in one[3].items():
                close(value, state[key])


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_one_process_needs_no_others():
    one, ours = norms("torch"), norms("ours")
    for samples in (9, 2):
        whole, same = drawn(samples), drawn(samples)
        torch.testing.assert_close(step(ours, same, same), step(one, whole, whole))
    running = ours.running_mean.clone()
    for samples in (1, 0):
        few = drawn(samples)
        found, of_values, *_ = step(ours, few, few)
        close(found, ours.bias.detach().expand(samples, -1))
        close(of_values, torch.zeros_like(of_values))
    assert torch.equal(running, ours.running_mean)
    one.eval()
    ours.eval()
    few = drawn(1)
    one.load_state_dict(ours.state_dict())
    assert torch.equal(ours(few), one(few))


def test_bf16_has_float32_statistics():
    ours = norms("ours").float()
    one = norms("ours").float()
    ours.ranks = 0  # As on several ranks, without them.
    values = drawn(50).detach().to(torch.bfloat16)
    found = ours(values)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, one(values), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours.running_var, one.running_var, rtol=1e-5, atol=1e-5)
