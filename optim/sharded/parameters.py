"""Tensors that share memory with tables (parameters, views, local shards), always up to date."""

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

# Operations that do not read values. All others bring the rows up to date first.
_SHAPE = frozenset(
    (
        *("__len__", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point"),
        *("ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
        *("register_hook", "requires_grad_", "retain_grad"),
    )
)
_VIEWS = frozenset(("T", "H", "mT", "mH", "data", "imag", "real"))


class _Current:
    """A tensor that shares memory with tables; rows take the steps they owe before any use.

    By PyTorch's protocol for subclasses. TorchRec flushes in `state_dict()` only, and registers the
    parameter of a table once, when it is sharded: `model.parameters()`, or an average of weights
    that was given them, reads it without a call of ours, for modules have no hook on that.
    """

    _flush: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Bring the rows up to date, then call `func`."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_attribute = name == "__get__"
        if name in _SHAPE or (is_attribute and func.__self__.__name__ not in _VIEWS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Current)]
        for tensor in held:
            tensor._flush()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return tree_map_only(Tensor, lambda one: _keep_views_current(one, held), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save an ordinary tensor."""
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
    """Make a view of tables up to date, by `flush`, whenever it is used."""
    current = tensor.as_subclass(CurrentTensor)
    current._flush = flush
    return current


def _keep_views_current(result: Tensor, held: list[Any]) -> Tensor:
    """The result, kept current if it is a view of a held tensor."""
    if type(result) is not Tensor or result.layout is not torch.strided:
        return result
    memory = result.untyped_storage().data_ptr()
    for tensor in held:
        if tensor.untyped_storage().data_ptr() == memory:
            return kept_current(result, tensor._flush)
    return result
