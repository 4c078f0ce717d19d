"""The end of every command's help: examples, and what its exit status means."""


def epilog(*examples: str, exit_status: str) -> str:
    # \b keeps the parser's formatter from filling the lines below it.
    lines = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\nExit status: {exit_status}."
