"""How often each id was looked up before a step, also where torch's sum of gradients hides it.

The gradient of one lookup in a table has one entry per occurrence of an id. The sum of two need
not: torch merges sparse tensors when it adds them, so that `[3, 5] + [3, 5]` becomes `[3, 5]`,
without being flagged as coalesced (`add_out_sparse_contiguous`, CPU; seen in torch 2.11 and 2.13).
So the ids are noted lookup by lookup and backward pass by backward pass, before anything is added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary


class _Notes:
    """The ids behind the gradient of one table.

    Nothing is noted about the gradient of a single lookup, which tells by itself: holding on to
    its ids would make torch copy it.
    """

    def __init__(self, param: Tensor) -> None:
        self._param = TensorWeakRef(param)
        self._lookups: list[Tensor] = []
        self._pass = -1
        self._ids: Tensor | None = None
        self._noted = False
        self._gradient: Tensor | None = None

    def looked_up(self, grads: tuple[Tensor | None, ...], _: Any) -> None:
        """After a lookup's backward: note its ids."""
        if grads and grads[0] is not None and grads[0].is_sparse:
            if self._pass != torch._C._current_graph_task_id():
                # What a backward pass that failed has left is dropped.
                self._pass, self._lookups = torch._C._current_graph_task_id(), []
            self._lookups.append(grads[0]._indices()[0])

    def before_accumulation(self, grad: Tensor) -> None:
        """The table's gradient of one backward pass is complete; `param.grad` is still the old."""
        in_this_pass = self._pass == torch._C._current_graph_task_id()
        lookups, self._lookups = self._lookups if in_this_pass else [], []
        earlier = self._param().grad
        first = earlier is None or not earlier.is_sparse
        if not grad.is_sparse or (first and len(lookups) < 2):
            self._noted, self._ids, self._gradient = False, None, None
            return
        ids = grad._indices()[0]
        # A lookup without a module (`functional.embedding`) is in the gradient only.
        if lookups and sum(map(len, lookups)) >= len(ids):
            ids = torch.cat(lookups)
        if not first:
            before = self.ids_of(earlier)
            ids = None if before is None else torch.cat([before, ids])
        self._noted, self._ids, self._gradient = True, ids, None

    def after_accumulation(self, param: Tensor) -> None:
        """The gradient is in `param.grad`; the notes belong to it alone."""
        if self._noted and param.grad is not None:
            self._gradient = param.grad._indices()

    def ids_of(self, grad: Tensor) -> Tensor | None:
        """See `ids_behind`."""
        known, indices = self._gradient, grad._indices()
        # Held here, the memory cannot have been given to another gradient.
        if known is None or known.shape != indices.shape or known.data_ptr() != indices.data_ptr():
            return _own_ids(grad)
        return self._ids


_NOTES = WeakTensorKeyDictionary()


def follow(param: Tensor) -> None:
    """Note the lookups in a table from now on, for as long as it lives."""
    if param.requires_grad and param not in _NOTES:
        notes = _Notes(param)
        param.register_hook(notes.before_accumulation)
        param.register_post_accumulate_grad_hook(notes.after_accumulation)
        _NOTES[param] = notes


def watch(module: nn.Module) -> None:
    """Tell the notes of a module's table about each lookup. Copies of the module do so too."""
    if note_lookup not in module._forward_hooks.values():
        module.register_forward_hook(note_lookup)


def note_lookup(module: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of a table's module."""
    notes = _NOTES.get(module.weight)
    node = getattr(output, "grad_fn", None)
    if notes is not None and node is not None:
        node.register_hook(notes.looked_up)


def ids_behind(param: Tensor) -> Tensor | None:
    """The ids looked up for the sparse gradient of a table, one entry per occurrence.

    Returns:
        `[occurrences]` int64, or None where they are lost: the gradient was coalesced.
    """
    notes = _NOTES.get(param)
    return _own_ids(param.grad) if notes is None else notes.ids_of(param.grad)


def _own_ids(grad: Tensor) -> Tensor | None:
    # torch flags a single entry as coalesced, whatever it stands for.
    return None if grad.is_coalesced() and grad._nnz() > 1 else grad._indices()[0]
