"""`tidemark completion`: prints a completion script for a shell."""

from typing import Annotated, Final

import typer

_SHELLS: Final = ("bash", "zsh", "fish")


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a completion script, as in: source <(tidemark completion bash)"""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in _SHELLS:
        raise typer.BadParameter(f"{shell!r} is not one of {', '.join(_SHELLS)}")
    script = get_completion_script(
        prog_name="tidemark", complete_var="_TIDEMARK_COMPLETE", shell=shell
    )
    typer.echo(script)
