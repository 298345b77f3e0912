"""The section `model`: one for each network, told apart by `name`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Field, create_model

from stampede.models import Network, NoOptions, Normalization, network, network_names
from stampede.settings import Section

DEFAULT_NETWORK = "deepfm"

InitialBias = Literal["log_odds", "zero"]


class _ModelSection(Section):
    name: str = Field(DEFAULT_NETWORK, description="network")
    dim: int = Field(10, ge=1, le=1024, description="width of the embeddings")
    hidden: list[Annotated[int, Field(ge=1)]] = Field(
        [400, 400, 400],
        min_length=1,
        description="widths of the MLP's hidden layers; not of lr, fm",
    )
    init_std: float = Field(
        1e-2, ge=0, description="standard deviation of the embeddings' initial values"
    )
    first_order_scale: float | None = Field(
        None,
        gt=0,
        description="what the first-order term, a weight per id and number, is multiplied by; with "
        "Adam these weights then learn that many times as fast as embeddings, and their L2 is "
        "l2 / first_order_scale^2; null: by the recipe",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the outputs of each hidden layer of the MLP that is left out in "
        "training; 0: none; null: by the recipe",
    )
    normalization: Normalization = Field(
        "none",
        description="layer: layer norm before the ReLU of each hidden layer of the MLP; with it or "
        "with dropout, plain torch computes these layers, slower on a CPU",
    )
    initial_bias: InitialBias = Field(
        "log_odds",
        description="bias that a new run begins with: the log odds of a click in the training "
        "part, with the first-order weights of numbers at 0; or zero, with these drawn at random, "
        "as in the authors' code",
    )
    options: Section = NoOptions()

    @property
    def import_file(self) -> str:
        """The key `import`, which is no name in Python."""
        return getattr(self, "import")


ModelSection: Any = create_model(
    "ModelSection",
    __base__=_ModelSection,
    __doc__="The network.",
    **{
        "import": (
            str,
            Field(
                "",
                description="Python file with networks of your own, which is executed; relative to "
                "the working folder or else to this file",
            ),
        )
    },
)


def registered_networks() -> tuple[Network, ...]:
    """All networks, the default first."""
    names = [DEFAULT_NETWORK, *(name for name in network_names() if name != DEFAULT_NETWORK)]
    return tuple(network(name) for name in names)


def section_of(networks: Sequence[Network]) -> Any:
    """The section with the options of each of the networks."""
    described = _ModelSection.model_fields["name"].description
    sections = [
        create_model(
            f"ModelSection_{found.name}",
            __base__=ModelSection,
            name=(Literal[found.name], Field(found.name, description=described)),
            options=(found.options, found.options()),
        )
        for found in networks
    ]
    return Annotated[Union[tuple(sections)], Field(discriminator="name")]  # noqa: UP007
