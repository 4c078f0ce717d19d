"""How a command ends early: one line for people, an exit status for scripts."""

EXIT_FAILURE = 1  # it was asked rightly and did not work
EXIT_USAGE = 2  # it was asked wrongly; nothing was done


class Problem(Exception):
    """An expected failure. The message is one line: <flag> <value>: cause; remedy. Printed after `error: `."""

    exit_status = EXIT_FAILURE


class UsageProblem(Problem):
    """A flag or argument that cannot be used."""

    exit_status = EXIT_USAGE
