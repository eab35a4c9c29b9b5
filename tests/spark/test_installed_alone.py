"""The package for readers, installed by itself into an environment of a Spark user (P1).

It starts a Spark of its own, so that only `make test-installed` runs it.
"""

import asyncio
import os
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.spark.conftest import LOOPBACK
from tests.support.documented_query import documented_query
from tests.support.exchange_client import append
from tests.support.reader_environment import ReaderEnvironment
from tests.support.storage_client import RunningStorage
from tidemark.local.java import find_java_home

ABSENT = ("tidemark", "storage_svc", "broker_svc", "lifecycle_svc", "spark_batch", "rocksdict")
"""Services, the client library and RocksDB."""


async def test_the_documented_query_runs_where_only_the_reader_is_installed(
    storage: RunningStorage, tmp_path: Path
) -> None:
    """P1: built and installed alone, with grpcio, protobuf and pyarrow, next to PySpark."""
    await storage.create_topic("jobs")
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("jobs/a", b"1", b"2"))
    environment = ReaderEnvironment(tmp_path / "environment")
    await environment.create()
    program = tmp_path / "query.py"
    program.write_text(
        documented_query(storage.address)
        + f"""
from importlib.util import find_spec

print("present:", [name for name in {ABSENT} if find_spec(name)])
"""
    )
    conf = " ".join(f'--conf "{each}"' for each in LOOPBACK.split(","))
    path = f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"  # noqa: TID251
    kept = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 - handed on, not read
        if not name.startswith(("PYTHON", "PYSPARK", "SPARK", "VIRTUAL_ENV"))
    }

    client = await asyncio.create_subprocess_exec(
        *(str(environment.python), str(program)),
        env={
            **kept,
            "PATH": path,
            "JAVA_HOME": str(find_java_home("")),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_SUBMIT_ARGS": f"--master local[1] {conf} pyspark-shell",
        },
        cwd=tmp_path,
        stdout=PIPE,
        stderr=PIPE,
    )
    shown, complaints = await client.communicate()

    assert client.returncode == 0, complaints.decode()
    lines = shown.decode().splitlines()
    assert "| jobs|            2|" in lines
    assert lines[-1] == "present: []"
    assert environment.requirements() == {"grpcio", "protobuf", "pyarrow"}
    assert environment.modules() == {"pyspark_tidemark"}
