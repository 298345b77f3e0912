"""TorchRec with the two changed lines: models, features and refusals.

Models and features run on two gloo processes and are compared with plain PyTorch in float64, or
with the named reference. Numbers are the largest deviation of a weight, relative to the largest
movement. For refused features, the sentence is recorded. Also communication in lower precision:
deviation and bytes that a rank sends.

    python benchmarks/torchrec_features.py torchrec_features
    python benchmarks/torchrec_features.py plan_parity
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from communication import Recorder
from report import Report, command_line, markdown
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import set_ec_index_dedup
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders, grid_shard, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from stampede.optim import CowClipAdam, cowclip_sharders
from support import (
    any_program,
    bags,
    foreign,
    managed_collision,
    processors,
    programs,
    torchrec_models,
)
from support import two_tables as two
from support.gathering import whole_tables
from support.parity import (
    Case,
    Table,
    deviation,
    run_cases,
    state_deviation,
    train_reference,
    train_sharded,
)
from support.parity_cases import PLANS as EVERY_PLAN
from support.parity_cases import SUMS, every_plan, odd_widths
from support.ranks import process_group, run_ranks

RANKS = 2
SMALL = Case(("row_wise", "column_wise"), (Table(40, 8), Table(30, 8)), steps=9)
# Precision of forward and of backward.
PRECISIONS = (
    ("fp32", "fp32"),
    ("fp16", "fp32"),
    ("fp16", "bf16"),
    ("bf16", "bf16"),
    ("fp32", "int8"),
)
PLANS = ("table_wise", "row_wise")
PROCESSES = (2, 4)


def torchrec_features(options: argparse.Namespace, report: Report) -> str:
    """What works, what is refused, and communication in lower precision."""
    warnings.simplefilter("ignore")
    few = 2 if options.quick else None
    models = {name: partial(_model, name) for name in torchrec_models.MODELS}
    for kind, runs in (("models", models), ("works", WORKS)):
        report.add(**{kind: {name: _told(runs[name]) for name in tqdm([*runs][:few], ncols=100)}})
    report.add(refused={name: refusal(name) for name in REFUSED})
    report.add(communication=communication(PROCESSES[:1] if options.quick else PROCESSES))
    return tables(report.found)


def plan_parity(options: argparse.Namespace, report: Report) -> str:
    """Largest deviation of a weight by sharding plan and number of processes.

    The runs are from tests/distributed/test_every_plan.py: 20 steps of CowClip with Adam.
    """
    cases, found = every_plan(), {}
    # Number of processes: processes of a simulated node.
    processes = {1: 1} if options.quick else {1: 1, 2: 2, 4: 2}
    for count, per_node in processes.items():
        results = run_ranks(count, run_cases, cases, ranks_per_node=per_node)[0]
        for case, result in zip(cases, results, strict=True):
            reference = train_reference(case, result["start"])
            found[f"{case.plan} {case.arguments['rows']} {count}"] = {
                "weights": deviation(result["start"], result["weights"], reference),
                "moments": state_deviation(case, result["states"], reference),
                "clipped_share": reference.clipped / reference.touched,
                "largest_count": reference.largest_count,
            }
    report.add(deviations=found)
    rows = [[plan] for plan in EVERY_PLAN]
    for row in rows:
        for count in processes:
            both = (found[f"{row[0]} {moved} {count}"]["weights"] for moved in ("all", "touched"))
            row.append(f"{max(both):.1e}")
    return markdown(["plan", *(f"{count} processes" for count in processes)], rows)


def _told(run: Callable[[], float]) -> float | str:
    """The result of a run, or the last line of its error."""
    try:
        return float(run())
    except Exception as failure:
        return str(failure).strip().splitlines()[-1]


def _model(name: str) -> float:
    return run_ranks(RANKS, torchrec_models.follow_on_ranks, name)[0]


def _of_case(case: Case, program: Callable[..., Any] = run_cases, **reference: Any) -> float:
    (found,) = run_ranks(RANKS, program, [case])[0]
    expected = train_reference(case, found["start"], **reference)
    return deviation(found["start"], found["weights"], expected)


def _managed(pooled: bool) -> float:
    runs = [("waiting", (pooled, 64, "all", False))]
    return run_ranks(RANKS, managed_collision.train_all, runs)[0][0]["deviation"]


def _processors() -> float:
    case = processors.case_of("row_wise", "all")
    ours = run_ranks(RANKS, processors.train_all, [case])[0][0][0]["end"]
    expected = processors.reference(case)["end"]
    return max(
        float((ours[n].double() - e).abs().max() / e.abs().max()) for n, e in expected.items()
    )


def _sample_weights() -> float:
    """Deviation of their gradient from TorchRec's unsharded tables, relative to the largest."""
    leaves: list[torch.Tensor] = []

    def learnable(count: int) -> torch.Tensor:
        leaves.append(torch.ones(count, requires_grad=True))
        return leaves[-1]

    with process_group():
        model = two.Model(weighted=True)
        sharded = _planned(copy.deepcopy(model), "table_wise")
        model.load_state_dict(whole_tables(sharded), strict=False)
        for one in (model, sharded):
            one(two.features(weights=learnable)).square().sum().backward()
    expected, found = (leaf.grad for leaf in leaves)
    return float((found - expected).abs().max() / expected.abs().max())


def _planned(model: nn.Module, kind: str) -> nn.Module:
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=[kind]) for name in "ab"},
    )
    sharders = cowclip_sharders()
    plan = planner.plan(two.with_optimizer(model), sharders)
    return DistributedModelParallel(model, device=two.CPU, plan=plan, sharders=sharders)


def _checkpoint() -> float:
    """Deviation of weights and states after one more step under another plan."""
    tables = (Table(40, 10), Table(30, 8))
    before, after = ([Case(plan, tables)] for plan in ("row_wise", ("table_wise", "data_parallel")))
    with tempfile.TemporaryDirectory() as folder:
        saved, loaded = run_ranks(RANKS, programs.save_and_load, before, folder, after, folder)[0]
    (_, one), (_, other) = saved[0], loaded[0]
    return max(float((one["weights"][n] - other["weights"][n]).abs().max()) for n in one["weights"])


def _loop(kind: str) -> float:
    """Deviation from the plain loop."""
    name, ranks = "TestSparseNN", 1 if kind == "compiled" else RANKS
    found = run_ranks(ranks, programs.train_in_pipelines, [kind], [name])[0][name]
    (tables, dense, _), (others, other_dense, _) = found[None], found[kind]
    pairs = [(tables[n], others[n]) for n in tables] + [(dense[n], other_dense[n]) for n in dense]
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)


def _variable_batch() -> float:
    plan = ("row_wise", "column_wise", "table_wise", "data_parallel")
    program = any_program.Program(plan, SUMS, repeats=True)
    (found,) = run_ranks(RANKS, any_program.run_programs, [program])[0]
    return any_program.deviation_of(program, found, RANKS)


WORKS: dict[str, Callable[[], float]] = {
    "TorchRec's golden DLRM example: planner, `TrainPipelineSparseDist`, `KeyedOptimizerWrapper`": (
        lambda: run_ranks(RANKS, torchrec_models.train_golden, ("fp32", "fp32"))[0][0]
    ),
    "`TrainPipelineSparseDistLite` (beside a plain loop)": partial(
        _loop, "TrainPipelineSparseDistLite"
    ),
    "`TrainPipelinePT2` (beside a plain loop)": partial(_loop, "TrainPipelinePT2"),
    "`torch.compile(model)` (beside a plain loop)": partial(_loop, "compiled"),
    "managed collision (ZCH) with eviction, pooled": partial(_managed, True),
    "managed collision (ZCH) with eviction, sequences": partial(_managed, False),
    "feature processors with position weights": _processors,
    "learnable per-sample weights, `table_wise` on one process: their gradient": _sample_weights,
    "gradient accumulation, `backwards_per_step=4`": lambda: _of_case(
        SMALL, partial(run_cases, passes=4)
    ),
    "`set_gradient_division(False)`": lambda: _of_case(
        SMALL, foreign.run_without_division, gradient_factor=RANKS
    ),
    "tables read, written and evicted, `set_optimizer_step`": lambda: _of_case(
        SMALL,
        partial(run_cases, meanwhile=foreign.Foreign()),
        meanwhile=foreign.foreign_in_reference,
    ),
    "`embedding_dim` 10, 7 and 1": lambda: max(map(_of_case, odd_widths()[-2:])),
    "per-sample weights and mean pooling": lambda: _of_case(
        Case("column_wise", weighted=True, steps=9)
    ),
    "variable batch size per feature, pooled": _variable_batch,
    "`EmbeddingCollection`, split by columns": lambda: _of_case(
        replace(SMALL, plan="column_wise", sequence=True)
    ),
    "`torch.distributed.checkpoint` under another plan (beside going on)": _checkpoint,
}


def refusal(name: str) -> str:
    """The sentence of the refusal."""
    with process_group():
        try:
            REFUSED[name]()
        except (ValueError, IndexError, AttributeError) as failure:
            return str(failure)
    raise AssertionError(f"{name} is not refused")


def _backward_twice(model: nn.Module, step: Callable[[], Any]) -> None:
    model(two.features()).sum().backward()
    step()
    model(two.features()).sum().backward()
    model(two.features()).sum().backward()


def _accumulation() -> None:
    model = two.shard(two.Model())
    _backward_twice(model, two.dense_optimizer(model).step)


def _scaler() -> None:
    model = two.shard(two.Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    dense = two.dense_optimizer(model)
    for _ in range(2):
        scaler.scale(model(two.features()).sum()).backward()
        scaler.step(dense)


def _late_lookup() -> None:
    model = two.shard(two.Model())
    first, second = model(two.features(1)).sum(), model(two.features(2)).sum()
    first.backward()
    second.backward()


def _deduplication() -> None:
    set_ec_index_dedup(True)
    try:
        two.shard(nn.Sequential(EmbeddingCollection(two.tables(kind=EmbeddingConfig))))
    finally:
        set_ec_index_dedup(False)


def _reentrant() -> None:
    model = two.shard(two.Model())
    start = torch.ones(1, requires_grad=True)
    checkpoint(
        lambda factor: (model(two.features()) * factor).sum(), start, use_reentrant=True
    ).backward()


def _two_modules() -> None:
    model = nn.Module()
    model.first, model.second = (EmbeddingBagCollection(two.tables("a")) for _ in range(2))
    model.second.embedding_bags["a"].weight = model.first.embedding_bags["a"].weight
    two.shard(model)


def _single_bag() -> None:
    bag = nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True)
    apply_optimizer_in_backward(CowClipAdam, bag.parameters(), {"lr": 0.1})
    DistributedModelParallel(nn.Sequential(bag), device=two.CPU, sharders=cowclip_sharders())


def _variable_sequences() -> None:
    model = two.shard(nn.Sequential(EmbeddingCollection(two.tables(kind=EmbeddingConfig))))
    model(
        KeyedJaggedTensor(
            keys=["fa", "fb"],
            values=torch.tensor([1, 2, 3]),
            lengths=torch.tensor([1, 1, 1]),
            stride_per_key_per_rank=[[2], [1]],
            inverse_indices=(["fa", "fb"], torch.tensor([[0, 1], [0, 0]])),
        )
    )


def _outside() -> None:
    model = _bags(a=8)
    table = dict(model.named_parameters())["ebc.embedding_bags.a.weight"]
    table.square().sum().backward()


def _no_id() -> None:
    bags.step(_bags(a=8), (1, -1))


def _unannounced_weights() -> None:
    model = _bags(row_wise(), a=8, pooling=PoolingType.MEAN)
    model(KeyedJaggedTensor(["f_a"], torch.tensor([1]), torch.ones(1), torch.tensor([1])))


def _weights_by_rows() -> None:
    learnable = partial(torch.ones, requires_grad=True)
    _planned(two.Model(weighted=True), "row_wise")(two.features(weights=learnable))


def _bags(plan: Any = bags.WHOLE, kernel: str | None = None, **given: Any) -> nn.Module:
    settings = {key: given.pop(key) for key in ("rows",) if key in given}
    model = bags.with_cowclip(bags.Bags(**given), **settings)
    return bags.shard(model, plan, compute_kernel=kernel)


def _int8_rows() -> None:
    registry = get_qcomm_codecs_registry(QCommsConfig(backward_precision=CommType.INT8))
    sharders = cowclip_sharders(qcomm_codecs_registry=registry)
    bags.shard(bags.with_cowclip(bags.Bags(a=8)), row_wise(), sharders)


def _part_of_the_processes() -> None:
    from stampede.optim.sharded.supported import check_environment

    check_environment(ShardingEnv.from_local(world_size=2, rank=0))


REFUSED: dict[str, Callable[[], Any]] = {
    "TorchRec's own sharders": lambda: two.shard(two.Model(), get_default_sharders()),
    "gradient accumulation that is not announced": _accumulation,
    "`GradScaler`": _scaler,
    "semi-synchronous pipelines": _late_lookup,
    "`set_ec_index_dedup(True)`": _deduplication,
    "reentrant activation checkpointing of a lookup": _reentrant,
    "one table in two modules": _two_modules,
    "a single `nn.EmbeddingBag`": _single_bag,
    "variable batch size per feature in an `EmbeddingCollection`": _variable_sequences,
    "a gradient of a table's weights from outside of its lookup": _outside,
    "an id of -1": _no_id,
    "mean pooling by rows of a batch with weights, `is_weighted=False`": _unannounced_weights,
    "learnable per-sample weights where TorchRec loses their gradient": _weights_by_rows,
    "delta tracker with `rows: all`": lambda: ModelDeltaTrackerTrec(_bags(a=8, rows="all")),
    "tables in host memory (`fused_uvm_caching`)": lambda: _bags(a=8, kernel="fused_uvm_caching"),
    "INT8 tables": lambda: _bags(a=8, data_type=DataType.INT8),
    "INT8 communication of rows added up by ranks": _int8_rows,
    "mean pooling under `grid_shard`": lambda: _bags(
        grid_shard(host_indexes=[0]), a=8, pooling=PoolingType.MEAN
    ),
    "2D parallelism, or a part of the processes": _part_of_the_processes,
    "resharding in place": lambda: _bags(a=8).module.ebc.update_shards({}, None, two.CPU),
}


def communication(processes: tuple[int, ...]) -> dict[str, Any]:
    """Deviation and bytes by processes, plan and precisions; see `_train_and_count`."""
    found = {}
    # FBGEMM encodes INT8 in blocks of 32 columns.
    tables = tuple(replace(table, dim=32) for table in SUMS)
    cases = [
        Case(plan, tables, steps=8, communication=precisions, empty_rank=False)
        for plan in PLANS
        for precisions in PRECISIONS
        if (plan, "int8") != ("row_wise", precisions[1])
    ]
    for count in processes:
        ranks = run_ranks(count, _train_and_count, cases)
        for case, *each in zip(cases, *ranks, strict=True):
            start, weights = each[0]["start"], each[0]["weights"]
            reference = train_reference(case, start)
            found[f"{count} {case.plan} {' '.join(case.communication)}"] = {
                "deviation": deviation(start, weights, reference),
                "touched": [each[0]["counts"][0], reference.touched],
                "bytes": [one["bytes"] for one in each],
            }
    return found


def _train_and_count(cases: list[Case]) -> list[dict[str, Any]]:
    """Results on this rank, and the bytes it sent of embeddings and gradients."""
    results = []
    with process_group():
        for case in cases:
            recorder = Recorder()
            with recorder.recording():
                found = train_sharded(case)
            exchanged = ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")
            sent = sum(recorder.sent_bytes.get(name, 0) for name in exchanged)
            results.append({**found, "bytes": sent})
    return results


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    works = {f"model `{name}`": result for name, result in found["models"].items()} | found["works"]
    rows = [[name, f"works, {deviation:.1e}"] for name, deviation in works.items()]
    for name, sentence in found["refused"].items():
        rows.append([name, f"refused: {sentence.replace('<', '&lt;')}"])
    sent = []
    for name, one in found["communication"].items():
        processes, plan, *precisions = name.split()
        exact = found["communication"][f"{processes} {plan} fp32 fp32"]
        share = sum(one["bytes"]) / sum(exact["bytes"])
        sent.append([processes, plan, *precisions, f"{one['deviation']:.1e}", f"{share:.0%}"])
    heads = ["processes", "plan", "forward", "backward", "deviation", "bytes"]
    said = "Communication in lower precision, ids and lengths of bags among the bytes:"
    table = markdown(["of TorchRec", "with the two lines"], rows)
    return f"{table}\n\n{said}\n\n{markdown(heads, sent)}"


if __name__ == "__main__":
    command_line(torchrec_features, plan_parity)
