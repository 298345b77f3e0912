"""The section `model`: one for each network, told apart by `name`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Field, create_model

from stampede.models import Network, NoOptions, network, network_names
from stampede.settings import Section

DEFAULT_NETWORK = "deepfm"


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
