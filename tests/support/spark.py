"""Spark, where it is installed."""

import os
import shutil

import pytest


def needs_spark():
    """Skip the tests of a file where PySpark or Java is missing."""
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        pytest.skip("there is no Java", allow_module_level=True)
