"""Settings out of range."""

import pytest

from stampede.optim import (
    CowClipAdam,
    CowClipRowWiseAdam,
    CowClipSGD,
)
from support.one_table import CLASSES, EVERY_CLASS, table


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lr": -1}, "lr is -1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"l2": float("inf")}, "l2"),
        ({"l2": float("nan")}, "l2 is nan"),
        ({"l2": -1e-5}, "l2"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"rows": "some"}, "'all' or 'touched'"),
        ({"on_nonfinite": "warn"}, "'error' or 'skip_row'"),
        ({"clip": 1.0}, "clip is 1.0"),
        ({"seed": -1}, "seed"),
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
            for betas in ((0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9), (0.9,))
        ),
        *(
            (each, {"eps": eps})
            for each in CLASSES.values()
            if each is not CowClipSGD
            for eps in (-1e-8, 0.0, float("nan"))
        ),
        (CowClipAdam, {"eps_placement": "tf"}),
        *((CowClipSGD, {"momentum": m}) for m in (-0.1, 1.0, float("nan"))),
    ],
)
def test_settings_of_the_rule_out_of_range_are_refused(optimizer_class, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"{optimizer_class.__name__}: {name} is"):
        optimizer_class(table().parameters(), **arguments)
