"""The data source over Spark Connect: a server, and a client that has no Java (P1)."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pyspark

from tests.spark.conftest import LOOPBACK
from tests.support.documented_query import documented_query
from tests.support.exchange_client import append
from tests.support.processes import until_listening
from tests.support.storage_client import RunningStorage
from tidemark.local.java import find_java_home
from tidemark.local.ports import free_ports

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


async def test_the_documented_query_runs_over_spark_connect(
    storage: RunningStorage, tmp_path: Path
) -> None:
    """P1: the server reads storage."""
    await storage.create_topic("jobs")
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("jobs/a", b"1", b"2"))
    program = tmp_path / "query.py"
    program.write_text(documented_query(storage.address) + "print(type(spark).__module__)\n")
    (port,) = free_ports("127.0.0.1", 1)
    conf = (
        f"spark.connect.grpc.binding.port={port}",
        "spark.connect.grpc.binding.address=127.0.0.1",
        *LOOPBACK.split(","),
    )
    environment = {
        **os.environ,  # noqa: TID251 - handed on, not read
        "PYSPARK_PYTHON": sys.executable,
    }
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = await asyncio.create_subprocess_exec(
            str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
            *("--class", SERVER, "--master", "local[1]", *(f"--conf={each}" for each in conf)),
            env={
                **environment,
                "JAVA_HOME": str(find_java_home("")),
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
        try:
            # A client that comes too early waits four times longer after each attempt.
            await until_listening(server, port)
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, str(program)),
                env={
                    **environment,
                    "SPARK_REMOTE": f"sc://127.0.0.1:{port}",
                    "JAVA_HOME": str(tmp_path),
                },
                cwd=tmp_path,
                stdout=PIPE,
                stderr=STDOUT,
            )
            shown, _ = await client.communicate()
        finally:
            server.kill()
            await server.wait()

    lines = shown.decode().splitlines()
    assert client.returncode == 0, shown.decode() + log.read_text()
    assert "| jobs|            2|" in lines
    assert lines[-1] == "pyspark.sql.connect.session"
