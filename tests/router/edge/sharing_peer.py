"""A router process that shares placements over redis and waits: `python -m tests.router.edge.sharing_peer URL COUNT`."""

import asyncio
import random
import sys
import time

from router.edge.sharing import Sharing
from router.policy.interface import ReplicaFacts
from tests.router.state.recording_policy import A, RecordingPolicy, request


async def share(url: str, count: int) -> None:
    sharing = Sharing(url, RecordingPolicy(), router="peer", incarnation=time.time_ns(), rng=random.Random())
    sharing.policy.changed(ReplicaFacts(A))
    for _ in range(count):
        sharing.policy.place(request(), [A], time.monotonic())
    await sharing.run()


if __name__ == "__main__":
    asyncio.run(share(sys.argv[1], int(sys.argv[2])))
