"""Small TorchRec programs as people write them, and the same training in plain float64 PyTorch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from support.gathering import tables_of
from support.parity import DEFAULTS, Case, build_collection, deviation, shard
from support.ranks import process_group
from support.unsharded import Unsharded

SAMPLES = 4  # Of a rank in a backward pass.
DENSE_RATE, DECAY = 0.05, 0.5
BY_ROWS = ("row_wise", "table_row_wise")


@dataclass(frozen=True)
class Program(Case):
    """A training run.

    Attributes:
        shared: the first feature looks up the last table too.
        ids, lengths: dtypes.
        repeats: two or four samples share a bag, by feature; it is in the batch once (VBE).
        passes: backward passes that are announced for a step.
        of_steps: backward passes of each step.
        combined: tables and layers have one `CombinedOptimizer`; otherwise the program steps an
            optimizer of the layers only.
        schedule: of the rates that the program's optimizer (`combined`) or the tables' one has.
        other: another network is trained after each pass.
    """

    shared: bool = False
    ids: torch.dtype = torch.int64
    lengths: torch.dtype = torch.int64
    repeats: bool = False
    passes: int = 1
    of_steps: tuple[int, ...] = (1, 1, 1)
    combined: bool = False
    schedule: bool = False
    other: bool = False

    __hash__ = Case.__hash__

    @property
    def features(self):
        found = super().features
        if self.shared:
            found[self.names[-1]].append("f0_0")
        return found

    @property
    def rows_of(self):
        """Of each feature, the rows of its smallest table."""
        rows = {}
        for table, spec in zip(self.names, self.tables, strict=True):
            for feature in self.features[table]:
                rows[feature] = min(spec.rows, rows.get(feature, spec.rows))
        return rows

    @property
    def is_refused(self):
        """Whether TorchRec would not give one result, so that the manual says it is refused."""
        kinds = [self.sharding_of(table) for table in self.names]
        means = [k for k, spec in zip(kinds, self.tables, strict=True) if spec.mean]
        is_by_rows = all(kind in BY_ROWS for kind in kinds)
        is_shared_sum = self.shared and not (self.tables[0].mean and self.tables[-1].mean)
        return "grid_shard" in means or any(
            kind in BY_ROWS and (self.weighted or not is_by_rows or is_shared_sum) for kind in means
        )

    def sharing(self, feature):
        """How many samples have a bag of a feature together."""
        return (2, SAMPLES)[list(self.rows_of).index(feature) % 2] if self.repeats else 1


class Network(nn.Module):
    """A layer over what is looked up, summed up for sequences."""

    def __init__(self, program, device):
        super().__init__()
        self.tables, self.is_sequence = build_collection(program, device), program.sequence
        uses = [(f, t) for t, features in program.features.items() for f in features]
        features = [feature for feature, _ in uses]
        dims = dict(zip(program.names, (spec.dim for spec in program.tables), strict=True))
        self.outputs = {f"{f}@{t}" if features.count(f) > 1 else f: dims[t] for f, t in uses}
        self.top = nn.Linear(sum(self.outputs.values()), 1)

    def forward(self, features):
        looked_up, found = self.tables(features), []
        for name in self.outputs:
            values = looked_up[name]
            if self.is_sequence:
                lengths = values.lengths().long()
                bags = torch.arange(len(lengths)).repeat_interleave(lengths)
                empty = values.values().new_zeros(len(lengths), values.values().shape[1])
                values = empty.index_add(0, bags, values.values())
            found.append(values.to(self.top.weight.dtype))
        return torch.cat(found, 1), self.top(torch.cat(found, 1)).squeeze(1)


def drawn(program, step, number, rank):
    """One rank's part of a pass: of each feature its bags `(ids, weights)`; targets."""
    draw = torch.Generator().manual_seed(hash((program.seed, step, number, rank)) % (1 << 31))
    batch = {}
    for feature, rows in program.rows_of.items():
        bags = []
        for sample in range(SAMPLES):
            if sample % program.sharing(feature):
                bags.append(bags[-1])
                continue
            size = int(torch.randint(0, 4, (), generator=draw))
            ids = (rows * torch.rand(size, generator=draw) ** 2).long().clamp_max(rows - 1)
            bags.append((ids, torch.rand(size, generator=draw) + 0.5))
        batch[feature] = bags
    return batch, 3 * torch.randn(SAMPLES, generator=draw)


def as_features(program, batches, *, as_sent):
    """The samples of some ranks, as the program sends them or one bag for each in plain form."""
    bags = {f: [bag for batch in batches for bag in batch[f]] for f in program.rows_of}
    more = {}
    if as_sent and program.repeats:
        kept = {f: of[:: program.sharing(f)] for f, of in bags.items()}
        # TorchRec does not ask for the order of the keys.
        names = list(reversed(bags))
        inverse = torch.stack([torch.arange(SAMPLES) // program.sharing(f) for f in names])
        sizes = [[len(of)] for of in kept.values()]
        more = {"stride_per_key_per_rank": sizes, "inverse_indices": (names, inverse)}
        bags = kept
    every = [bag for of_feature in bags.values() for bag in of_feature]
    ids, weights = (torch.cat(parts) for parts in zip(*every, strict=True))
    lengths = torch.tensor([len(of_bag) for of_bag, _ in every])
    if as_sent:
        ids, lengths = ids.to(program.ids), lengths.to(program.lengths)
    weights = weights if program.weighted else None
    return KeyedJaggedTensor(list(bags), ids, weights, lengths=lengths, **more)


def loss_of(program, model, batches, targets, *, as_sent):
    """Of one backward pass: the mean over its samples."""
    embedded, logits = model(as_features(program, batches, as_sent=as_sent))
    quadratic = 0.5 * embedded.square().sum(1)
    return (logits * targets.to(logits.dtype) + quadratic).mean() / program.passes


def run_programs(programs):
    """By program: the refusal, or the tables before and after (on rank 0)."""
    with process_group():
        return [_run(program) for program in programs]


def _run(program):
    try:
        model = _sharded(program)
    except ValueError as refusal:
        return str(refusal)
    start = tables_of(model)
    others = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(others, lambda layers: torch.optim.SGD(layers, lr=DENSE_RATE))
    together = CombinedOptimizer([model.fused_optimizer, dense])
    optimizer = together if program.combined else dense
    schedule = None
    if program.schedule:
        scheduled = together if program.combined else model.fused_optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(scheduled, DECAY)
    critic = nn.Linear(2, 1)
    of_critic = torch.optim.Adam(critic.parameters())
    for step, passes in enumerate(program.of_steps):
        optimizer.zero_grad()
        for number in range(passes):
            batch, targets = drawn(program, step, number, dist.get_rank())
            try:
                loss_of(program, model, [batch], targets, as_sent=True).backward()
            except ValueError as refusal:
                return str(refusal)
            if program.other:
                of_critic.zero_grad()
                critic(torch.ones(1, 2)).sum().backward()
                of_critic.step()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return start, tables_of(model)


def _sharded(program) -> DistributedModelParallel:
    torch.manual_seed(program.seed)
    return shard(Network(program, "meta"), program, backwards_per_step=program.passes)


def deviation_of(program, found, ranks, **wrong):
    """Of a result from float64, see `deviation`; `wrong` is another rule, for negative tests."""
    start, weights = found
    settings = {**DEFAULTS, **program.arguments, "rule": program.rule}
    if not program.rule.endswith("adam"):
        settings.setdefault("eps", 1e-8)
    torch.manual_seed(program.seed)
    plain = Unsharded(Network(program, "cpu"), DENSE_RATE, **{**settings, **wrong})
    # Building the tables has drawn numbers.
    torch.manual_seed(program.seed)
    layer = Network(program, "meta").top
    with torch.no_grad():
        plain.model.top.weight.copy_(layer.weight)
        plain.model.top.bias.copy_(layer.bias)
    paths = {name: path for path, (_, name) in plain.parts.items()}
    plain.copy_tables({path: start[name] for name, path in paths.items()})
    rate = settings["lr"]
    for step, passes in enumerate(program.of_steps):
        factor = DECAY**step if program.schedule else 1.0
        plain.reference.settings["lr"] = rate * factor
        plain.dense.param_groups[0]["lr"] = DENSE_RATE * (factor if program.combined else 1.0)

        def whole(model, step=step, passes=passes):
            total = 0.0
            for number in range(passes):
                parts = [drawn(program, step, number, rank) for rank in range(ranks)]
                batches, targets = zip(*parts, strict=True)
                total += loss_of(program, model, batches, torch.cat(targets), as_sent=False)
            return total

        plain.step(whole)
    plain.reference.weights = {name: plain.weights[path] for name, path in paths.items()}
    return deviation(start, weights, plain.reference)
