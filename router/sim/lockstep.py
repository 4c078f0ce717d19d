"""The clock of engines that step together: one alone, or all ranks of an expert-parallel group at the pace of the slowest."""

from collections.abc import Sequence

from router.sim.engine import Engine, StepOutcome


class StepClock:
    """Plans, times and ends the steps of its engines. An engine without work steps idly with its group."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._stepping: list[Engine] = []  # those with work in the present steps; empty: nothing runs
        self._began_at = 0.0
        self._steps = 0

    @property
    def is_stepping(self) -> bool:
        return bool(self._stepping)

    def begin(self, now: float) -> float | None:
        """Begins the next steps; returns when the last of them ends, None if no engine has anything to do."""
        assert not self._stepping
        planned = [(engine, steps) for engine in self.engines if (steps := engine.plan(now))]
        if not planned:
            return None
        self._stepping = [engine for engine, _ in planned]
        # In a group each step may have another slowest member.
        self._steps = planned[0][1] if len(self.engines) == 1 else 1
        self._began_at = now
        return now + self._seconds(self._steps)

    def interrupt(self, now: float) -> float | None:
        """Something waits for the next step: lets the steps end after the one that runs at `now`.

        Returns when that is; None if the end that `begin` told stays.
        """
        if self._steps <= 1 or not self._stepping:
            return None
        steps = self._done(now)
        if self._began_at + self._seconds(steps) < now:
            steps += 1
        steps = max(steps, 1)
        if steps >= self._steps:
            return None
        self._steps = steps
        return self._began_at + self._seconds(steps)

    def sync(self, now: float) -> None:
        """Brings the engines' numbers up to the last step that ended before `now`."""
        if self._steps <= 1 or not self._stepping:
            return
        done = min(self._done(now), self._steps - 1)
        if done > 0:
            seconds = self._seconds(done)
            self._stepping[0].advance(done)
            self._stepping[0].busy_s += seconds
            self._began_at += seconds
            self._steps -= done

    def step_left_s(self, now: float) -> float:
        """How long the step that runs goes on; 0 if none does. Call `sync` before."""
        return max(0.0, self._began_at + self._seconds(1) - now) if self._stepping else 0.0

    def finish(self, now: float) -> list[tuple[Engine, StepOutcome]]:
        """Ends the steps at the time that `begin` or `interrupt` told last."""
        seconds = self._seconds(self._steps)
        last_s = seconds - self._seconds(self._steps - 1)
        ended = []
        for engine in self._stepping:
            engine.busy_s += seconds
            ended.append((engine, engine.finish(self._steps, now, last_s)))
        self._stepping = []
        return ended

    def kill(self, now: float) -> None:
        """The engines have died in the middle of their steps."""
        for engine in self._stepping:
            engine.busy_s += max(0.0, now - self._began_at)
        self._stepping = []

    def _seconds(self, steps: int) -> float:
        if not steps:
            return 0.0
        return max(engine.seconds(steps) for engine in self._stepping)

    def _done(self, now: float) -> int:
        """How many of the steps have ended by `now`."""
        elapsed = now - self._began_at
        done, undone = 0, self._steps + 1
        while undone - done > 1:
            middle = (done + undone) // 2
            if self._seconds(middle) <= elapsed:
                done = middle
            else:
                undone = middle
        return done
