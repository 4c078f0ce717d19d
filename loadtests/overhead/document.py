"""docs/benchmarks.md: the tables, what they were measured on, and how. Pure."""

from dataclasses import dataclass

from loadtests.overhead.figures import Summary
from loadtests.overhead.report import figures_table, ratios_table, targets_table
from loadtests.overhead.routers import RIVALS

_METHOD = """\
- **CPU** is user and system time of a router's whole process tree, divided by what passed. Ours runs as its users start
  it, with accounting, metrics and access log; the others with their defaults.
- **Requests**: wrk, 32 connections, not streamed; nginx answers at once on four ports. All prompts begin with the same
  system prompt. vllm-router's cache_aware asks an upstream for the token ids of each prompt; it gets 100 at once, so an
  engine's work for them is not in the figure.
- **Chunks**: 128 streams at a time; each engine sends one event every 20 ms, 100 to a stream. Delivered chunks are the
  bytes that reached the client, divided by the bytes for each event in one whole answer of that router.
- **Added latency**: 8 kB prompts as a Poisson process at half of the rate that the router takes from 32 connections,
  sent when they are due whatever the answers do (an asyncio client of the benchmark's own, since wrk has no such mode).
  It is the percentile through the router minus the same percentile straight to an upstream, with the same requests at
  the same times. Each router has its own rate, so the slower one is asked for less.
- **Memory per idle stream**: growth of the process tree's resident memory with 1,000 streams open that have each got one
  event (0.4 kB prompts).
- Load generator, upstreams and router share the machine's cores, so ratios count more than figures. Routers take turns;
  figures are medians over the rounds, errors are summed. Keep only what was measured on an otherwise quiet machine: where
  cores are busy, latencies are those of waiting for a core, and CPU per request shifts, not for all routers alike.
- `make bench` measures anew and writes this file; `.venv/bin/python -m loadtests.overhead --help` lists its settings."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """`machine` and `version` in words; `cores_lost`: what other programs kept busy meanwhile."""

    date: str
    machine: str
    cores_lost: float
    version: str
    rounds: int
    seconds: float


def document(summary: Summary, circumstances: Circumstances) -> str:
    """The whole file. What was not measured is missing in its tables, or named so."""
    said = circumstances
    return f"""# Benchmarks

What routing costs, measured by `make bench` on {said.date} on a machine with {said.machine}.
{said.version} against {" and ".join(RIVALS)}; rounds: {said.rounds}; seconds for each measurement: {said.seconds:g}.
Other programs kept {said.cores_lost:.1f} cores busy meanwhile.

## Targets

{targets_table(summary)}

## Figures

{figures_table(summary)}

{ratios_table(summary)}

## How it is measured

{_METHOD}
"""
