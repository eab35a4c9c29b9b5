"""`tidemark up` as a child process of a test: its lines, its exit, the services below it."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Self

SERVICES = ("broker", "storage", "lifecycle")


async def ended(pidfd: int) -> None:
    """Return once the process behind the descriptor has ended, whatever its parent is."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pidfd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pidfd)


class UpProcess:
    """Kills what is left of itself at the end of its block; all ports are free ones by default."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir = data_dir
        ports = [f"--{name}-port=0" for name in (*SERVICES, "retention")]
        # Retention needs Spark, which takes long to start; its tests ask for it.
        self._options = (f"--data-dir={data_dir}", *ports, "--no-retention", *options)
        self._pidfds: dict[str, int] = {}
        self.output: list[str] = []

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tidemark.cli.main", "up", *self._options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        print(*self.output, sep="\n")  # pytest shows it when the test fails

    async def line_with(self, text: str) -> str:
        """The next line on stdout that contains the text."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            self.output.append(raw.decode().rstrip())
            if text in self.output[-1]:
                return self.output[-1]
        raise AssertionError(f"ended without saying {text!r}: {await self.complaint()}")

    async def complaint_with(self, text: str) -> str:
        """The next line on stderr that contains the text."""
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode().rstrip()
            self.output.append(line)
            if text in line:
                return line
        raise AssertionError(f"ended without complaining of {text!r}")

    async def ready(self) -> None:
        await self.line_with("stop ")  # the last of the block
        self._pidfds = {name: os.pidfd_open(pid) for name, pid in self.services().items()}

    def services(self) -> dict[str, int]:
        """Process ids of the services that run, by name."""
        return {name: pid for name, pid in self._children().items() if name in SERVICES}

    def valkey(self) -> int:
        """The process id of the Valkey beside them."""
        (found,) = [pid for name, pid in self._children().items() if name not in SERVICES]
        return found

    def _children(self) -> dict[str, int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {_service(int(child)): int(child) for child in children}

    def address(self, name: str) -> str:
        """Where a service is, as the ready block has it."""
        return next(line.split()[1] for line in self.output if line.split()[:1] == [name])

    async def services_ended(self) -> None:
        """Return once no service that was there when it was ready runs any more."""
        assert set(self._pidfds) == set(SERVICES)
        await asyncio.gather(*(ended(pidfd) for pidfd in self._pidfds.values()))

    async def complaint(self) -> str:
        """All of stderr, once it has ended."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def exit_code(self) -> int:
        return await self.process.wait()


def _service(pid: int) -> str:
    """`python -m broker_svc` is the broker."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return command[2].decode().removesuffix("_svc") if len(command) > 2 else ""
