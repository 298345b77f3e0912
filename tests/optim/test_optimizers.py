"""The optimizers with CowClip in plain PyTorch."""

import copy
import pickle

import pytest
import torch
from torch import nn

from stampede.optim import CowClip, CowClipAdam, CowClipRowWiseAdam, CowClipSGD
from support.one_table import CLASSES, EVERY_CLASS, ids_of_step, saved_and_loaded, table, train
from support.reference import ReferenceTables

HOW = ("sparse", "dense", "coalesced")


@pytest.mark.parametrize(
    "rule, how, rows",
    [
        (rule, how, ("all", "touched")[(place + number) % 2])
        for number, rule in enumerate(CLASSES)
        for place, how in enumerate(HOW)
    ],
)
def test_follows_the_equations(rule, how, rows):
    """Two lookups a step; gradients that do not tell the counts are given them."""
    common = {"lr": 0.05, "l2": 1e-2, "weight_decay": 0.1, "rows": rows, "eps": 1e-7}
    if rule == "sgd":
        del common["eps"]
        common["momentum"] = 0.9
    start = torch.randn(15, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = nn.Embedding(15, 3, sparse=how != "dense", _weight=start.clone())
    clip = {"ratio": 0.1, "bound": 1e-3}
    optimizer = CLASSES[rule](made.parameters(), clip=CowClip(**clip), **common)
    reference = ReferenceTables({"t": start}, rule=rule, granularity="cowclip", **clip, **common)
    for step in range(4):
        optimizer.zero_grad()
        leaf = reference.weights["t"].clone().requires_grad_()
        lookups = [ids_of_step(2 * step + part, 15, 12) for part in (0, 1)]
        for ids in lookups:
            for found in (made(ids), leaf[ids]):
                found.sin().sum(1).square().mean().backward()
        counts = torch.bincount(torch.cat(lookups), minlength=15)
        if how == "coalesced":
            made.weight.grad = made.weight.grad.coalesce()
        optimizer.step(counts={} if how == "sparse" else {made.weight: counts})
        reference.step({"t": leaf.grad}, {"t": counts})
    assert 0 < reference.clipped < reference.touched
    assert reference.largest_count > 1
    torch.testing.assert_close(made.weight.detach(), reference.weights["t"], rtol=1e-9, atol=1e-12)


def test_a_penalty_in_the_loss_reaches_rows_that_did_not_occur():
    made = table()
    before = made.weight.detach().clone()
    optimizer = CowClipSGD(made.parameters(), lr=0.1)
    (made(torch.tensor([1])).sum() + made.weight[7].sum()).backward()
    counts = torch.bincount(torch.tensor([1]), minlength=20)
    optimizer.step(counts={made.weight: counts})
    assert (made.weight != before).any(1).nonzero().flatten().tolist() == [1, 7]


@pytest.mark.parametrize(
    "kind, arguments, words",
    [
        (kind, {key: value}, words)
        for key, value, words, kinds in (
            # Of every rule; the sentence names the class.
            ("lr", -1, "lr is -1", CLASSES),
            # As YAML reads it.
            ("lr", "1e-4", "lr is '1e-4'", ["adam"]),
            ("clip", CowClip, "clip is <class.*write a CowClip", ["rowwise_adam"]),
            ("clip", "cowclip", "clip is 'cowclip'", ["adagrad"]),
            ("l2", float("nan"), "l2 is nan", ["rowwise_adagrad"]),
            ("weight_decay", -0.1, "weight_decay", ["sgd"]),
            ("rows", "some", "'all' or 'touched'", ["adam"]),
            ("on_nonfinite", "warn", "'error' or 'skip_row'", ["rowwise_adam"]),
            ("padding_idx", -21, "no row -21", ["adagrad"]),
            ("betas", (0.9, 1.0), "betas is", ("adam", "rowwise_adam")),
            ("betas", 0.9, r"betas is 0.9; write .* \(0.9, 0.999\)", ("adam", "rowwise_adam")),
            ("betas", "0.9", "betas is '0.9'", ("adam", "rowwise_adam")),
            ("betas", [0.9], r"betas is \(0.9,\)", ("adam", "rowwise_adam")),
            ("betas", (float("nan"), 0.9), "betas is", ("adam", "rowwise_adam")),
            ("eps", 0.0, "eps is", CLASSES.keys() - {"sgd"}),
            ("eps", float("nan"), "eps is", CLASSES.keys() - {"sgd"}),
            ("eps", "1e-7", "eps is", CLASSES.keys() - {"sgd"}),
            ("eps_placement", "tf", "eps_placement is", ["adam"]),
            ("momentum", 1.0, "momentum is", ["sgd"]),
        )
        for kind in sorted(kinds)
    ],
)
def test_settings_out_of_range_are_refused(kind, arguments, words):
    optimizer_class = CLASSES[kind]
    with pytest.raises(ValueError, match=f"{optimizer_class.__name__}: .*{words}"):
        optimizer_class(table().parameters(), **arguments)


@pytest.mark.parametrize(
    "kind, name, words",
    [
        ("adam", "learning_rate", "write lr"),
        ("sgd", "learning_rate", "write lr"),
        ("adam", "beta1", r"write betas=\(beta1, beta2\)"),
        ("rowwise_adam", "beta2", r"write betas=\(beta1, beta2\)"),
        ("sgd", "beta1", "leave it out"),
        ("adagrad", "max_gradient", "write clip"),
        ("adam", "optimizer", "leave it out"),
        ("adam", "eta", "leave it out"),
    ],
)
def test_arguments_of_other_names_are_refused_with_ours(kind, name, words):
    """As FBGEMM, TorchRec and torch name theirs."""
    optimizer_class = CLASSES[kind]
    said = f"{optimizer_class.__name__} has no argument {name}; {words} \\(it has lr, .*rows"
    with pytest.raises(TypeError, match=said):
        optimizer_class(table().parameters(), **{name: 0.9})


def test_a_grad_scaler_changes_nothing():
    plain, scaled = table(), table()
    train(plain, CowClipAdam(plain.parameters(), lr=0.1, clip=CowClip(ratio=0.1)), 3)
    optimizer = CowClipAdam(scaled.parameters(), lr=0.1, clip=CowClip(ratio=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(scaled(ids_of_step(step)).square().sum()).backward()
        if step == 1:
            scaler.unscale_(optimizer)  # step() does it otherwise
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(plain.weight, scaled.weight)


LOW = (torch.float16, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer_class, dtype",
    [
        (kind, dtype)
        for number, kind in enumerate(CLASSES.values())
        for dtype in (torch.float32, LOW[number % 2])
    ],
)
def test_states_copies_and_pickles_go_on_as_the_original(optimizer_class, dtype):
    momentum = {"momentum": 0.9} if optimizer_class is CowClipSGD else {}
    settings = {"lr": 1e-2, "l2": 1e-3, "clip": CowClip(ratio=0.1), **momentum}
    made = table(dtype=dtype)
    optimizer = optimizer_class(made.parameters(), **settings)
    train(made, optimizer, 3)
    second = table(seed=1, dtype=dtype)
    second.load_state_dict(made.state_dict())
    resumed = optimizer_class(second.parameters(), lr=0.5, **momentum)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    copied = copy.deepcopy((made, optimizer))
    pickled = pickle.loads(pickle.dumps((made, optimizer)))
    train(made, optimizer, 3, first=3)
    for other, its_optimizer in ((second, resumed), copied, pickled):
        states = [s for name, s in its_optimizer.state[other.weight].items() if name != "step"]
        # Of tables of lower precision, too.
        assert states and all(state.dtype == torch.float32 for state in states)
        train(other, its_optimizer, 3, first=3)
        assert other.weight.dtype == dtype and torch.equal(other.weight, made.weight)


def test_a_state_of_an_earlier_version_gets_the_new_settings_and_one_of_another_class_is_refused():
    made = table()
    optimizer = CowClipAdam(made.parameters(), seed=3)
    state_dict = optimizer.state_dict()
    del state_dict["param_groups"][0]["seed"]
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["seed"] == 3
    other = CowClipRowWiseAdam(made.parameters())
    train(made, other, 1)
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="of the same class and model"):
        train(made, optimizer, 1)


def test_sums_of_fp16_gradients_do_not_overflow():
    made = table(rows=2, dtype=torch.float16)
    optimizer = CowClipSGD(made.parameters(), lr=1e-6, clip=None)
    (made(torch.tensor([1, 1])) * 4e4).float().sum().backward()
    before = made.weight.detach().clone()
    optimizer.step()
    assert made.weight.isfinite().all() and not torch.equal(made.weight, before)


@EVERY_CLASS
def test_groups_have_their_own_settings(optimizer_class):
    still, decays, plain = table(), table(), table()
    optimizer = optimizer_class([{"params": still.parameters(), "lr": 0.0}], lr=0.1)
    optimizer.add_param_group({"params": decays.parameters(), "l2": 0.1})
    optimizer.add_param_group({"params": plain.parameters(), "rows": "touched", "clip": None})
    before = still.weight.detach().clone()
    for made in (still, decays, plain):
        (made(torch.tensor([1])) * 1e3).sum().backward()
    optimizer.step()
    assert torch.equal(still.weight, before)
    assert (decays.weight != before).all()
    assert (plain.weight != before).any(1).nonzero().flatten().tolist() == [1]
    assert (plain.weight - before)[1].norm() >= (decays.weight - before)[1].norm()


def test_settings_that_change_between_steps_are_followed():
    made = table()
    optimizer = CowClipAdam(made.parameters(), lr=0.1, l2=0.0)
    (group,) = optimizer.param_groups
    for l2 in (0.0, 0.5):
        before, group["l2"] = made.weight.detach().clone(), l2
        optimizer.zero_grad()
        made(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        # The L2 term alone moves a row that was not looked up.
        assert (made.weight[5] != before[5]).any() == bool(l2)
    group["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.step()


def test_a_group_that_is_refused_is_not_added():
    one, other = table(), table()
    optimizer = CowClipAdam(one.parameters())
    for wrong, words in (
        ({"params": other.parameters(), "l2": -1}, "l2 is -1"),
        ({"params": nn.Linear(3, 3).bias}, "is not a table"),
        ({"params": other.parameters(), "padding_idx": 20}, "no row 20"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 1
    train(one, optimizer, 1)


def test_closures_are_called_with_gradients():
    made, other = table(), table()
    optimizer = CowClipAdam(made.parameters(), lr=0.1)
    train(other, CowClipAdam(other.parameters(), lr=0.1), 1)

    def closure():
        loss = made(ids_of_step(0)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).requires_grad
    assert torch.equal(made.weight, other.weight)


def test_a_table_without_gradient_is_left_alone():
    used, unused, same = table(), table(), table()
    optimizer = CowClipAdam([*used.parameters(), *unused.parameters()], l2=0.1)
    optimizer.step()  # no table has a gradient
    train(used, optimizer, 2)
    assert torch.equal(unused.weight, same.weight)
    assert unused.weight not in optimizer.state
