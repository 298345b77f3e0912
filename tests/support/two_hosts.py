"""Two hosts on one machine, with names, addresses and a cable; for root on Linux only.

Each host is a network namespace; its processes also see a host name and mounts of their own.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stampede.engine import step
from stampede.engine.checkpoint import saving
from stampede.engine.watching.heartbeat import Heartbeat
from support.forked import ended
from support.paths import ROOT
from support.waiting import HANG

PORT = 29500


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: also of its side of the cable.
        address: its only one beside the loopback's.
        space: the network namespace.
    """

    name: str
    address: str
    space: str

    def pids(self):
        """Its processes."""
        return list(map(int, _ip("netns", "pids", self.space).split()))

    def kill(self):
        """As if its power was cut, but that the kernel still closes its connections."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self):
        """Pull its cable; may be called from a process on the host, too."""
        _ip("-n", self.space, "link", "set", self.name, "down")

    def limit(self, rate):
        """Let no more leave it than a rate such as `1gbit`."""
        command = ["tc", "-n", self.space, "qdisc", "replace", "dev", self.name, "root"]
        shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run([*command, *shape], check=True)


@dataclass
class TwoHosts:
    """Two hosts and what runs on them.

    Attributes:
        north, south: the hosts; torchrun's store is on the first.
        folder: for the output of processes.
    """

    north: Host
    south: Host
    folder: Path
    _started: list = field(default_factory=list)

    def __iter__(self):
        return iter((self.north, self.south))

    def start(self, host, command, mounts=(), environment=()):
        """A process on a host.

        Args:
            mounts: folders of this host alone, each with what is mounted there.
            environment: variables of its own.
        """
        inside = [f"mount --bind {self.folder / 'hosts'} /etc/hosts", f"hostname {host.name}"]
        inside += [f"mount --bind {there} {here}" for here, there in dict(mounts).items()]
        shell = ["sh", "-ec", "; ".join([*inside, 'exec "$@"']), "sh"]
        started = subprocess.Popen(
            ["ip", "netns", "exec", host.space, "unshare", "--uts", *shell, *map(str, command)],
            cwd=ROOT,
            env={**_environment(), **dict(environment)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(started)
        return started

    def torchrun(self, host, program, arguments, ranks=1, nodes="2", restarts=0, **options):
        """A torchrun on a host, whose workers run a program; options are those of `start`."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes,
            "--nproc_per_node", ranks, "--max-restarts", restarts, "--rdzv_backend", "c10d",
            "--rdzv_endpoint", f"{self.north.name}:{PORT}", program, *arguments,
        ]  # fmt: skip
        return self.start(host, command, **options)

    def end(self, started, seconds=HANG):
        """What processes have said, and their exit statuses."""
        return [ended(one, seconds) for one in started]


@contextmanager
def two_hosts(folder):
    """Two hosts; all that runs on them is killed at the end. Skips the test if there can be none.

    Args:
        folder: for their files.
    """
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the commands ip and unshare (Debian: iproute2, util-linux)")
    spaces = [f"stampede-{os.getpid()}-{name}" for name in ("north", "south")]
    hosts = TwoHosts(
        *(
            Host(name, f"10.77.0.{number}", space)
            for number, (name, space) in enumerate(zip(("north", "south"), spaces, strict=True), 1)
        ),
        folder,
    )
    (folder / "hosts").write_text(
        "".join(f"{host.address} {host.name}\n" for host in hosts) + "127.0.0.1 localhost\n"
    )
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.space)
            ends = [[host.name, "netns", host.space] for host in hosts]
            _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
            for host in hosts:
                _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.name)
                _ip("-n", host.space, "link", "set", host.name, "up")
                _ip("-n", host.space, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as failure:
            pytest.skip(f"this user may not make network namespaces ({failure.stderr.strip()})")
        yield hosts
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                host.kill()
        for one in hosts._started:
            one.kill()
            one.communicate()
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host.space)


def is_running(pid):
    """Whether a process is there and has not ended, also if nobody has asked for its status."""
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


def seconds_until_ended(pid, since):
    """Seconds from a time of `time.monotonic` until a process has ended; checked often."""
    while is_running(pid):
        assert time.monotonic() < since + HANG, f"process {pid} still runs"
        time.sleep(0.02)
    return time.monotonic() - since


def _environment():
    left_out = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    # Two hosts share these cores. Workers that are done are waited for, as torchrun itself does.
    return {**environment, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def disappear(how, host, note):
    """From a process on a host: cut its cable or kill all its processes; notes when."""
    note.write_text(repr(time.monotonic()))
    getattr(host, how)()


@contextmanager
def at_beat(stage, number, action):
    """Do something when a stage begins for the so many-th time, from 1."""
    beat, left = Heartbeat.beat, [number]

    def beat_and_act(heartbeat, now, step=None):
        beat(heartbeat, now, step)
        left[0] -= now == stage
        if now == stage and left[0] == 0:
            action()

    Heartbeat.beat = beat_and_act
    yield


@contextmanager
def in_save(number, action):
    """Do something while a checkpoint's tensors are about to be written, in the so many-th one."""
    write, left = saving.write_tensors, [number]

    def act_and_write(*arguments):
        left[0] -= 1
        if left[0] == 0:
            action()
        return write(*arguments)

    saving.write_tensors = act_and_write
    yield


@contextmanager
def slow_steps(seconds):
    """Let each step take so much longer."""
    dense_pass = step._dense_pass

    def slowed(*arguments):
        time.sleep(seconds)
        return dense_pass(*arguments)

    step._dense_pass = slowed
    yield


@contextmanager
def wrong_clock(seconds):
    """Let the time of day be so much later in this process."""
    now = time.time
    time.time = lambda: now() + seconds
    yield
