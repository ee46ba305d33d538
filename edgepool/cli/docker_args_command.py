"""`edgepool docker-args`: what `docker build` has to be told for a target."""

from __future__ import annotations

import typer

from . import console


def command(
    target: str = typer.Option(..., metavar="TARGET", help="The device that the image is for."),
    json: bool = console.JSON,
) -> None:
    """Print the build arguments of a target's container, for the command line of docker build.

    \b
    Examples:
      docker build $(edgepool docker-args --target jetson-agx-orin) -f Dockerfile.jetson .
      edgepool docker-args --target jetson-agx-xavier --json
    """
    from ..docker_args import build_args, command_line, dockerfile
    from ..targets import find_target

    profile = find_target(target)
    arguments = build_args(profile)
    if json:
        record = {"target": target, "dockerfile": dockerfile(profile), "build_args": arguments}
        console.print_json(record)
    else:
        print(command_line(arguments))
