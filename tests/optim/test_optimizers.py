"""The optimizers with CowClip in plain PyTorch."""

import copy
import pickle

import pytest
import torch
from torch import nn

from stampede.optim import (
    CowClip,
    CowClipAdam,
    CowClipRowWiseAdagrad,
    CowClipRowWiseAdam,
    CowClipSGD,
)
from support.one_table import CLASSES, EVERY_CLASS, ids_of_step, saved_and_loaded, table, train
from support.reference import ReferenceTables


class TwoTables:
    """The same training through sparse or dense gradients, and in the reference."""

    rows = (15, 6)

    def __init__(self, sparse=True):
        draw = torch.Generator().manual_seed(1)
        self.start = {
            "user": torch.randn(15, 3, generator=draw, dtype=torch.float64),
            "tags": torch.randn(6, 2, generator=draw, dtype=torch.float64) * 0.1,
        }
        self.user = nn.Embedding(15, 3, sparse=sparse, _weight=self.start["user"].clone())
        self.tags = nn.EmbeddingBag(
            6, 2, sparse=sparse, mode="sum", _weight=self.start["tags"].clone()
        )

    def parameters(self):
        return [self.user.weight, self.tags.weight]

    def ids(self, step):
        return ids_of_step(step, 15, 12), ids_of_step(100 + step, 6, 24).view(12, 2)

    def loss(self, step):
        user, tags = self.ids(step)
        return self._loss(self.user(user), self.tags(tags))

    def counts(self, step):
        return [
            torch.bincount(ids.flatten(), minlength=rows)
            for ids, rows in zip(self.ids(step), self.rows, strict=True)
        ]

    def reference_step(self, reference, step, lr=None):
        """Gradients of whole tables, by matrices of ones and zeros."""
        leaves = {name: w.clone().requires_grad_() for name, w in reference.weights.items()}
        user, tags = self.ids(step)
        chosen = nn.functional.one_hot(tags, 6).sum(1).double()
        self._loss(
            nn.functional.one_hot(user, 15).double() @ leaves["user"], chosen @ leaves["tags"]
        ).backward()
        counts = dict(zip(leaves, self.counts(step), strict=True))
        reference.step({name: leaf.grad for name, leaf in leaves.items()}, counts, lr)

    @staticmethod
    def _loss(user, tags):
        return (user.sin().sum(1) + tags.sum(1)).square().mean()


@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("rule", CLASSES)
def test_follows_the_equations(rule, rows):
    common = {"lr": 0.05, "l2": 1e-2, "weight_decay": 0.1, "rows": rows, "eps": 1e-7}
    if rule == "sgd":
        del common["eps"]
        common["momentum"] = 0.9
    tables = TwoTables()
    clip = {"ratio": 0.1, "bound": 1e-3}
    optimizer = CLASSES[rule](tables.parameters(), clip=CowClip(**clip), **common)
    reference = ReferenceTables(tables.start, rule=rule, granularity="cowclip", **clip, **common)
    for step in range(5):
        optimizer.zero_grad()
        tables.loss(step).backward()
        optimizer.step()
        tables.reference_step(reference, step)
    assert 0 < reference.clipped < reference.touched
    assert reference.largest_count > 1
    for name, found in zip(reference.weights, tables.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), reference.weights[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("how", ["dense", "coalesced", "accumulated"])
@pytest.mark.parametrize("optimizer_class", [CowClipAdam, CowClipRowWiseAdagrad])
def test_counts_that_are_passed_give_the_same(optimizer_class, how, rows):
    results = []
    for usual in (True, False):
        tables = TwoTables(sparse=usual or how != "dense")
        optimizer = optimizer_class(tables.parameters(), lr=0.1, clip=CowClip(ratio=0.1), rows=rows)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                tables.loss(2 * step + part).backward()
            counts = {}
            if not usual and how != "accumulated":
                for index, param in enumerate(tables.parameters()):
                    counts[param] = sum(tables.counts(2 * step + part)[index] for part in range(2))
                    if how == "coalesced":
                        param.grad = param.grad.coalesce()
            optimizer.step(counts=counts)
        results.append([param.detach() for param in tables.parameters()])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_a_penalty_in_the_loss_reaches_rows_that_did_not_occur():
    made = table()
    before = made.weight.detach().clone()
    optimizer = CowClipSGD(made.parameters(), lr=0.1)
    (made(torch.tensor([1])).sum() + made.weight[7].sum()).backward()
    counts = torch.bincount(torch.tensor([1]), minlength=20)
    optimizer.step(counts={made.weight: counts})
    assert (made.weight != before).any(1).nonzero().flatten().tolist() == [1, 7]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lr": -1}, "lr is -1"),
        ({"l2": float("nan")}, "l2 is nan"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"rows": "some"}, "'all' or 'touched'"),
        ({"on_nonfinite": "warn"}, "'error' or 'skip_row'"),
        ({"padding_idx": -21}, "no row -21"),
    ],
)
@EVERY_CLASS
def test_settings_out_of_range_are_refused(optimizer_class, arguments, words):
    with pytest.raises(ValueError, match=words):
        optimizer_class(table().parameters(), **arguments)


@pytest.mark.parametrize(
    "optimizer_class, arguments",
    [
        *(
            (adam, {"betas": betas})
            for adam in (CowClipAdam, CowClipRowWiseAdam)
            for betas in ((0.9, 1.0), (float("nan"), 0.9))
        ),
        *(
            (each, {"eps": eps})
            for each in CLASSES.values()
            if each is not CowClipSGD
            for eps in (0.0, float("nan"))
        ),
        (CowClipAdam, {"eps_placement": "tf"}),
        (CowClipSGD, {"momentum": 1.0}),
    ],
)
def test_settings_of_the_rule_out_of_range_are_refused(optimizer_class, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"{optimizer_class.__name__}: {name} is"):
        optimizer_class(table().parameters(), **arguments)


def test_a_learning_rate_that_becomes_nan_is_refused():
    made = table()
    optimizer = CowClipAdam(made.parameters())
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        train(made, optimizer, 1)


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


@EVERY_CLASS
def test_state_dict_continues_exactly(optimizer_class):
    whole, first = table(), table()
    settings = {"lr": 1e-2, "l2": 1e-3, "clip": CowClip(ratio=0.1)}
    optimizer = optimizer_class(whole.parameters(), **settings)
    train(whole, optimizer, 6)
    half = optimizer_class(first.parameters(), **settings)
    train(first, half, 3)
    second = table(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = optimizer_class(second.parameters(), lr=0.5)
    resumed.load_state_dict(saved_and_loaded(half.state_dict()))
    train(second, resumed, 3, first=3)
    assert torch.equal(whole.weight, second.weight)


def test_a_state_of_an_earlier_version_gets_the_new_settings():
    optimizer = CowClipAdam(table().parameters(), seed=3)
    state_dict = optimizer.state_dict()
    del state_dict["param_groups"][0]["seed"]
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["seed"] == 3


def test_a_state_of_another_class_is_refused():
    made = table()
    other = CowClipRowWiseAdam(made.parameters())
    train(made, other, 1)
    optimizer = CowClipAdam(made.parameters())
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="of the same class and model"):
        train(made, optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EVERY_CLASS
def test_low_precision_tables_keep_float32_state(optimizer_class, dtype):
    made = table(dtype=dtype)
    arguments = {"momentum": 0.9} if optimizer_class is CowClipSGD else {}
    optimizer = optimizer_class(made.parameters(), lr=1e-2, **arguments)
    train(made, optimizer, 2)
    resumed = optimizer_class(made.parameters(), **arguments)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for kept in (optimizer, resumed):
        states = [value for name, value in kept.state[made.weight].items() if name != "step"]
        assert states and all(state.dtype == torch.float32 for state in states)
    for name, state in resumed.state[made.weight].items():
        assert torch.equal(state, optimizer.state[made.weight][name])
    assert made.weight.dtype == dtype
    train(made, resumed, 1)


def test_sums_of_fp16_gradients_do_not_overflow():
    made = table(rows=2, dtype=torch.float16)
    optimizer = CowClipSGD(made.parameters(), lr=1e-6, clip=None)
    (made(torch.tensor([1, 1])) * 4e4).float().sum().backward()
    before = made.weight.detach().clone()
    optimizer.step()
    assert made.weight.isfinite().all() and not torch.equal(made.weight, before)


@EVERY_CLASS
def test_copies_and_pickles_go_on_as_the_original(optimizer_class):
    made = table()
    optimizer = optimizer_class(made.parameters(), lr=0.1)
    train(made, optimizer, 2)
    copies = [copy.deepcopy((made, optimizer)), pickle.loads(pickle.dumps((made, optimizer)))]
    train(made, optimizer, 2, first=2)
    for other, its_optimizer in copies:
        train(other, its_optimizer, 2, first=2)
        assert torch.equal(other.weight, made.weight)


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
    found = []
    for late in (False, True):
        made, torch_state = table(), torch.arange(80.0).view(20, 4) / 80
        with torch.no_grad():
            made.weight.copy_(torch_state)
        optimizer = CowClipAdam(made.parameters(), lr=0.1, l2=0.0 if late else 0.5)
        optimizer.param_groups[0]["l2"] = 0.0 if late else 0.5
        for _ in range(2):
            optimizer.zero_grad()
            made(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["l2"] = 0.5
        found.append(made.weight.detach())
    # Under `rows="all"` the L2 term moves a row that was not looked up, from the second step on.
    before = torch_state[5]
    assert (found[1][5] != before).any() and not torch.equal(found[0][5], found[1][5])


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
        optimizer.zero_grad()
        loss = made(ids_of_step(0)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert torch.equal(made.weight, other.weight)


def test_a_table_without_gradient_is_left_alone():
    used, unused = table(), table()
    before = unused.weight.detach().clone()
    optimizer = CowClipAdam([*used.parameters(), *unused.parameters()], l2=0.1)
    optimizer.step()  # no table has a gradient
    train(used, optimizer, 2)
    assert torch.equal(unused.weight, before)
    assert unused.weight not in optimizer.state
