"""The section `model`, a kind for each network, and users' own networks."""

from __future__ import annotations

import hashlib
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from stampede.files import read_file
from stampede.models import (
    Network,
    NoOptions,
    Normalization,
    network,
    network_names,
)
from stampede.models.options import AttentionOptions
from stampede.optim.registry import CLIPS, RULES
from stampede.settings import Section, SettingsError

DEFAULT_NETWORK = "deepfm"


class Vectors(Section):
    """Vectors of a field's ids."""

    path: str = Field("", description="of a field: its file")
    train: bool = Field(True, description="of a field: whether training goes on with the vectors")

    @model_validator(mode="after")
    def _has_a_path(self) -> Vectors:
        if not self.path:
            raise ValueError("found no path; write {path: FILE, train: false}")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, written: SerializerFunctionWrapHandler) -> Any:
        return self.path if self.train else written(self)


def _vectors(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class _ModelSection(Section):
    name: str = Field(DEFAULT_NETWORK, description="network")
    dim: int = Field(10, ge=1, le=1024, description="width of the embeddings")
    dims: dict[str, Annotated[int, Field(ge=1, le=1024)]] = Field(
        {},
        description="by id field, the width of its embeddings, if it is another one; a linear "
        "layer without bias maps them to the width dim",
    )
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
        description="factor of the first-order term, a weight per id and number; with Adam these "
        "weights learn that many times as fast as embeddings, and their L2 is "
        "l2 / first_order_scale^2; null: by the recipe",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the outputs of each hidden layer of the MLP that training leaves "
        "out; 0: none; null: by the recipe",
    )
    normalization: Normalization = Field(
        "none",
        description="layer, batch: layer norm or batch norm before the ReLU of each hidden layer "
        "of the MLP, batch norm with the statistics of the global batch; plain torch then computes "
        "these layers, which is slower on a CPU",
    )
    initial_bias: Literal["log_odds", "zero"] = Field(
        "log_odds",
        description="initial bias of a new run. log_odds: the log odds of a click in the "
        "training part, with the first-order weights of numbers at 0; zero: 0, with these "
        "weights random, as in the authors' code",
    )
    pretrained: dict[str, Annotated[Vectors, BeforeValidator(_vectors)]] = Field(
        {},
        description="by id field, a Parquet file of ids and vectors of the width of its "
        "embeddings, with which these begin in a new run; {path: FILE, train: false} freezes the "
        "field's table",
    )
    attention: AttentionOptions = Field(
        AttentionOptions(), description="the unit of fields with pooling: attention"
    )
    options: Section = NoOptions()

    @property
    def frozen(self) -> set[str]:
        """Fields whose tables training leaves as they are."""
        return {field for field, vectors in self.pretrained.items() if not vectors.train}

    @property
    def import_file(self) -> str:
        """The key `import`, which Python does not allow as a name."""
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
                description="Python file with your own networks, update rules and clips, which is "
                "executed; relative to the working folder or else to this file",
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


# Names of the modules that files were executed as, by path and by hash.
_MODULES: dict[str, str] = {}

# The content that was executed last, by path.
_SOURCES: dict[str, bytes] = {}


def execute_network_file(model: Any, config_path: Path) -> None:
    """Execute the file in `model.import`, if any: its networks, rules and clips are known then.

    The key becomes the absolute path, so that the written configuration finds the file again.

    Raises:
        SettingsError: there is no such file, it fails, or it lacks the network `model.name`.
    """
    given = model.get("import") if isinstance(model, dict) else None
    # Values other than text are refused later, with all keys.
    if not given or not isinstance(given, str):
        return
    places = [Path(given), config_path.parent / given]
    path = next((place.resolve() for place in places if place.is_file()), None)
    if path is None:
        looked = " and ".join(dict.fromkeys(str(place.absolute()) for place in places))
        raise SettingsError(
            f"model.import: found {given!r}, and there is no file {looked}; write the path of a "
            "Python file, relative to the working folder or to the configuration"
        )
    model["import"] = str(path)
    before, of_tables = {name: network(name) for name in network_names()}, {**RULES, **CLIPS}
    _execute(path)
    new = [name for name in network_names() if before.get(name) != network(name)]
    if not new and of_tables != {**RULES, **CLIPS}:
        return
    asked = model.get("name")
    if asked is None:
        raise SettingsError(
            f"model.import: {path} is given without model.name; write model.name: "
            f"{' or '.join(new) or 'NAME'}"
        )
    if not new and asked not in network_names():
        raise SettingsError(
            f"model.import: {path} registers no network; write @register({str(asked)!r}), from "
            "stampede.models, before the class of the network"
        )


def executed_source(path: str) -> bytes:
    """The content of the file in `model.import` when it was executed; it may have changed since."""
    return _SOURCES[path]


def _execute(path: Path) -> None:
    source = _SOURCES[str(path)] = read_file(path)
    # The name cannot be imported, so it hides no other module. A file that changed or moved stays
    # the same module, which may register its networks again.
    keys = (str(path), hashlib.sha256(source).hexdigest())
    known = [_MODULES[key] for key in keys if key in _MODULES]
    name = known[0] if known else f"model.import:{path}"
    _MODULES.update(dict.fromkeys(keys, name))
    module = types.ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and pickle look up modules here.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as failure:
        frames = traceback.extract_tb(failure.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(failure, SyntaxError):
            lines = [failure.lineno]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise SettingsError(
            f"model.import: {where}: {type(failure).__name__}: {failure}; correct the file"
        ) from failure
    finally:
        sys.path.remove(str(path.parent))
