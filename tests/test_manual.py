"""What the README and the manual show works."""

import importlib
import importlib.util
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from stampede.engine.cli import _COMMANDS, parse_command_line
from stampede.engine.cli import _parser as launch_parser
from stampede.engine.config import config_type
from stampede.lab.sweep import load_sweep
from stampede.models import network, network_names
from stampede.models.registry import _NETWORKS
from stampede.optim import CowClip, local_cowclip_tables
from stampede.settings import all_keys, parse_yaml
from support.paths import ROOT
from support.waiting import HANG

PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
# Blocks that stand on several pages run once.
PYTHON_BLOCKS = {
    block: f"{name}:{at}"
    for name, text in reversed(PAGES.items())
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.S))
}


def script(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=PYTHON_BLOCKS.values())
def test_python_blocks_run(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # A network that is registered here is gone afterwards.
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
    small = block.replace("40_000", "2_000").replace('"test_rows": 4_000', '"test_rows": 1_000')
    small = small.replace("[16, 16]}", '[16, 16]}, train={"epochs": 1}')
    exec(compile(small, PYTHON_BLOCKS[block], "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_the_loop_of_torchrec_goes_on_from_its_checkpoint(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in PYTHON_BLOCKS if "dcp.load" in block)
    names = {"__name__": "__main__"}
    exec(block.replace("dist.destroy_process_group()", ""), names)
    try:
        names["train"](*names["run"], range(3, 6))
        (expected, optimizer, _), found = names["run"], names["model"]
        for one, other in zip(expected.parameters(), found.parameters(), strict=True):
            assert torch.equal(one.detach(), other.detach())
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-2, 1e-3])
        (tables,) = local_cowclip_tables(found)
        assert int(tables.step_count) == 6
        assert tables.get_learning_rate() == pytest.approx(1e-2)
    finally:
        names["dist"].destroy_process_group()


@pytest.mark.parametrize("page", PAGES)
def test_excerpts_are_lines_of_the_file_they_name(page):
    for name, lines in re.findall(r"```py\n# (\S+)\n(.*?)```", PAGES[page], flags=re.S):
        assert lines in (ROOT / name).read_text(encoding="utf-8"), name


def commands_of(page):
    """The words of each command on a page, in blocks and in the text, and where it is from."""
    blocks = re.findall(r"^```\n(.*?)^```$", PAGES[page], flags=re.S | re.M)
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.S | re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *re.findall(r"`([^`]+)`", prose)]:
        if re.match(r"(stampede|python|torchrun|make|pip|pytest) \S", line):
            yield shlex.split(line, comments=True), line in lines


def parser_of(command):
    """Of `stampede COMMAND`."""
    if command == "train":
        return launch_parser("stampede train")
    return importlib.import_module(_COMMANDS[command][0])._parser()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_understood(page, monkeypatch):
    """Those in blocks as a whole, of those in the text their options: they may lack a file."""
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words, is_whole in commands_of(page):
        program, *rest = words
        monkeypatch.setenv("WORLD_SIZE", "1")
        if program == "torchrun":
            given = get_args_parser().parse_args(rest)
            monkeypatch.setenv("WORLD_SIZE", given.nproc_per_node)
            rest = ["-m"] * given.module + [given.training_script, *given.training_script_args]
        options = {word.partition("=")[0] for word in rest if word.startswith("--")}
        if program == "make":
            assert re.search(rf"^{rest[0]}:", makefile, flags=re.M), words
        elif program in ("pip", "pytest") or rest == ["--help"]:
            continue
        elif program == "stampede" and is_whole and rest[0] != "train":
            assert parser_of(rest[0]).parse_intermixed_args(rest[1:]), words
        elif program == "stampede":
            assert options <= set(parser_of(rest[0])._option_string_actions), words
        elif rest[0] == "launch.py" and is_whole:
            assert parse_command_line(rest[1:]), words
        elif rest[0] == "launch.py":
            assert options <= set(launch_parser("launch.py")._option_string_actions), words
        elif rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), words
        elif not is_whole and rest[0] not in ("data_utils.py", "run_expid.py"):
            # Those are other projects' own.
            assert Path(rest[0]).exists(), words


@pytest.mark.parametrize("page", PAGES)
def test_keys_that_are_named_exist(page):
    keys = {key.path for key in all_keys(config_type())}
    sections = sorted({key.partition(".")[0] for key in keys if "." in key})
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)(?:[=:][^`]*)?`", PAGES[page])
    not_keys = {"model.columns", "model.goals", "model.score_rows", "model.fused_optimizer"}
    for name in set(named) - not_keys:
        assert name in keys or any(key.startswith(f"{name}.") for key in keys), name


def test_the_table_of_networks_holds_all_with_their_options():
    rows = re.findall(r"^\| (`[^|]*) \| \[[^|]* \| ?([^|]*)\|$", PAGES["networks.md"], flags=re.M)
    shown = {
        name: dict(re.findall(r"`(\w+): ([^`]*)`", options))
        for names, options in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    ours = {
        name: network(name)
        for name in network_names()
        if network(name).module.__module__.startswith("stampede.")
    }
    assert shown.keys() == ours.keys()
    for name, found in ours.items():
        defaults = {key: parse_yaml(text, "networks.md") for key, text in shown[name].items()}
        assert found.options(**defaults) == found.options()
        assert defaults.keys() == found.options.model_fields.keys()


@pytest.mark.parametrize("page", PAGES)
def test_files_and_pages_that_are_named_exist(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", PAGES[page]):
        assert (folder / link).exists(), link
    for name in re.findall(r"`([\w./-]+\.(?:yaml|png|json|py|md))`", PAGES[page]):
        if not name.startswith(("runs/", "cache/")) and "/" in name:
            assert (ROOT / name).exists(), name
    # In commands, too.
    for name in re.findall(r"(?<![\w-])(?:tests|examples)/[\w/.]*\w", PAGES[page]):
        assert (ROOT / name).exists(), name


def test_the_functions_on_the_way_of_a_batch_exist():
    rows = re.findall(r"^\| `([\w/.]+)` \| (.*) \|$", PAGES["how-it-works.md"], flags=re.M)
    assert 8 <= len(rows) <= 12
    for file, text in rows:
        for name in re.findall(r"`([\w.]+)`", text):
            if file.endswith(".py"):
                module = importlib.import_module(f"stampede.{file[:-3].replace('/', '.')}")
                assert attrgetter(name)(module).__module__ == module.__name__, name
            else:
                assert f" {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_the_threshold_it_shows_is_computed():
    (formula,) = re.findall(r"t = (.*)\n", PAGES["how-it-works.md"])
    ratio, bound, columns = 0.7, 0.02, 9
    clip = CowClip(ratio=ratio, bound=bound)
    for norm, count in ((0.5, 3), (0.5, 0), (1e-3, 2), (0.0, 0)):
        names = {"r": ratio, "zeta": bound, "D": columns, "w": norm, "c": count}
        expected = eval(formula.replace("|w|", "w"), {"sqrt": math.sqrt, "max": max}, names)
        found = clip.largest_norm(torch.tensor([norm]), torch.tensor([count]), columns)
        assert found.item() == pytest.approx(expected)


def test_the_sweep_it_shows_can_be_loaded(tmp_path):
    (block,) = re.findall(r"```yaml\n(config: .*?)```", PAGES["experiments.md"], flags=re.S)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "criteo_kaggle.yaml").symlink_to(ROOT / "configs/criteo_kaggle.yaml")
    (tmp_path / "sweeps/mine.yaml").write_text(block)
    sweep = load_sweep(tmp_path / "sweeps/mine.yaml")
    points = sweep.points()
    assert len(points) == 4 and sweep.seeds == [1, 2]
    assert points[0].overrides["train.batch_size"] == 1024


def test_the_picture_is_that_of_its_script():
    assert script("picture").picture() == (ROOT / "docs/images/batch.svg").read_text("utf-8")


def test_every_page_and_table_of_a_sweep_is_linked():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = sorted(PAGES.keys() - {"README.md"})
    assert sorted(re.findall(r"[\w-]+\.md", str(site["nav"]))) == pages
    assert "](docs/index.md)" in PAGES["README.md"]
    assert [page for page in pages if f"]({page})" not in PAGES["index.md"]] == ["index.md"]
    for path in (ROOT / "benchmarks/results/sweeps").glob("*.md"):
        link = f"](../benchmarks/results/sweeps/{path.name})"
        assert link in PAGES["experiments.md"], f"{path.name}: link it from docs/experiments.md"


def test_the_page_of_all_keys_is_that_of_the_code():
    page = PAGES["configuration.md"]
    # In a process of its own, where no other test has registered a rule.
    program = "import hooks; print(hooks.configuration_page(), end='')"
    made = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    assert page == made.stdout, "write it anew: python docs/hooks.py"
    for key in all_keys(config_type()):
        assert f"\n| `{key.path.rpartition('.')[2]}` |" in page, key.path
    assert "| `epochs` | whole number >= 1 or `null` | `null` |" in page


@pytest.mark.parametrize(
    "text, found",
    [
        ('<script src="https://x.y/z.js">', True),
        ("<link rel=stylesheet href='//x.y/z.css'>", True),
        ("<style>body{background:url(//x.y/z.png)}</style>", True),
        ('<a title="x" href="https://x.y">', False),
        ('<script src="assets/x.js">', False),
    ],
)
def test_what_a_page_of_the_site_loads_from_elsewhere_is_seen(text, found):
    assert bool(script("hooks").loaded_from_elsewhere(text)) == found


@pytest.mark.parametrize(
    "package", ["stampede", "stampede.optim", "stampede.data", "stampede.models"]
)
def test_the_api_reference_has_every_public_name(package):
    page = PAGES["api.md"]
    listed = dict(
        reversed(name.rsplit(".", 1)) for name in re.findall(r"^::: ([\w.]+)", page, flags=re.M)
    )
    for names in re.findall(r"members: \[(.*)\]", page):
        listed |= dict.fromkeys(names.split(", "), "stampede.optim.optimizers")
    module = importlib.import_module(package)
    for name in module.__all__:
        home = importlib.import_module(listed[name])
        assert getattr(home, name) is getattr(module, name), name


def test_a_page_that_was_opened_as_a_file_can_be_searched(tmp_path):
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    # The plugin takes a script from elsewhere unless it finds one of this name.
    (stand_in,) = site["extra"]["polyfills"]
    node = shutil.which("node")
    material = importlib.util.find_spec("material")
    if node is None or material is None:
        pytest.skip("node and mkdocs-material are needed")
    templates = Path(material.origin).parent / "templates"
    (worker,) = templates.glob("assets/javascripts/workers/search.*.min.js")
    page = {"title": "Sharding", "text": "a table that is resharded"}
    index = {
        "config": {"lang": ["en"], "separator": "[\\s]+", "pipeline": ["stopWordFilter"],
                   "fields": {"title": {"boost": 10.0}, "text": {"boost": 1.0}}},
        "docs": [{"location": "a.html", **page}, {"location": "b.html", "title": "B", "text": ""}],
        "options": {"suggest": False},
    }  # fmt: skip
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    files = [ROOT / "docs" / stand_in, worker, tmp_path / "index.json"]
    program = ROOT / "tests/support/search_from_file.js"
    done = subprocess.run(
        [node, program, *files, "resharded"], capture_output=True, text=True, timeout=HANG
    )
    assert done.stdout == '["a.html"]\n', done.stderr
