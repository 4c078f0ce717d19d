"""A short question to an engine over its own connection pool, for what is not a client's request."""

import asyncio

from router.edge.upstream import Patience, Timeouts, UpstreamPool
from router.errors import BrokenAnswerError, UpstreamTimeoutError


async def ask(pool: UpstreamPool, head: bytes, body: bytes, *, timeout_s: float, bytes_max: int) -> tuple[int, bytes]:
    """Status and body of the answer. `head` is made by `request_head`.

    Raises UpstreamError, also for an answer that is not whole after `timeout_s` or longer than `bytes_max`.
    """
    patience = Patience(timeouts=Timeouts(first_byte=timeout_s, idle=timeout_s))
    try:
        async with asyncio.timeout(timeout_s):
            answer = await pool.send(head, body, patience)
            try:
                whole = bytearray()
                while part := await answer.read():
                    whole += part
                    if len(whole) > bytes_max:
                        raise BrokenAnswerError(f"{pool.endpoint} answered with more than {bytes_max} bytes")
                return answer.status, bytes(whole)
            finally:
                answer.close()
    except TimeoutError as error:
        raise UpstreamTimeoutError(f"{pool.endpoint} did not answer within {timeout_s:g} s") from error
