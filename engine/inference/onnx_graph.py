"""Builds an ONNX graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from stampede.engine.errors import RunFolderError

# Supported by onnxruntime since 1.14.
OPSET, LABEL_ENCODERS_OPSET, IR_VERSION = 18, 2, 8
LABEL_ENCODERS_DOMAIN = "ai.onnx.ml"

# The limit of a protobuf message, less room for nodes and names.
MOST_BYTES = 2**31 - 2**24


class Graph:
    """Nodes and constants; a value is referred to by its name.

    Attributes:
        model: the ONNX model that holds the graph.
    """

    def __init__(self) -> None:
        self.model = onnx.ModelProto(
            ir_version=IR_VERSION,
            opset_import=[
                helper.make_opsetid("", OPSET),
                helper.make_opsetid(LABEL_ENCODERS_DOMAIN, LABEL_ENCODERS_OPSET),
            ],
        )
        self._names: set[str] = set()
        self._constants: dict[Any, str] = {}
        self._bytes = 0

    def name(self, wanted: str) -> str:
        """An unused name."""
        while wanted in self._names:
            wanted += "_"
        self._names.add(wanted)
        return wanted

    def take(self, size: int) -> None:
        """Count bytes of the file.

        Raises:
            RunFolderError: the file would be too large.
        """
        self._bytes += size
        if self._bytes > MOST_BYTES:
            raise RunFolderError(
                f"the tables and vocabularies have more than {MOST_BYTES:,} bytes, the limit of "
                "an ONNX file; write --rows fp16 or int8, or leave out --format onnx"
            )

    def constant(self, values: Any, kind: type[np.generic] | None = None) -> str:
        """A constant tensor; small equal ones are shared.

        Args:
            values: numbers, or a numpy array.
            kind: its numpy type.
        """
        array = np.asarray(values, dtype=kind)
        data = array.tobytes()
        key = (array.dtype, array.shape, data)
        if len(data) < 100 and key in self._constants:
            return self._constants[key]
        self.take(len(data))
        name = self.name(f"constant_{len(self.model.graph.initializer)}")
        self.model.graph.initializer.add(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            raw_data=data,
        )
        if len(data) < 100:
            self._constants[key] = name
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result; return the result's name."""
        return self.add_several(kind, 1, *inputs, **attributes)[0]

    def add_several(self, kind: str, results: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several results; return their names."""
        names = [self.name(f"{kind}_{len(self.model.graph.node)}") for _ in range(results)]
        self.model.graph.node.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def cast(self, value: str, kind: type[np.generic]) -> str:
        """A value cast to a numpy type."""
        to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        return self.add("Cast", value, to=to)
