"""Ids of requests."""

from router.ids import Ids


def test_no_two_requests_have_the_same_id() -> None:
    """Also where one stock of randomness ends and the next begins."""
    ids = Ids()
    made = [ids() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in made)


def test_ids_use_every_random_byte_once() -> None:
    """They are the system's randomness and nothing else."""
    drawn = bytearray()

    def draw(size: int) -> bytes:
        part = bytes((len(drawn) + index) % 251 for index in range(size))
        drawn.extend(part)
        return part

    ids = Ids(draw)
    made = b"".join(bytes.fromhex(ids()) for _ in range(700))
    assert bytes(drawn[: len(made)]) == made
