"""What the dense optimizer is told of each parameter."""

import json

import pytest

from support.checkpoints import small_job
from support.jobs import small_config


def decays(folder, *overrides):
    """Weight decay and L2 of each dense parameter, by name."""
    with small_job(folder, "optim.dense.weight_decay=0.1", *overrides) as (_, job, *_):
        names = {id(parameter): name for name, parameter in job.dense_parameters.items()}
        return {
            names[id(parameter)]: (group["weight_decay"], group["l2"])
            for group in job.dense_optimizer.param_groups
            for parameter in group["params"]
        }


def test_matrices_of_the_network_decay(tmp_path):
    found = decays(tmp_path, "model.normalization=layer", "optim.scaling.rule=none")
    layer, norm = (
        "network.mlp.hidden._mlp.{}._linear",
        "network.mlp.hidden._mlp.{}._activation_fn.0",
    )
    assert found == {
        "bias": (0.0, 0.0),
        # As the first-order weights of ids.
        "number_weights.weight": (0.0, 1e-5),
        "network.mlp.output.weight": (0.1, 0.0),
        **{f"{layer.format(i)}.weight": (0.1, 0.0) for i in (0, 1)},
        **{f"{layer.format(i)}.bias": (0.0, 0.0) for i in (0, 1)},
        **{f"{norm.format(i)}.{name}": (0.0, 0.0) for i in (0, 1) for name in ("weight", "bias")},
    }


@pytest.mark.parametrize(
    "name, options, others",
    [
        ("dcn", {"layers": 2}, {"network.cross.bias.0", "network.cross.bias.1"}),
        ("masknet", {"blocks": 1}, {"network.norm_weight", "network.norm_bias"}),
    ],
)
def test_biases_and_norms_that_are_matrices_do_not(tmp_path, name, options, others):
    found = decays(tmp_path, f"model.name={name}", f"model.options={json.dumps(options)}")
    still = {key for key, (decay, _) in found.items() if not decay}
    assert others <= still
    assert not [key for key in still - {"number_weights.weight"} if "bias" not in key
                and "norm" not in key]  # fmt: skip
    assert "network.output.weight" in found.keys() - still or name == "masknet"
    if name == "dcn":
        assert found["network.cross.kernels.0"] == (0.1, 1e-5)


def test_none_by_default(tmp_path):
    assert small_config(tmp_path).optim.dense.weight_decay == 0
