"""Fits the simulator's step times to measured ones: least squares in which no coefficient may be negative. Pure."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from router.sim.timing import StepTiming

_ROUNDS = 30
_EXACT = 0.01  # relative errors below are all alike
_UNKNOWNS = ("base_s", "prefill_s", "sequence_s", "context_s", "pair_s", "request_s")


class Observation(NamedTuple):
    """How long something took, and of what the simulator says it consists."""

    seconds: float
    steps: float = 1.0
    prefill_tokens: float = 0.0
    sequences: float = 0.0  # that decode, summed over the steps
    context_tokens: float = 0.0  # that they read, summed over the steps
    attended_pairs: float = 0.0  # as `router.sim.timing` counts them
    requests: float = 0.0  # whose way to the engine and back is in it


class Fit(NamedTuple):
    timing: StepTiming
    request_s: float  # of each request, outside the engine's steps: HTTP, tokenizing, the way between processes
    errors: tuple[float, ...]  # of each observation, relative to what was measured, with its sign


def fit_timing(observations: Sequence[Observation]) -> Fit:
    """Minimises the sum of absolute relative errors, so that what was disturbed while it was measured counts little.

    By iteratively reweighted least squares: each round, an observation weighs the less the farther it lies off.

    Raises:
        ValueError: too few observations, or they do not tell the coefficients apart.
    """
    rows = [_row(observation) for observation in observations]
    if len(rows) < len(_UNKNOWNS):
        raise ValueError(f"{len(rows)} observations, but {len(_UNKNOWNS)} coefficients are to be found")
    relative = [[value / observation.seconds for value in row] for row, observation in zip(rows, observations, strict=True)]
    weights = [1.0] * len(rows)
    for _ in range(_ROUNDS):
        weighted = [[value * weight for value in row] for row, weight in zip(relative, weights, strict=True)]
        found = nonnegative_least_squares(weighted, weights)
        errors = tuple(sum(value * by for value, by in zip(row, found, strict=True)) - 1.0 for row in relative)
        weights = [max(abs(error), _EXACT) ** -0.5 for error in errors]
    base_s, prefill_s, sequence_s, context_s, pair_s, request_s = found
    if prefill_s <= 0:
        raise ValueError("prefill costs nothing by these observations: give longer prompts of different lengths")
    timing = StepTiming(
        base_s=base_s,
        prefill_tokens_per_s=1.0 / prefill_s,
        per_sequence_s=sequence_s,
        per_context_token_s=context_s,
        per_attended_pair_s=pair_s,
    )
    return Fit(timing, request_s, errors)


def _row(observation: Observation) -> tuple[float, ...]:
    return (
        observation.steps,
        observation.prefill_tokens,
        observation.sequences,
        observation.context_tokens,
        observation.attended_pairs,
        observation.requests,
    )


def nonnegative_least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 that minimises |rows x - wanted|. All choices of what is zero are tried, so it is for a handful of columns.

    Raises:
        ValueError: the columns are zero or depend on each other.
    """
    width = len(rows[0])
    scales = [sum(row[column] ** 2 for row in rows) ** 0.5 for column in range(width)]
    if not all(scales):
        raise ValueError(f"column {scales.index(0.0)} is zero in all observations, so its coefficient cannot be found")
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(width)] for i in range(width)]
    moments = [sum(row[i] * value for row, value in zip(scaled, wanted, strict=True)) for i in range(width)]
    best, best_gain = [0.0] * width, 0.0
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            solved = _solve([[gram[i][j] for j in columns] for i in columns], [moments[i] for i in columns])
            # At the least squares of these columns the residual is |wanted|^2 less this.
            gain = sum(value * moments[column] for value, column in zip(solved, columns, strict=True))
            if min(solved) >= 0 and gain > best_gain:
                best_gain = gain
                best = [0.0] * width
                for column, value in zip(columns, solved, strict=True):
                    best[column] = value / scales[column]
    return best


def _solve(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Gauss with pivots. Raises ValueError for a matrix that is, but for rounding, singular."""
    size = len(wanted)
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-10:
            raise ValueError("the observations do not tell the coefficients apart: vary prompts, batches and contexts more")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for place in range(column, size + 1):
                rows[row][place] -= factor * rows[column][place]
    solution = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(rows[row][place] * solution[place] for place in range(row + 1, size))
        solution[row] = (rows[row][size] - rest) / rows[row][row]
    return solution
