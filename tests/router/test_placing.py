"""Requests that wait in the router until a replica can start them."""

import asyncio
from collections.abc import Sequence

import pytest

from router.admission.dispatcher import Dispatcher
from router.admission.priorities import DEFAULT_LIMITS, AdmissionSettings, ClassLimits
from router.admission.waiting import Waiting
from router.exchange import Rejection
from router.outcome import Outcome
from router.placing import Placing
from router.policy.interface import PlacementRequest, Priority, Ticket
from router.types import ReplicaId
from tests.router.admission.slots import A, B, Slots, asks, at

QUICK = AdmissionSettings(
    limits={**DEFAULT_LIMITS, Priority.DEFAULT: ClassLimits(max_wait_s=0.2, promote_after_s=0.1)}, poll_s=0.01
)


def placing_on(policy: Slots, settings: AdmissionSettings | None = None) -> Placing:
    return Placing(Dispatcher(policy, settings), policy)


def begun(placing: Placing, request: PlacementRequest, *replicas: ReplicaId) -> Ticket:
    given = placing.submit(request, at(*(replicas or (A,))))
    assert isinstance(given, Ticket)
    return given


def waiting(placing: Placing, request: PlacementRequest, *replicas: ReplicaId) -> "asyncio.Task[Ticket | None]":
    given = placing.submit(request, at(*(replicas or (A,))))
    assert isinstance(given, Waiting)
    return asyncio.create_task(placing.wait(given, silence_s=0.0, on_silence=None, ends_at=None))


async def test_a_request_that_waits_goes_when_another_ends() -> None:
    """Nobody is told to come back for a wait of some seconds."""
    policy = Slots()
    placing = placing_on(policy)
    first = begun(placing, asks())
    late = waiting(placing, asks())
    await asyncio.sleep(0)
    assert (placing.waiting_of(Priority.DEFAULT), late.done()) == (1, False)
    placing.ended(first, None)
    ticket = await asyncio.wait_for(late, 5)
    assert ticket is not None
    assert ticket.replica == A
    assert placing.waiting_of(Priority.DEFAULT) == 0
    placing.ended(ticket, None)
    assert policy.running == {}
    placing.close()


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    """Its place in the queue is gone at once, and a replica that it was given in that very moment is given back."""
    policy = Slots()
    placing = placing_on(policy)
    first = begun(placing, asks())
    leaving = [waiting(placing, asks()) for _ in range(5)]
    await asyncio.sleep(0)
    leaving[3].cancel()
    placing.ended(first, None)
    await asyncio.sleep(0)  # now one of them has been given the replica and has not yet been told
    for task in leaving:
        task.cancel()
    results = await asyncio.gather(*leaving, return_exceptions=True)
    for result in results:
        if isinstance(result, Ticket):
            placing.ended(result, None)
        else:
            assert isinstance(result, asyncio.CancelledError)
    assert policy.running == {}
    assert placing.waiting_of(Priority.DEFAULT) == 0
    placing.close()


async def test_a_wait_beyond_its_bound_ends_with_a_status_that_clients_retry() -> None:
    """503 with the time after which to come back, never a request that hangs."""
    policy = Slots()
    placing = placing_on(policy, QUICK)
    first = begun(placing, asks())
    with pytest.raises(Rejection) as refusal:
        await asyncio.wait_for(waiting(placing, asks()), 5)
    assert (refusal.value.status, refusal.value.outcome) == (503, Outcome.REJECTED_OVERLOADED)
    assert refusal.value.retry_after is not None
    assert 1 <= int(refusal.value.retry_after) <= 60
    placing.ended(first, None)
    assert policy.running == {}
    placing.close()


async def test_a_request_that_nothing_can_take_any_more_is_told_so() -> None:
    """When the last replica of its model goes, whoever waits for it is answered."""
    policy = Slots()
    placing = placing_on(policy)
    first = begun(placing, asks())
    replicas = [A]
    given = placing.submit(asks(), lambda: replicas)
    assert isinstance(given, Waiting)
    task = asyncio.create_task(placing.wait(given, silence_s=0.0, on_silence=None, ends_at=None))
    await asyncio.sleep(0)
    replicas.clear()
    placing.changed()
    assert await asyncio.wait_for(task, 5) is None
    placing.ended(first, None)
    placing.close()


async def test_a_stream_that_waits_hears_that_it_is_not_forgotten() -> None:
    """Keep-alive comments come in the queue as they do during a long prefill."""
    policy = Slots()
    placing = placing_on(policy)
    first = begun(placing, asks())
    given = placing.submit(asks(), at(A))
    assert isinstance(given, Waiting)
    heard = asyncio.Event()
    task = asyncio.create_task(placing.wait(given, silence_s=0.01, on_silence=heard.set, ends_at=None))
    await asyncio.wait_for(heard.wait(), 5)
    placing.ended(first, None)
    assert await asyncio.wait_for(task, 5) is not None
    placing.close()


async def test_the_time_that_a_request_has_in_all_counts_in_the_queue_too() -> None:
    """A total timeout of the operator ends the wait with 504."""
    policy = Slots()
    placing = placing_on(policy)
    begun(placing, asks())
    given = placing.submit(asks(), at(A))
    assert isinstance(given, Waiting)
    ends_at = asyncio.get_running_loop().time() + 0.05
    with pytest.raises(Rejection) as refusal:
        await asyncio.wait_for(placing.wait(given, silence_s=0.0, on_silence=None, ends_at=ends_at), 5)
    assert refusal.value.status == 504
    assert placing.waiting_of(Priority.DEFAULT) == 0
    placing.close()


class FailsOnce(Slots):
    """Its next placement is a fault of the program."""

    fails = False

    def place(self, request: PlacementRequest, candidates: Sequence[ReplicaId], now: float) -> Ticket | None:
        if self.fails:
            self.fails = False
            raise RuntimeError("a fault")
        return super().place(request, candidates, now)


async def test_a_fault_in_one_placement_is_told_to_that_client_alone() -> None:
    """It gets its answer at once, and whoever waits behind it is served."""
    policy = FailsOnce()
    placing = placing_on(policy)
    first = begun(placing, asks())
    faulty, late = waiting(placing, asks("t")), waiting(placing, asks("t"))
    await asyncio.sleep(0)
    policy.fails = True
    placing.ended(first, None)
    with pytest.raises(RuntimeError, match="a fault"):
        await asyncio.wait_for(faulty, 5)
    assert await asyncio.wait_for(late, 5) is not None
    assert placing.waiting_of(Priority.DEFAULT) == 0
    placing.close()


async def test_a_fault_outside_of_any_placement_leaves_nobody_waiting_beyond_its_bound() -> None:
    """Whatever keeps the queue from being served, who waits is told to come back, and the fault is reported."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context.get("exception")))

    def charge_of(ticket: Ticket, estimate: float) -> float:
        raise ArithmeticError("no cost")

    policy = Slots()
    placing = Placing(Dispatcher(policy, QUICK, charge_of=charge_of), policy)
    first = begun(placing, asks())
    late = waiting(placing, asks())
    await asyncio.sleep(0)
    placing.ended(first, None)
    with pytest.raises(Rejection) as refusal:
        await asyncio.wait_for(late, 5)
    assert refusal.value.status == 503
    assert {type(fault) for fault in faults} == {ArithmeticError}
    placing.close()


def test_a_request_whose_first_replica_failed_does_not_queue_again() -> None:
    """It had its turn: it goes to another replica at once, full or not."""
    policy = Slots()
    placing = placing_on(policy)
    begun(placing, asks(), B)
    assert placing.at_once(asks(), [B]).replica == B
