"""The memory of tables as other programs hold it: as parameters, views and local shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchrec.distributed.composable.table_batched_embedding_slice import (
    TableBatchedEmbeddingSlice,
)

# What tells nothing about the values. Everything else brings the rows up to date first.
_SHAPE = frozenset(
    (
        *("__len__", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point"),
        *("ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
        *("register_hook", "requires_grad_", "retain_grad"),
    )
)
_VIEWS = frozenset(("T", "H", "mT", "mH", "data", "imag", "real"))


class _Current:
    """Mixed into tensors that share their memory with tables.

    Rows that no batch holds may wait for their steps. Whoever reads such a tensor, writes to it or
    makes a view of it finds all steps taken, also long after it was handed out.
    """

    _flush: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what `func` does, on rows that are up to date."""
        kwargs = kwargs or {}
        if _is_about_shape(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Current)]
        for tensor in held:
            tensor._flush()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return tree_map_only(Tensor, lambda one: _held_too(one, held), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A saved one is an ordinary tensor."""
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


class CurrentTensor(_Current, Tensor):
    """A view of tables."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)


class CurrentParameter(_Current, TableBatchedEmbeddingSlice):
    """A table as a parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self._flush()
        return super().__deepcopy__(memo)


def kept_current(tensor: Tensor, flush: Callable[[], None]) -> Tensor:
    """A tensor that shares its memory with tables, up to date whenever it is used.

    Args:
        flush: brings the tables up to date.
    """
    if isinstance(tensor, TableBatchedEmbeddingSlice):
        tensor.__class__ = CurrentParameter
    else:
        tensor = tensor.as_subclass(CurrentTensor)
    tensor._flush = flush
    return tensor


def _is_about_shape(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ not in _VIEWS
    return name in _SHAPE


def _held_too(result: Tensor, held: list[Any]) -> Tensor:
    """A result, which may be a view of a tensor of ours."""
    if type(result) is not Tensor or result.layout is not torch.strided:
        return result
    memory = result.untyped_storage().data_ptr()
    for tensor in held:
        if tensor.untyped_storage().data_ptr() == memory:
            return kept_current(result, tensor._flush)
    return result
