"""Spark's ``TorchDistributor`` starts a host in each of its tasks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import summary

ROOT = Path(__file__).parents[2]
# As docs/hosts.md has it, with a cluster on this machine: two executors with a core each.
SCRIPT = """
import sys
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from hybridtrain.cli.entry import main

spark = SparkSession.builder.master("local-cluster[2,1,1024]").getOrCreate()
distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
status = distributor.run(main, sys.argv[1:])
spark.stop()
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_executors_train_as_two_hosts(tmp_path: Path) -> None:
    for name in ("pyspark", "pandas", "pyarrow"):
        pytest.importorskip(name, reason="needs Spark: pip install 'pyspark[sql]'")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java 17")
    given = {
        "model._target_": "tests.cli.tiny.TinyModule",
        "data._target_": "tests.cli.tiny.TinyData",
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.num_nodes": 2,
        "trainer.max_epochs": 2,
        "logger": "none",
        "hydra.run.dir": str(tmp_path / "run"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(f"{name}={value}" for name, value in given.items())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        },
        cwd=tmp_path,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    assert summary(tmp_path / "run")["exit"] == 0
    assert "host 1 of 2: 1 worker, relay to 127.0.0.1" in done.stdout
