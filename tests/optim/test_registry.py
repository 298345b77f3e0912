"""Rules and clips of a user's own: what is refused, and in plain PyTorch against float64."""

from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from stampede.optim import Clip, CowClip, Rule, register_clip, register_rule, registry
from stampede.optim.optimizers import optimizer_with
from support.one_table import ids_of_step, saved_and_loaded, table, train
from support.own_rules import CowClipLion, Lion, RootCountClip
from support.reference import ReferenceTables


@pytest.fixture(autouse=True)
def _registered():
    with mock.patch.dict(registry.RULES), mock.patch.dict(registry.CLIPS):
        yield


def frozen(base, **members):
    method = {Rule: "step_", Clip: "largest_norm"}[base]
    return dataclass(frozen=True)(type("Own", (base,), {method: lambda *_: None, **members}))


UNHASHABLE = {"__annotations__": {"values": list}, "values": field(default_factory=list)}
REQUIRED = {"__annotations__": {"beta": float}}


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("my-rule", frozen(Rule), "write a name: @register_rule"),
        ("adam", frozen(Rule), "stampede.optim.rules.Adam is a rule of that name"),
        ("own", type("Own", (Rule,), {}), "write @dataclass.frozen=True. below the decorator"),
        ("own", frozen(Clip), "a class that inherits stampede.optim.Rule"),
        ("own", frozen(Rule, **REQUIRED), "'beta'; give every setting a default"),
        ("class", frozen(Rule), "write a name: @register_rule"),
        ("own", frozen(Rule, step_=Rule.step_), "Own has no method step_; write one"),
        ("own", frozen(Rule, element_states=("weight",)), "'weight' is the name of another"),
        ("own", frozen(Rule, element_states=("a",), row_states=("a",)), "'a' is the name of"),
        ("own", frozen(Rule, __annotations__={"l2": float}, l2=0.0), "'l2' is the name of"),
        ("own", frozen(Rule, **UNHASHABLE), "unhashable.*'list'; give every setting a default"),
    ],
)
def test_what_cannot_be_registered(name, kind, words):
    with pytest.raises(ValueError, match=words):
        register_rule(name)(kind)
    with pytest.raises(ValueError, match=r"clip\.CowClip is a clip of that name"):
        register_clip("cowclip")(frozen(Clip))


def test_another_class_of_the_same_file_does_not_replace_one():
    register_rule("own")(frozen(Rule))
    other = frozen(Rule)
    other.__qualname__ = "Other"
    with pytest.raises(ValueError, match=r"test_registry\.Own is a rule of that name"):
        register_rule("own")(other)


def test_a_clip_of_a_wrong_shape_is_named():
    wide = frozen(Clip, largest_norm=lambda self, norm, *_: norm[:, None] + torch.zeros(3))
    squares = torch.ones(2)
    with pytest.raises(ValueError, match=r"Own.largest_norm returned the shape \(2, 3\); return"):
        wide().factor(squares, squares, squares, 4)


def test_a_file_that_is_executed_again_replaces_its_own():
    first, second = frozen(Rule), frozen(Rule)
    assert register_rule("own")(first) is first and register_rule("own")(second) is second
    assert registry.RULES["own"] is second
    assert optimizer_with(second) is optimizer_with(second) is not optimizer_with(first)
    assert optimizer_with(Lion) is CowClipLion


@pytest.mark.parametrize(
    "clip", [RootCountClip(0.5), RootCountClip(0.5, columns=3), CowClip("none")]
)
@pytest.mark.parametrize("rows", ["all", "touched"])
def test_they_follow_float64_in_plain_pytorch(rows, clip):
    made = table()
    optimizer = CowClipLion(made.parameters(), lr=0.01, l2=1e-3, clip=clip, rows=rows)
    named = {"granularity": "root_count", "threshold": 0.5} if clip.clips else {}
    reference = ReferenceTables(
        {"t": made.weight}, rule="lion", betas=(0.9, 0.99), l2=1e-3, rows=rows,
        columns=clip.columns, **named,
    )  # fmt: skip
    for step in range(6):
        ids = ids_of_step(step)
        grads = torch.zeros(20, 4, dtype=torch.float64)
        grads.index_add_(0, ids, 2 * reference.weights["t"][ids])
        train(made, optimizer, 1, first=step)
        reference.step({"t": grads}, {"t": torch.bincount(ids, minlength=20)}, lr=0.01)
    torch.testing.assert_close(made.weight.double(), reference.weights["t"], rtol=0, atol=1e-6)
    momentum = optimizer.state[made.weight]["exp_avg"].double()
    torch.testing.assert_close(momentum, reference.first["t"], rtol=1e-5, atol=1e-6)
    assert bool(reference.clipped) == clip.clips


def test_a_saved_state_holds_the_clip():
    made = table()
    optimizer = CowClipLion(made.parameters(), clip=CowClip("row", threshold=0.5), betas=[0.8, 0.9])
    train(made, optimizer, 2)
    loaded = CowClipLion(table().parameters())
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    (group,) = loaded.param_groups
    assert group["clip"] == CowClip("row", threshold=0.5) and tuple(group["betas"]) == (0.8, 0.9)
