"""Help beyond what the parser makes of a command's options: its end, and when it is shown unasked."""

import typer

from intellect.problem import EXIT_USAGE


def epilog(*examples: str, exit_status: str) -> str:
    """Examples, and what the exit status means."""
    # \b keeps the parser's formatter from filling the lines below it.
    lines = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\nExit status: {exit_status}."


def help_without_command(context: typer.Context) -> None:
    """Shows the help of a group of commands that was given none, and ends with the status of wrong use."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)
