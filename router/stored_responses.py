"""Ids of stored responses, from which any router finds the engine that keeps them: `resp_<request id><replica's tag>`.

An engine keeps stored responses in its own memory, so a request for one must go to that engine. The id itself says which: no
table to lose at a restart, and none to share between routers.
"""

import re
import zlib
from collections.abc import Iterable

from router.types import ReplicaId

PREFIX = "/v1/responses/"
ROUTE = "/v1/responses/{id}"
CANCEL_ROUTE = "/v1/responses/{id}/cancel"
_PATH = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")
_TAG_HEX = 8


def response_id(engine_request_id: str, replica_id: ReplicaId) -> str:
    return f"resp_{engine_request_id}{_tag(replica_id)}"


def parse_path(path: str) -> tuple[str, bool] | None:
    """The id in a path and whether it is to be cancelled; None if the path is no such one."""
    found = _PATH.fullmatch(path)
    return None if found is None else (found[1], found[2] is not None)


def keeper_of(stored_id: str, replicas: Iterable[ReplicaId]) -> ReplicaId | None:
    """The replica that keeps this response, if it is one of these."""
    if not stored_id.startswith("resp_"):
        return None
    tag = stored_id[-_TAG_HEX:]
    return next((replica for replica in replicas if _tag(replica) == tag), None)


def _tag(replica_id: ReplicaId) -> str:
    return f"{zlib.crc32(replica_id.encode()):08x}"
