"""The commands: `stampede COMMAND ...`; `launch.py` is `train`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stampede.data.exit_status import exit_status as command_status
from stampede.engine.exit_status import exit_status
from stampede.engine.start_up import (
    before_torch,
    importing,
    launched_rank,
    launched_world_size,
    same_products,
)
from stampede.settings import SettingsError

# Slow imports are inside functions.
if TYPE_CHECKING:
    from stampede.engine.config import Config
    from stampede.engine.planning.planner import Cluster

# The module of each command, with `main(arguments)`, and its help.
_COMMANDS = {
    "train": ("stampede.engine.cli", "train a model, or plan it for a cluster (--plan)"),
    "incremental": (
        "stampede.engine.incremental",
        "train on each new file of a log, after scoring it",
    ),
    "synthetic": (
        "stampede.data.synthetic_command",
        "write synthetic clicks as a log in files whose ids drift",
    ),
    "describe": ("stampede.data.describe", "show what is in a click log"),
    "prepare": (
        "stampede.data.prepare_command",
        "turn a click log into arrays, or check the result",
    ),
    "apply": ("stampede.data.apply", "encode new data with learned ids and ranges"),
    "predict": ("stampede.engine.inference.predict_command", "score rows with a trained model"),
    "export": (
        "stampede.engine.inference.export_command",
        "write a model as a folder that scores without stampede",
    ),
    "importance": (
        "stampede.lab.importance",
        "show what a trained model loses without each column",
    ),
    "report": ("stampede.lab.report.command", "write a page with tables and pictures of runs"),
    "sweep": (
        "stampede.lab.sweep",
        "run a grid or a search, write tables and pictures",
    ),
    "tune": ("stampede.lab.tune", "search for better settings in some minutes"),
}

_OVERVIEW = """\
usage: stampede COMMAND ...

Train click-through-rate models with very large batches.

commands (stampede COMMAND --help says more):
{}

From Python: from stampede import train, open_run"""


def stampede(arguments: Sequence[str] | None = None) -> int:
    """Run the command `stampede`; return the exit status of the subcommand."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name, *rest = given or ["--help"]
    if name in ("-h", "--help"):
        commands = [f"  {name:<13}{what}" for name, (_, what) in _COMMANDS.items()]
        print(_OVERVIEW.format("\n".join(commands)))
        return 0
    if name == "--version":
        from stampede import __version__

        print(f"stampede {__version__}")
        return 0
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        near = [f"train {name}"] if name.endswith((".yaml", ".yml")) else near
        meant = f"did you mean {near[0]!r}? " if near else ""
        print(
            f"error: there is no command {name!r}; {meant}write one of {', '.join(_COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    if name == "train":
        return main(rest, "stampede train")
    before_torch()
    if name == "predict":
        # A score is the same in any batch.
        same_products()
    with importing():
        command = importlib.import_module(_COMMANDS[name][0])
    return command.main(rest)


def main(arguments: Sequence[str] | None = None, program: str = "launch.py") -> int:
    """Train or plan; return the exit status: 2 for a user's mistake, 1 for a failed run."""
    before_torch()

    def train() -> None:
        from stampede.engine.config import check_log

        parsed = parse_command_line(sys.argv[1:] if arguments is None else arguments, program)
        if parsed is None:
            return
        config, cluster, plan_out = parsed
        if cluster is None:
            # Other ranks would say the same.
            if launched_world_size() == 1:
                check_log(config)
            if config.train.reproducible:
                same_products()
            with importing():
                from stampede.engine.run import run

            run(config)
        elif launched_rank() == 0:
            with importing():
                from stampede.engine.planning.dry_run import print_dry_run

            print_dry_run(config, cluster, plan_out)

    return exit_status(train)


def parse_command_line(
    arguments: Sequence[str], program: str = "launch.py"
) -> tuple[Config, Cluster | None, Path | None] | None:
    """Parse the arguments of `train`; `program` is its name in the help.

    Returns:
        The configuration, the devices to plan for (None to train), and the file for the plan's
        costs. None if the arguments only ask to print something; it is printed.

    Raises:
        SettingsError: the configuration or an option cannot be used.
    """
    from stampede.engine.config import to_yaml
    from stampede.engine.config.load import load_config

    parser = _parser(program)
    # Every rank parses, one prints.
    with ExitStack() as stack:
        if launched_rank() != 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(silence))
            stack.enter_context(redirect_stderr(silence))
        parsed, unknown = parser.parse_known_args(arguments)
    wrong = [argument for argument in unknown if argument.startswith("-")]
    if wrong:
        parser.error(f"unknown option {wrong[0]}; see --help")
    given = {
        "--world-size": parsed.world_size,
        "--device-memory": parsed.device_memory,
        "--devices-per-node": parsed.devices_per_node,
        "--compute-device": parsed.compute_device,
        "--plan-out": parsed.plan_out,
    }
    useless = [] if parsed.plan else [name for name, value in given.items() if value is not None]
    if useless:
        raise SettingsError(f"{useless[0]} works with --plan only; write --plan too")
    cluster = _cluster(parsed) if parsed.plan else None
    world_size = cluster.world_size if cluster else launched_world_size()
    config = load_config(Path(parsed.config), [*parsed.overrides, *unknown], world_size)
    if parsed.print_config:
        if launched_rank() == 0:
            _show(to_yaml(config))
        return None
    return config, cluster, parsed.plan_out


def _cluster(parsed: argparse.Namespace) -> Cluster:
    """The devices to plan for."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from stampede.engine.planning.planner import Cluster

    world_size, memory = parsed.world_size, parsed.device_memory
    for name, value in (("--world-size", world_size), ("--device-memory", memory)):
        if value is None:
            raise SettingsError(
                f"--plan: {name} is not given; write the devices to plan for, such as --plan "
                "--world-size 128 --device-memory 141GB"
            )
    node = parsed.devices_per_node or min(8, world_size)
    for name, value in (("--world-size", world_size), ("--devices-per-node", node)):
        if value < 1:
            raise SettingsError(f"{name}: found {value}; write a number of at least 1")
    if world_size % node:
        nodes = world_size // node
        raise SettingsError(
            f"--world-size {world_size} is not a multiple of --devices-per-node {node}; write "
            f"{max(1, nodes) * node} or {(nodes + 1) * node} devices, or other --devices-per-node"
        )
    size = 0
    # pydantic would also take numbers without a unit, and bits.
    if memory.lower().endswith("b"):
        with suppress(ValidationError):
            size = TypeAdapter(ByteSize).validate_python(memory)
    if size <= 0:
        raise SettingsError(
            f"--device-memory: found {memory!r}; write a number above 0 and a unit, such as 141GB "
            "(10^9 bytes) or 80GiB (2^30 bytes)"
        )
    return Cluster(world_size, node, parsed.compute_device or "cuda", size)


def _show(text: str) -> None:
    """Print a text, or exit as after SIGPIPE if the reader, such as `head`, has closed the pipe."""
    if status := command_status(lambda: print(text, end="")):
        sys.exit(status)


class _Help(argparse.Action):
    """Prints the short help, or that on a key or a section, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from stampede.engine.config.help import help_on

        # `--help CONFIG.yaml` asks for no key, `--help train.epochs=3` for one.
        topic = "" if str(values or "").endswith(".yaml") else str(values or "").partition("=")[0]
        _show(f"{help_on(topic)}\n" if topic else parser.format_help())
        parser.exit()


def _parser(program: str) -> argparse.ArgumentParser:
    from stampede.engine.config.help import WIDTH, short_help

    called = f"python {program}" if program.endswith(".py") else program
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train a click-through-rate model. Several processes: torchrun\n"
        "--nproc_per_node N launch.py CONFIG.yaml (or -m stampede train CONFIG.yaml).",
        usage=f"{called} CONFIG.yaml [section.key=value ...] [--print-config]\n"
        f"       {called} --plan --world-size N --device-memory SIZE CONFIG.yaml ...\n"
        f"       {called} --help [KEY | SECTION | all]",
        epilog=short_help(),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=26, width=WIDTH
        ),
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        action=_Help,
        metavar="KEY",
        help="this, or what a key is, such as train.epochs, or a section, or all",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a job; see the list below")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="replaces a value of the file",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the whole configuration, defaults filled in, as YAML and exit",
    )
    plan = parser.add_argument_group(
        "dry run",
        "memory and time of a cluster that need not exist; status 1 if it does not fit",
    )
    plan.add_argument("--plan", action="store_true", help="plan the run instead of running it")
    plan.add_argument("--world-size", type=int, metavar="N", help="number of devices; required")
    plan.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="of a device, such as 141GB (10^9 bytes) or 80GiB (2^30 bytes); required",
    )
    plan.add_argument(
        "--devices-per-node", type=int, metavar="N", help="devices of a machine; default 8"
    )
    plan.add_argument(
        "--compute-device",
        choices=["cuda", "cpu"],
        metavar="KIND",
        help="cuda or cpu; default cuda",
    )
    plan.add_argument(
        "--plan-out", type=Path, metavar="FILE.json", help="file for the costs of every rank"
    )
    return parser


if __name__ == "__main__":
    # It trained, before there was `python -m stampede`.
    sys.exit("error: write -m stampede train CONFIG.yaml")
