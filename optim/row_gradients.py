"""Rows, summed gradients and counts of a table in plain PyTorch.

The gradient of one lookup in a table has one entry for each occurrence of an id. The sum of two
need not: torch merges sparse tensors when it adds them, so that `[3, 5] + [3, 5]` becomes `[3, 5]`,
without being flagged as coalesced (`add_out_sparse_contiguous`, CPU; seen in torch 2.11 and 2.13;
pytorch/pytorch#8977 was closed, as the sums are equal). So the ids are noted lookup by lookup and
backward pass by backward pass, before anything is added.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from stampede.optim import native
from stampede.optim.lookup import Lookup
from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.table_array import state_dtype
from stampede.optim.update_settings import UpdateSettings


class _Notes:
    """Notes on the lookups in one table.

    A single lookup needs none: its gradient has the ids, and holding them makes torch copy it.
    """

    def __init__(self, param: Tensor) -> None:
        self.padding_idx: int | None = None
        self._param = TensorWeakRef(param)
        # By backward pass, as one runs within another for a recomputed part: the ids of each
        # lookup, None where they are not seen.
        self._lookups: dict[int, list[Tensor | None]] = {}
        self._has_hooks = bool(param._backward_hooks)
        self._next = _Gradient()
        self._last = _Gradient()

    def looked_up(self, grads: tuple[Tensor | None, ...], _: Any) -> None:
        """After a lookup's backward: note its ids."""
        if grads and grads[0] is not None:
            current = torch._C._current_graph_task_id()
            if current not in self._lookups:
                # Failed backward passes leave some.
                for left in list(self._lookups)[:-_MOST_PASSES]:
                    del self._lookups[left]
            seen = grads[0]._indices()[0] if grads[0].is_sparse else None
            self._lookups.setdefault(current, []).append(seen)

    def before_accumulation(self, grad: Tensor) -> None:
        """Called when the gradient of a backward pass is complete, before it is in `param.grad`.

        That of `torch.autograd.grad` will not be there.
        """
        lookups = self._lookups.pop(torch._C._current_graph_task_id(), [])
        self._next = _Gradient()
        if not grad.is_sparse:
            return
        ids, earlier = self._ids_of_pass(grad, lookups), self._param().grad
        is_merged = len(lookups) > 1 or ids is None
        returned = ids, grad._indices() if is_merged else None
        if earlier is not None and earlier.is_sparse and earlier._nnz():
            before, is_merged = self.ids_of(earlier), True
            ids = None if before is None or ids is None else torch.cat([before, ids])
        self._next = _Gradient(is_merged, ids, grad._nnz(), returned=returned)

    def _ids_of_pass(self, grad: Tensor, lookups: list[Tensor | None]) -> Tensor | None:
        """The ids behind the gradient of a pass; None if they are lost."""
        ids = grad._indices()[0]
        if len(lookups) < 2:
            # A lookup without a module (`functional.embedding`), or by one that came later, may
            # have been added to it. A hook that came before ours may have made another tensor.
            is_alone = not lookups or lookups[0] is None or lookups[0].data_ptr() == ids.data_ptr()
            return ids if is_alone or (self._has_hooks and torch.equal(lookups[0], ids)) else None
        if any(one is None for one in lookups):
            return None
        # A lookup without a module is in the gradient only.
        return torch.cat(lookups) if sum(map(len, lookups)) >= len(ids) else ids

    def after_accumulation(self, param: Tensor) -> None:
        """Called when the gradient is in `param.grad`; the notes belong to it."""
        self._last, self._next = self._next._replace(returned=(None, None)), _Gradient()
        if self._last.is_merged and param.grad is not None:
            self._last = self._last._replace(indices=param.grad._indices())

    def ids_of(self, grad: Tensor) -> Tensor | None:
        """See `ids_behind`."""
        ids, indices = self._next.returned
        if _is_same(indices, grad._indices()):
            return ids
        if _is_same(self._last.indices, grad._indices()):
            return self._last.ids
        # Merged, which its own ids do not tell; torch flags a single one as coalesced in any case.
        is_merged = self._last.is_merged or (grad._nnz() == 1 < self._last.entries)
        return grad._indices()[0][:0] if not grad._nnz() else None if is_merged else _own_ids(grad)


class _Gradient(NamedTuple):
    """What is known of a gradient.

    Attributes:
        is_merged: whether it may be the sum of several.
        ids: behind it; None if they are lost.
        entries: of its last pass.
        indices: its own, if it is merged. While held, no other gradient gets their memory.
        returned: ids and indices of the last pass alone, as `torch.autograd.grad` returns it.
    """

    is_merged: bool = False
    ids: Tensor | None = None
    entries: int = 0
    indices: Tensor | None = None
    returned: tuple[Tensor | None, Tensor | None] = (None, None)


def _is_same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and one.data_ptr() == other.data_ptr()


_NOTES = WeakTensorKeyDictionary()
# Backward passes whose lookups are kept until their gradient is complete.
_MOST_PASSES = 8
# Modules found so far. A search visits every object of the process: a tenth of a second.
_found: WeakSet[nn.Module] = WeakSet()


def follow(params: Iterable[Tensor]) -> None:
    """Note all lookups in tables by their current modules, as long as these live.

    Raises:
        ValueError: a module changes gradients or weights behind the optimizer's back.
    """
    # Tables of TorchRec are on `meta` at first, and their modules are replaced.
    tables = {id(param): param for param in params if not param.is_meta}
    # A parameter does not know its modules, and an optimizer gets parameters only. Torch's hook for
    # registered parameters misses modules that are older than it, copied or unpickled. Its hook
    # for the forward of all modules keeps torch.export(strict=True) from tracing any
    # (pytorch/pytorch#167329).
    known = {id(_weight(module)) for module in _found}
    # Another module may have been tied to a table that another optimizer had.
    if any(param in _NOTES or key not in known for key, param in tables.items()):
        kinds = _with_subclasses(nn.Embedding) | _with_subclasses(nn.EmbeddingBag)
        # type(), since isinstance() is slower and would resolve lazy proxies.
        _found.update(module for module in gc.get_objects() if type(module) in kinds)
    for module in _found:
        # A copy of a module has its hooks.
        if id(_weight(module)) in tables and _note_lookup not in module._forward_hooks.values():
            _check(module)
            module.register_forward_hook(_note_lookup)
    for param in tables.values():
        _notes_of(param)


def _notes_of(param: Tensor) -> _Notes | None:
    """The notes of a table; None as long as it needs no gradient."""
    if param not in _NOTES and param.requires_grad:
        notes = _NOTES[param] = _Notes(param)
        param.register_hook(notes.before_accumulation)
        param.register_post_accumulate_grad_hook(notes.after_accumulation)
    return _NOTES.get(param)


def _weight(module: nn.Module) -> Tensor | None:
    # A module under construction has no parameters yet.
    return vars(module).get("_parameters", {}).get("weight")


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def padding_of(param: Tensor) -> int | None:
    """The `padding_idx` of the modules that a table was looked up by."""
    notes = _NOTES.get(param)
    return None if notes is None else notes.padding_idx


def ids_behind(param: Tensor) -> Tensor | None:
    """The ids looked up for the sparse gradient of a table, one entry per occurrence.

    Returns:
        `[occurrences]` int64, or None if the gradient was coalesced, which loses them.
    """
    notes = _NOTES.get(param)
    return _own_ids(param.grad) if notes is None else notes.ids_of(param.grad)


def _own_ids(grad: Tensor) -> Tensor | None:
    # torch flags a single entry as coalesced in any case.
    return None if grad.is_coalesced() and grad._nnz() > 1 else grad._indices()[0]


def _check(module: nn.Module) -> None:
    if module.scale_grad_by_freq or module.max_norm is not None:
        raise ValueError(
            f"a table of shape {tuple(module.weight.shape)} is looked up by a module with "
            "scale_grad_by_freq, which divides gradients by the counts that the clip multiplies "
            "by, or max_norm, which changes weights outside the optimizer; leave both out"
        )


def _note_lookup(module: nn.Module, _: Any, output: Any) -> None:
    """After the forward of a table's module: note the lookup.

    Raises:
        ValueError: the module changes gradients or weights behind the optimizer's back.
    """
    notes = _notes_of(module.weight)
    if notes is None:
        return
    _check(module)
    if module.padding_idx is not None:
        notes.padding_idx = module.padding_idx
    # A subclass may return others beside it.
    outputs = output if isinstance(output, tuple | list) else [output]
    node = next((one.grad_fn for one in outputs if getattr(one, "grad_fn", None)), None)
    if node is not None:
        node.register_hook(notes.looked_up)


# Names in FBGEMM and TorchRec, and what to write instead.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "beta1": "betas=(beta1, beta2)",
    "beta2": "betas=(beta1, beta2)",
    "epsilon": "eps",
    "max_gradient": "clip",
    "max_norm": "clip",
}


def refuse_unknown(kind: type[torch.optim.Optimizer], unknown: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that an optimizer does not have, naming those it has."""
    for name in unknown:
        taken = list(inspect.signature(kind).parameters)[1:]
        ours = _OTHER_NAMES.get(name, "")
        instead = f"write {ours}" if ours.partition("=")[0] in taken else "leave it out"
        raise TypeError(
            f"{kind.__name__} has no argument {name}; {instead} (it has {', '.join(taken)})"
        )


class TableOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that step tables in plain PyTorch; it follows their lookups."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        follow(self._params())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group."""
        super().add_param_group(param_group)
        follow(self.param_groups[-1]["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; unlike torch, states of fp16 and bf16 tables stay float32."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for param, index in zip(self._params(), saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if name != "step":
                    self.state[param][name] = value.to(param.device, state_dtype(param))

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


def row_gradients(param: Tensor, settings: UpdateSettings, counts: Tensor | None) -> RowGradients:
    """Read `param.grad`, dense or sparse.

    Args:
        param: a table, `[rows, dim]`.
        settings: its settings; without row thresholds a sparse gradient needs no counts, and a
            dense one only under `rows="touched"`, for it does not tell which rows occurred.
        counts: `[rows]` how often each row occurred, or None to take them from the gradient.

    Raises:
        ValueError: the counts are needed and lost, or do not fit the table.
    """
    grad, name = param.grad, f"a parameter of shape {tuple(param.shape)}"
    if counts is not None:
        if counts.shape != param.shape[:1]:
            raise ValueError(
                f"counts of {name} have shape {tuple(counts.shape)}; give one integer per row"
            )
        counts = counts.to(grad.device, torch.int64)
    if grad.layout == torch.strided:
        return _dense(grad, settings, counts, name)
    values = grad._values()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    if native.handles(values):
        lookup = Lookup.of_rows(grad._indices()[0].contiguous(), len(param))
        summed = native.sum_by_row(lookup, values, values.shape[1])
    else:
        summed = sum_by_row(grad._indices()[0], values)
    if counts is not None:
        return summed._replace(counts=counts[summed.rows])
    if not settings.clip.clips:
        return summed
    ids = ids_behind(param)
    if ids is None:
        raise ValueError(
            f"the sparse gradient of {name} is not as backward left it but coalesced, or another "
            "tensor after several lookups, so the counts of its ids are lost; usual causes are "
            "grad.coalesce(), grad.mul_(), DistributedDataParallel and the unscaling of a "
            "GradScaler; avoid these, or give step(counts={parameter: occurrences of each row}), "
            "summed over the ranks"
        )
    if len(ids) == grad._nnz():
        return summed
    found, times = torch.unique(ids, return_counts=True)
    position = torch.searchsorted(found, summed.rows).clamp_max(len(found) - 1)
    return summed._replace(counts=torch.where(found[position] == summed.rows, times[position], 0))


def _dense(
    grad: Tensor, settings: UpdateSettings, counts: Tensor | None, name: str
) -> RowGradients:
    grad = grad.detach()
    if counts is not None:
        # A penalty in the loss reaches rows that did not occur.
        rows = ((counts > 0) | (grad != 0).any(1)).nonzero().flatten()
        return RowGradients(rows, grad[rows], counts[rows])
    if settings.clip.clips or settings.rows == "touched":
        raise ValueError(
            f"the gradient of {name} is dense and does not tell how often each id occurred, which "
            "the clip or rows='touched' needs; build the table with sparse=True (in TorchRec, pass "
            "sharders=cowclip_sharders() to DistributedModelParallel) and keep it out of penalties "
            "in the loss (l2= of the optimizer does the same), or give "
            "step(counts={parameter: occurrences of each row})"
        )
    rows = torch.arange(len(grad), device=grad.device)
    return RowGradients(rows, grad, torch.ones_like(rows))
