"""The jobs of examples/cluster: run where this machine can, else compared with their schema."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from stampede import open_run, stores
from stampede.data.prepare_command import main as prepare
from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from support.jobs import tensors_of
from support.movie_runs import JOB, prepare_movies, rows_of_test_part
from support.object_store import BUCKET, object_store
from support.paths import ROOT
from support.ranks import run_ranks
from support.waiting import HANG, wait_for

CLUSTER = ROOT / "examples/cluster"
# Of one rank each.
SMALL = [one for one in JOB if not one.startswith("data.")]


def test_the_configuration_is_one():
    config = load_config(CLUSTER / "clicks.yaml", [], 2)
    assert config.checkpoint.resume == "auto"
    read_map, _ = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    assert yaml.safe_load(read_map["data"]["clicks.yaml"]) == yaml.safe_load(
        (CLUSTER / "clicks.yaml").read_text()
    )


def as_defined(given, kind):
    """What the definition of a kind keeps of a mapping, with the types that it has there."""
    why = "kubeflow-training is not installed: pip install -e '.[ci]'"
    client = pytest.importorskip("kubeflow.training", reason=why).ApiClient()
    return client.sanitize_for_serialization(
        client.deserialize(SimpleNamespace(data=json.dumps(given)), kind)
    )


def the_job():
    config, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return config, job, container


def test_the_job_of_kubernetes_has_the_fields_of_its_schema():
    config, job, container = the_job()
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert as_defined(config, "V1ConfigMap") == config
    # A quantity may be a number, too.
    limits = container["resources"]["limits"]
    limits.update({name: str(value) for name, value in limits.items()})
    # Only the package wants it, not the operator.
    job["spec"]["runPolicy"] = {}
    assert as_defined(job, "KubeflowOrgV1PyTorchJob") == job
    # A name, a type and a missing field that are wrong are found so.
    assert as_defined({"data": {"a": 1}}, "V1ConfigMap") != {"data": {"a": 1}}
    container["volumeMounts"][0]["path"] = "/here"
    assert as_defined(job, "KubeflowOrgV1PyTorchJob") != job
    del container["volumeMounts"][0]["name"]
    with pytest.raises(ValueError, match="`name`, must not be `None`"):
        as_defined(job, "KubeflowOrgV1PyTorchJob")


def test_the_parts_of_the_job_of_kubernetes_fit_together():
    config, job, container = the_job()
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    # The operator leaves containers of other names alone.
    assert container["name"] == "pytorch"
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts.keys() == {one["name"] for one in pod["volumes"]}
    # The file is where the command looks for it, and a GPU is there for each rank.
    assert container["command"][-1] == f"{mounts['config']}/clicks.yaml"
    assert pod["volumes"][0]["configMap"] == {"name": config["metadata"]["name"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == policy["nProcPerNode"]
    assert worker["replicas"] == policy["maxReplicas"]


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_read_by_their_shell(name):
    shell = (CLUSTER / name).read_text().partition("\n")[0].removeprefix("#!")
    subprocess.run([shell, "-n", CLUSTER / name], check=True)


@pytest.fixture
def store(tmp_path):
    with object_store(tmp_path / "stores") as files:
        folder = prepare_movies(tmp_path / "movies")
        given = ["table", f"{folder}/log.csv", "--schema", f"{folder}/schema.yaml"]
        assert prepare([*given, "--out", f"{BUCKET}/prepared"]) == 0
        yield files


def expected(*overrides):
    """Weights of the same run on two ranks of this machine."""
    ours = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "STAMPEDE_"))}
    run_ranks(2, _train, ["run.name=expected", *SMALL, *overrides], ours)
    return _weights(stores.working(f"{BUCKET}/runs/expected"))


def _train(overrides, environment):
    from stampede.engine.run import run

    os.environ.update(environment)
    run(load_config(CLUSTER / "clicks.yaml", overrides, 2))


def _weights(run_folder):
    return tensors_of(newest(run_folder / "checkpoints"))


def assert_same(folder, weights, monkeypatch):
    """The run in the bucket has these weights, and scores on a machine that has only its URL."""
    monkeypatch.setenv("STAMPEDE_STORES", str(folder / "elsewhere"))
    run = open_run(f"{BUCKET}/runs/ads")
    found = _weights(run.path)
    for name, values in weights.items():
        np.testing.assert_array_equal(found[name], values)
    assert run.summary["world_size"] == 2
    assert np.isfinite(run.score(rows_of_test_part())).all()


SRUN = """#!/bin/bash
# Two nodes without a shared folder.
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node STAMPEDE_STORES=$NODES/$node "$@" &
    started="$started $!"
done
for one in $started; do wait $one || status=$?; done
exit ${status:-0}
"""


@pytest.mark.wide
def test_slurm_starts_the_run(store, tmp_path, monkeypatch):
    weights = expected()
    commands = {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho other\n"}
    # What pip has installed beside the interpreter that runs the tests.
    commands["torchrun"] = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    (tmp_path / "bin").mkdir()
    for name, content in commands.items():
        file = tmp_path / "bin" / name
        file.write_text(content)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    slurm = {"SUBMIT_DIR": CLUSTER, "JOB_NODELIST": "a[1-2]", "JOB_ID": os.getpid(),
             "JOB_NUM_NODES": 2}  # fmt: skip
    environment = {
        **os.environ,
        **{f"SLURM_{name}": str(value) for name, value in slurm.items()},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NODES": str(tmp_path / "nodes"),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }
    done = subprocess.run(
        ["bash", CLUSTER / "slurm.sbatch", *SMALL],
        env=environment, capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(tmp_path, weights, monkeypatch)


RAY = """
import runpy, sys, ray
sys.argv = sys.argv[1:]
# However many cores there are.
ray.init(num_cpus=2, include_dashboard=False)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.wide
def test_ray_trains_with_two_workers_one_of_which_dies(store, tmp_path, monkeypatch, request):
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    weights = expected("train.epochs=8")
    config = load_config(CLUSTER / "clicks.yaml", [*SMALL, "train.epochs=8"], 2)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    # The paths of its sockets must be short.
    place = tempfile.TemporaryDirectory(prefix="ray")
    request.addfinalizer(place.cleanup)
    given = [str(CLUSTER / "on_ray.py"), str(tmp_path / "small.yaml"), "2"]
    with (tmp_path / "said").open("w") as said:
        started = subprocess.Popen(
            [sys.executable, "-c", RAY, *given], stdout=said, stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_TMPDIR": place.name, "RAY_USAGE_STATS_ENABLED": "0"},
        )  # fmt: skip
        checkpoint = stores.working(f"{BUCKET}/runs/ads") / "checkpoints/epoch_0001/manifest.json"
        try:
            wait_for(lambda: checkpoint.exists() or started.poll() is not None)
            for pid in workers_of_ray(place.name)[-1:]:
                os.kill(pid, signal.SIGKILL)
            started.wait(HANG)
        finally:
            # It ends Ray's own processes, too.
            started.terminate()
            started.wait()
    said = (tmp_path / "said").read_text()
    assert started.returncode == 0, said
    assert "continuing after step " in said
    assert_same(tmp_path, weights, monkeypatch)
    assert f"test AUC {open_run(f'{BUCKET}/runs/ads').metrics['test']['auc']:.4f})" in said


def workers_of_ray(place):
    """Processes of the session that has its files in a place."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_worker = b"ray::RayTrainWorker" in (path / "cmdline").read_bytes()
            if is_worker and f"RAY_TMPDIR={place}".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return sorted(found)
