"""Spark, where it is installed."""

import importlib.util
import os
import shutil


def missing() -> str:
    """What is not installed of that which Spark needs; "" if all is there."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    return "" if os.environ.get("JAVA_HOME") or shutil.which("java") else "there is no Java"
