"""HDFS on this machine: the servers of Hadoop 2.7, whose jars `hadoop_jars.sh` fetches."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from support.waiting import wait_for

_JARS = Path(sys.prefix, "hadoop")
# Hadoop of that time looks into classes of Java itself.
_OPENED = [f"--add-opens=java.base/java.{one}=ALL-UNNAMED" for one in ("lang", "util", "nio")]
_SERVERS = "org.apache.hadoop.hdfs.server"


@contextmanager
def hdfs_store(folder):
    """Serve an empty folder. Yields a file system, whose `bucket` is the folder's URL."""
    pytest.importorskip("hdfs_native", reason="no hdfs-native: pip install -e '.[hdfs]'")
    if not shutil.which("java") or not _JARS.exists():
        pytest.skip("no Java, or no Hadoop: bash tests/support/hadoop_jars.sh")
    from stampede.hdfs import WholeFiles

    with ExitStack() as sockets:
        taken = [sockets.enter_context(closing(socket.socket())) for _ in range(5)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in taken]
    _configure(folder, *ports)
    servers = []
    try:
        subprocess.run(_java(folder, "namenode.NameNode", "-format", "-nonInteractive"), check=True)
        for name in ("namenode.NameNode", "datanode.DataNode"):
            servers.append(subprocess.Popen(_java(folder, name)))
        log = folder / "said.log"
        wait_for(lambda: "Acknowledging ACTIVE" in log.read_text())
        with patch.dict(os.environ, {"HADOOP_CONF_DIR": str(folder)}):
            WholeFiles.clear_instance_cache()
            files, _ = WholeFiles.of(f"hdfs://127.0.0.1:{ports[0]}/")
            files.bucket = f"hdfs://127.0.0.1:{ports[0]}/clicks"
            yield files
        WholeFiles.clear_instance_cache()
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _configure(folder, port, *others):
    settings = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{port}",
        "dfs.namenode.name.dir": folder / "names",
        "dfs.datanode.data.dir": folder / "blocks",
        "dfs.replication": 1,
        # Of clients: one that is not there is asked for three minutes by default.
        "dfs.client.failover.max.attempts": 2,
    }
    addresses = ("namenode.http-", "datanode.", "datanode.http.", "datanode.ipc.")
    for name, other in zip(addresses, others, strict=True):
        settings[f"dfs.{name}address"] = f"127.0.0.1:{other}"
    properties = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in settings.items()
    )
    (folder / "hdfs-site.xml").write_text(f"<configuration>{properties}</configuration>")
    (folder / "log4j.properties").write_text(
        f"log4j.rootLogger=INFO,A\nlog4j.appender.A=org.apache.log4j.FileAppender\n"
        f"log4j.appender.A.file={folder}/said.log\n"
        "log4j.appender.A.layout=org.apache.log4j.SimpleLayout\n"
    )
    for name in ("hdfs", "datanode"):
        pages = folder / "webapps" / name / "WEB-INF"
        pages.mkdir(parents=True)
        (pages / "web.xml").write_text("<web-app/>")


def _java(folder, name, *arguments):
    places = f"{folder}:{_JARS}/*"
    return ["java", "-Xmx256m", *_OPENED, "-cp", places, f"{_SERVERS}.{name}", *arguments]
