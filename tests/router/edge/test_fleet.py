"""What the fleet keeps of engines, and for how long."""

import asyncio

import httpx

from router.edge.agent_client import ControlClient
from router.edge.fleet import Fleet
from router.state.replicas import ReplicaTable
from router.types import Endpoint, Health, Observation, Verdict
from tests.ports import free_port


async def test_an_engine_is_forgotten_when_its_last_request_has_left_a_removed_replica() -> None:
    """A fleet whose replicas come and go for months holds no connections to those that went, and cuts none that still run."""
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.TaskGroup() as tasks:
        control = ControlClient(http, agent_token=None, upstream_key=None)
        fleet = Fleet(ReplicaTable(), control, interval_s=60, stall_after_s=60, connect_timeout_s=2, sweep_s=1, tasks=tasks)
        replica = fleet.add(f"http://127.0.0.1:{free_port()}")
        endpoint = Endpoint("127.0.0.1", free_port())
        fleet.table.observe(replica, Observation(Health.READY, engine=endpoint, models=("m",)), 0)
        pool = fleet.pool(endpoint)
        lease = fleet.table.lease(replica)
        fleet.remove(replica.id)
        fleet.sweep()
        assert fleet.pool(endpoint) is pool, "a request still runs there"
        lease.settle(Verdict.NEUTRAL, 0.0)
        fleet.sweep()
        assert fleet.pool(endpoint) is not pool
        fleet.close()
