"""The commands of the README and the manual run, block by block, on small data of the same form.

What a page shows of their output is compared with what they print, numbers aside.
"""

import gzip
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_manual import PAGES

from stampede.engine.cli import main, stampede
from support.forked import run_program
from support.movie_runs import train_on_movies
from support.movies import MOVIES
from support.object_store import BUCKET, object_store
from support.paths import ROOT
from support.waiting import HANG
from support.warm_starts import begun, movie_folder

# What a reader has done before, by page.
BEFORE = {
    # `make train`.
    "README.md": ["python launch.py configs/quickstart.yaml"],
    "index.md": ["python launch.py configs/quickstart.yaml"],
    "checkpoints.md": [
        "python launch.py configs/table.yaml data.path=clicks.csv data.schema_file=schema.yaml "
        "run.name=october"
    ],
    "experiments.md": [
        "python launch.py configs/quickstart.yaml",
        "python launch.py configs/quickstart.yaml run.name=criteo-1024",
        "python launch.py configs/quickstart.yaml run.name=criteo-8192",
    ],
    "histories-and-goals.md": ["python launch.py configs/histories.yaml"],
    "predict-export.md": ["python launch.py configs/criteo_kaggle.yaml data.path=train.txt"],
}
# Commands that do not run here: make's targets are checked by name, the notebook, the examples, the
# tests and torchrun are run by tests, exports of `shop` by test_onnx_file, sweeps take minutes,
# another page has such a plan and such days, and nothing is downloaded.
NOT_RUN = (
    *(
        "make ",
        ". .venv",
        "stampede sweep",
        "stampede tune",
        "stampede prepare criteo_kaggle 'logs/*.tsv' --out prepared --spark",
        "pip install",
        "jupyter lab",
        "python -m pytest",
    ),
    "stampede export runs/shop ",
    "torchrun --nproc_per_node 2 examples/torchrec_training.py",
    "torchrun --nnodes 2",
    "torchrun --nproc_per_node 2 launch.py configs/criteo_kaggle.yaml",
    "torchrun --nproc_per_node 2 launch.py configs/quickstart.yaml train.epochs=2",
    "torchrun --nproc_per_node 2 --max-restarts 3",
    "stampede incremental configs/criteo_kaggle.yaml 'data.path=logs/*.tsv'",
    "python launch.py --plan --world-size 128 --device-memory 80GB configs/plan_10b.yaml",
)
# Pages whose commands take longest; those of the first page are the README's.
LONG = ("index.md", "incremental.md", "stores.md", "questions.md", "experiments.md", "clusters.md")
COMMAND = re.compile(r"(make|\.|python|torchrun|stampede|cd|cp|pip|jupyter) ")
# Blocks of other kinds that have a test of their own, by how they begin.
OTHER = ("g = sum", "Q1 = ", 'name: "shop"', "train_step ")
SMALL = ("model.hidden=[16,16]", "evaluate.compare_with_lr=false")
OF_CLICKS = [f"configs/{name}.yaml" for name in ("quickstart", "histories")]
OF_CLICKS += ["examples/own_rule/lion.yaml"]
FEW_CLICKS = ("data.rows=2000", "data.test_rows=500", "data.scale=0.0005", "train.batch_size=256")

AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,"
    "app_category,device_id,device_ip,device_model,device_type,device_conn_type,"
    "C14,C15,C16,C17,C18,C19,C20,C21"
)


def blocks(page):
    """The blocks of a page without a language, as lines; a command is one line."""
    for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGES[page], flags=re.M | re.S):
        if not language and not block.startswith(OTHER):
            is_command = COMMAND.match(block)
            yield (block.replace("\\\n", " ") if is_command else block).splitlines()


def write_table(path, header, separator, row, rows=300):
    path.parent.mkdir(exist_ok=True)
    draw = random.Random(0)
    lines = [separator.join(map(str, row(draw, at))) for at in range(rows)]
    text = "".join(f"{line}\n" for line in ([header] if header else []) + lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_criteo(path, rows=400, seed=0):
    """With other seeds some ids are others."""
    write_table(path, "", "\t", lambda draw, at: [
        draw.randrange(2), *(draw.randrange(50) for _ in range(13)),
        *(f"{draw.randrange(20) + seed:08x}" for _ in range(26)),
    ], rows)  # fmt: skip


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with every file that the pages name."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "examples", "launch.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("train.txt", "new/a.tsv.gz"):
        write_criteo(tmp_path / name)
    write_table(tmp_path / "train.csv", AVAZU, ",", lambda draw, at: [
        at, draw.randrange(2), 14102100 + at // 20 % 24, *(draw.randrange(9) for _ in range(21)),
    ])  # fmt: skip
    for name in ("clicks.csv", "november.csv"):
        write_table(tmp_path / name, "clicked,user,item,genres,price,when", ",", lambda draw, at: [
            draw.randrange(2), f"u{draw.randrange(9)}", draw.randrange(9), "a|b",
            draw.random(), f"2024-01-{1 + at // 15:02d} 10:00:00",
        ])  # fmt: skip
    write_table(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", ",", lambda draw, at: [
        draw.randrange(30), draw.randrange(9), draw.randrange(1, 6), 1_000_000_000 + at * 7200,
    ])  # fmt: skip
    write_table(tmp_path / "log/march.csv.gz", "", ";", lambda draw, at: [
        draw.randrange(2), draw.randrange(9), draw.randrange(9), "a|b", draw.random(), "x",
        draw.randrange(20), "2024-02-01" if at < 200 else "2024-03-02", 1,
    ])  # fmt: skip
    for text in PAGES.values():
        for schema in re.findall(r"```yaml\n(.*?)```", text, flags=re.S):
            named = re.match(r"# (\w+\.yaml)\n", schema)
            if named or schema.startswith("label"):
                (tmp_path / (named[1] if named else "schema.yaml")).write_text(schema)
    return tmp_path


def run_command(line):
    """Its exit status."""
    # Two days are enough for a delta.
    for shown, here in (("period_0006", "period_0001"), ("period_0007", "period_0002")):
        line = line.replace(shown, here)
    words = shlex.split(line, comments=True)
    if words[:2] == ["stampede", "synthetic"]:
        if "--files" not in words:
            shutil.rmtree("logs")
        words += ["--rows", "400", "--scale", "0.0005"]
    if words[:2] == ["stampede", "incremental"]:
        words += [*SMALL, "train.epochs=1"]
    if words[0] == "stampede":
        return stampede(words[1:])
    if "launch.py" not in words:
        return as_printed(line.partition("  #")[0]).returncode
    arguments = words[words.index("launch.py") + 1 :]
    if "--plan" in arguments:
        # Fewer devices take the planner less long; the same lines are printed.
        arguments[arguments.index("--world-size") + 1] = "16"
        return main(arguments)
    arguments += SMALL
    if arguments[0] in OF_CLICKS:
        arguments += FEW_CLICKS
    elif any(argument.startswith("train.batch_size") for argument in arguments):
        arguments.append("train.batch_size=64")
    if not any(argument.startswith("train.epochs") for argument in arguments):
        arguments.append("train.epochs=1")
    if "checkpoint.resume=auto" not in arguments:
        arguments.append("run.overwrite=true")
    return main(arguments)


def as_printed(command):
    """Run a line of bash, with the programs of this environment; print what it prints."""
    path = os.pathsep.join(
        [os.path.abspath("bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    )
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=HANG
    )
    print(done.stdout, done.stderr)
    return done


def shape(line):
    """A line of an output without its numbers and units."""
    return " ".join(re.sub(r"\d[\d,]*(\.\d+)?(e-\d+)?( [KMG]?B\b)?", "0", line).split())


def compare_output(shown, printed):
    """Each line that a page shows was printed, numbers aside; `...` stands for others."""
    printed = set(map(shape, printed.splitlines()))
    if shown[0].startswith("error:"):
        # One long line.
        shown = [" ".join(shown)]
    for line in shown:
        if not line.strip().startswith("..."):
            assert shape(line) in printed, line


def run_session(block):
    """Run the lines of a block with `>>>`; compare what the others show."""
    code = [line.removeprefix(">>> ") for line in block if line.startswith(">>> ")]
    program = Path("session.py")
    program.write_text("\n".join([*code[:-1], f"print(repr({code[-1]}))"]))
    done = run_program(program, [], Path.cwd(), HANG)
    assert done.returncode == 0, done.stderr
    compare_output([line for line in block if not line.startswith(">>> ")], done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("page", [
    pytest.param(page, marks=[pytest.mark.wide] if page in LONG else [])
    for page in PAGES
    if any(blocks(page))
])  # fmt: skip
def test_commands_of_a_page_run_and_print_what_it_shows(page, desk, capfd):
    if page != "stores.md":
        check_commands(page, desk, capfd)
        return
    with object_store(desk / "stores") as files:
        for file in (desk / "new").iterdir():
            files.put_file(str(file), f"{BUCKET}/days/day_1.tsv.gz")
        check_commands(page, desk, capfd)


def check_commands(page, desk, capfd):
    for day in range(1, 3 if page == "incremental.md" else 2):
        write_criteo(desk / f"logs/day_{day}.tsv", seed=day)
    if page == "README.md":
        # It comes from `stampede describe`.
        (desk / "schema.yaml").unlink()
    for line in BEFORE.get(page, []):
        assert run_command(line) == 0, line
    all_blocks = list(blocks(page))
    for block, following in zip(all_blocks, [*all_blocks[1:], [""]], strict=True):
        if block[0].startswith(">>>"):
            run_session(block)
        elif COMMAND.match(block[0]):
            refused = following[0].startswith("error:")
            for line in block:
                if not line.startswith(NOT_RUN):
                    assert run_command(line) == int(refused), line
        elif not block[0].startswith("weights from"):
            compare_output(block, "".join(capfd.readouterr()))


@pytest.mark.wide
def test_what_a_warm_start_prints_is_shown(tmp_path):
    """On logs whose schemas differ in every way that the page shows."""
    (block,) = [block for block in blocks("checkpoints.md") if block[0].startswith("weights from")]
    october = train_on_movies(movie_folder(tmp_path / "october"))
    schema = (
        MOVIES.replace("buckets: 7, seed: 3", "buckets: 9, seed: 3")
        .replace("  weekday: {encode: weekday}", "  hour: {encode: hour_of_day}")
    )  # fmt: skip
    november = movie_folder(tmp_path / "november", 900, schema)
    _, lines, _ = begun(november, [f"checkpoint.init_from={october}"])
    printed = "\n".join(lines).replace(str(october), "runs/october")
    compare_output(block, printed)
