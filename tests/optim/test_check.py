"""The check of the Triton kernels before the first step; here in Triton's interpreter."""

import importlib.util
import logging
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim import CowClip, native
from stampede.optim.rules import Adam
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.triton import check, steps, sum_runs
from stampede.optim.update_settings import UpdateSettings
from support.updated_tables import computed, one_step, state_of, two_tables

SETTINGS = [
    UpdateSettings(l2=1e-5, clip=CowClip(columns=10)),
    UpdateSettings(l2=1e-3, clip=CowClip(ratio=0.5, bound=1e-3, variant="paper"), rows="touched"),
    UpdateSettings(rule=Adam((0.5, 0.9), 1e-3, "torch"), weight_decay=0.3, l2=1e-3),
]

# By kernel: its file, what is written there, and what is wrong instead.
WRONG = {
    "_sum_windows": (sum_runs, "partials + window * DIM + column, tl.sum(", "tl.max("),
    "_join_windows": (sum_runs, "joined + window * DIM + column, tl.sum(", "tl.max("),
    "_sum_runs": (sum_runs, "g = tl.fma(w, decay, total)", "g = total"),
    "_update_rows": (steps, "tl.maximum(times, 1).to(tl.float32)", "1.0"),
    "_replay": (steps, "w, m, v, decay * w, beta1", "w, m, v, 0.0 * w, beta1"),
    "_mark_rows": (steps, "tl.zeros([BLOCK], tl.int32) + now", "now - 1"),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    # What was compiled for other tests is not compiled anew.
    native.available()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))


@pytest.fixture
def make_wrong(tmp_path, monkeypatch):
    """Replaces a kernel by that of an edited copy of its file."""

    def change(kernel):
        module, right, wrong = WRONG[kernel]
        with open(module.__file__) as file:
            source = file.read()
        assert source.count(right) == 1
        if wrong == "tl.max(":
            wrong = right.replace("tl.sum(", wrong)
        copy = tmp_path / f"wrong_{kernel}.py"
        copy.write_text(source.replace(right, wrong))
        spec = importlib.util.spec_from_file_location(copy.stem, copy)
        edited = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(edited)
        monkeypatch.setattr(module, kernel, getattr(edited, kernel))

    return change


def found_by(setting, pooled=True, mean=False, columns=12):
    array = TableArray.create([TableShard("t", 1000)], torch.zeros(1000, columns), setting, columns)
    return check.why_not_trusted(array, pooled=pooled, mean=mean)


@pytest.fixture
def only_steps(monkeypatch):
    """Only the kernels are tried that update rows, not those that add up gradients."""
    every = check.comparisons
    monkeypatch.setattr(
        check,
        "comparisons",
        lambda *given: (one for one in every(*given) if "rows" in one[0] or "_replay" in one[0]),
    )


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("setting", SETTINGS)
def test_right_kernels_are_trusted(setting):
    assert found_by(setting) is None


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("pooled, mean", [(True, True), (False, False)])
def test_of_other_lookups(pooled, mean):
    assert found_by(SETTINGS[0], pooled, mean, columns=20) is None


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_is_named(kernel, make_wrong, request):
    if WRONG[kernel][0] is steps:
        # They are tried last.
        request.getfixturevalue("only_steps")
    make_wrong(kernel)
    said = found_by(SETTINGS[0])
    assert said.startswith(f"on the CPU the Triton kernel {kernel} computes wrong ")


class Raising:
    def __getitem__(self, grid):
        raise NotImplementedError("at 3:7:\n  no such instruction")


@pytest.mark.slow
@pytest.mark.usefixtures("only_steps")
def test_a_kernel_that_raises_is_named(monkeypatch):
    monkeypatch.setattr(steps, "_replay", Raising())
    assert found_by(SETTINGS[0]) == (
        "on the CPU the Triton kernel _replay fails (NotImplementedError: no such instruction)"
    )
    monkeypatch.setattr(check, "_still_works", lambda _device: False)
    with pytest.raises(RuntimeError, match=r"_replay fails .* start again with run.kernels=torch"):
        found_by(SETTINGS[0])


@pytest.mark.slow
@pytest.mark.usefixtures("only_steps")
def test_what_was_right_is_not_tried_again(monkeypatch):
    assert found_by(SETTINGS[1]) is None
    monkeypatch.setattr(steps, "_update_rows", Raising())
    assert found_by(SETTINGS[1]) is None
    for changed in (
        lambda: found_by(SETTINGS[0]),
        lambda: found_by(SETTINGS[1], columns=16),
        lambda: found_by(SETTINGS[1], mean=True),
    ):
        assert "_update_rows fails" in changed()
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert "_update_rows fails" in found_by(SETTINGS[1])


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kernels", ["auto", "torch", "triton"])
def test_plain_torch_takes_the_place_of_a_wrong_kernel(kernels, make_wrong, caplog):
    make_wrong("_update_rows")
    real = check.why_not_trusted
    with computed("queued"), mock.patch.object(check, "why_not_trusted", real):
        tables = two_tables(kernels=kernels)
        for number in range(3):
            one_step(tables.tbe, number)
        found = state_of(tables.tbe)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == (kernels == "auto")
    if kernels == "auto":
        assert warnings[0].startswith("plain PyTorch updates tables and waits for the GPU")
        assert "tables t0, t1: on the CPU the Triton kernel _update_rows computes" in warnings[0]
    # `triton` uses the wrong kernel: nothing else was asked for.
    assert (tables.owner.flag is not None) == (kernels == "triton")
    with computed("torch"):
        right = two_tables()
        for number in range(3):
            one_step(right.tbe, number)
    is_right = [
        torch.allclose(a, b, rtol=1e-4, atol=1e-7)
        for a, b in zip(found, state_of(right.tbe), strict=True)
    ]
    assert all(is_right) == (kernels != "triton")


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels is 'cuda'; write 'auto', 'torch' or 'triton'"):
        two_tables(kernels="cuda")
