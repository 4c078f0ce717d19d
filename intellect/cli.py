"""The command `intellect`: names the commands, and turns every expected failure into one line and an exit status.

A command's module imports what it needs inside its functions, so that `intellect --help` stays fast and works without the
engine.
"""

import os
import sys
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from intellect import checkpoint_command, doctor_command, replica_command, router_command, sim_command, up_command
from intellect.help_text import help_without_command
from intellect.problem import EXIT_FAILURE, Problem

EXIT_INTERRUPTED = 130  # 128 + SIGINT

app = typer.Typer(
    name="intellect",
    help="Serve INTELLECT-3-class models behind one OpenAI-compatible endpoint.",
    epilog="Exit status: 0 done, 1 it did not work, 2 wrong use, 130 interrupted.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("up", epilog=up_command.EPILOG)(up_command.up)
app.command("router", epilog=router_command.EPILOG)(router_command.router)
app.command("replica", epilog=replica_command.EPILOG)(replica_command.replica)
app.add_typer(checkpoint_command.app, name="checkpoint")
app.command("sim", epilog=sim_command.EPILOG)(sim_command.sim)
app.command("doctor", epilog=doctor_command.EPILOG)(doctor_command.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"intellect-serve {version('intellect-serve')}")
        except PackageNotFoundError:
            typer.echo("intellect-serve (not installed)")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before any command."""
    help_without_command(context)


def main() -> None:
    """Runs the command in sys.argv and ends the process with its exit status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command. Returns its exit status."""
    try:
        status = app(arguments, prog_name=app.info.name, standalone_mode=False)
    except Problem as problem:
        return _fail(str(problem), problem.exit_status)
    except TyperException as error:
        return _fail(_usage_line(error, arguments), error.exit_code)
    except (KeyboardInterrupt, Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has enough; the interpreter must not complain when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return status if isinstance(status, int) else 0


def _fail(line: str, status: int) -> int:
    typer.echo(f"error: {line}", err=True)
    return status


def _usage_line(error: TyperException, arguments: list[str]) -> str:
    """<flag> <value>: cause; remedy, from the parser's own complaint."""
    cause = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    context: Any = getattr(error, "ctx", None)
    options: list[str] = getattr(getattr(error, "param", None), "opts", [])
    for option in options:
        if (value := _given_value(option, arguments)) is not None:
            cause = f"{option} {value}: {cause.partition(': ')[2] or cause}"
    command = context.command_path if context is not None and context.command_path else "intellect"
    return f"{cause}; see `{command} --help`"


def _given_value(option: str, arguments: list[str]) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None
