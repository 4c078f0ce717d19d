"""Keys of KV blocks, and what an engine's events make of them."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router.state.kv_blocks import HeldBlocks, block_keys, salt_scope
from router.state.kv_wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, decode_batch, is_in_gpu_memory

TOKENS = st.lists(st.integers(0, 200_000), max_size=100)
SIZES = st.integers(1, 20)


def stored(hashes: list[BlockHash], parent: BlockHash | None, tokens: list[int], size: int = 2, **more: object) -> BlockStored:
    return msgspec.structs.replace(BlockStored(hashes, parent, tokens, size), **more)


def removed(*hashes: BlockHash) -> BlockRemoved:
    return BlockRemoved(list(hashes))


def test_a_key_is_the_hash_of_the_tokens_seeded_by_the_key_before() -> None:
    """The rule as it is written down, so that another program can compute the same keys."""
    first = xxh3_64_intdigest(struct.pack("<2q", 1, 2), 0)
    second = xxh3_64_intdigest(struct.pack("<2q", 3, 2**40), first)
    assert block_keys([1, 2, 3, 2**40, 5], 2) == [first, second]
    assert block_keys([1, 2], 2, scope=7) == [xxh3_64_intdigest(struct.pack("<2q", 1, 2), 7)]


@given(TOKENS, TOKENS, SIZES)
def test_prompts_share_keys_as_far_as_they_share_whole_blocks(first: list[int], second: list[int], size: int) -> None:
    """Neither a block more nor one less, wherever they part."""
    shared = 0
    while (end := (shared + 1) * size) <= min(len(first), len(second)) and first[:end] == second[:end]:
        shared += 1
    ours, theirs = block_keys(first, size), block_keys(second, size)
    assert len(ours) == len(first) // size
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs)


@given(TOKENS, SIZES, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_prompts_of_different_scopes_share_nothing(tokens: list[int], size: int, one: int, other: int) -> None:
    """A tenant's salt keeps his KV to himself."""
    assert bool(set(block_keys(tokens, size, one)) & set(block_keys(tokens, size, other))) == (
        one == other and len(tokens) >= size
    )


def test_a_token_id_beyond_64_bits_is_refused() -> None:
    """Rather than taken for another."""
    with pytest.raises(OverflowError):
        block_keys([2**63], 1)


@pytest.mark.parametrize("hashes", [[b"a" * 32, b"b" * 32, b"c" * 32], [1, 2**64 - 1, 3]], ids=["bytes", "ints"])
def test_blocks_get_the_keys_of_their_prompts_whatever_the_engine_calls_them(hashes: list[BlockHash]) -> None:
    """A prompt whose tokens are known finds its blocks, be they told of in one event or in several."""
    held, tokens = HeldBlocks(), [1, 2, 3, 4, 5, 6]
    keys = block_keys(tokens, 2)
    assert held.store(stored(hashes[:2], None, tokens[:4])).keys == keys[:2]
    assert held.store(stored(hashes[2:], hashes[1], tokens[4:])).keys == keys[2:]
    assert (held.leading(keys), held.leading(keys[1:]), held.leading([9, *keys]), len(held)) == (3, 2, 0, 3)
    assert held.remove(removed(hashes[1])) == [keys[1]]
    assert held.leading(keys) == 1
    assert sorted(held.clear()) == sorted([keys[0], keys[2]])
    assert (held.leading(keys), len(held)) == (0, 0)


def test_a_block_is_held_until_its_last_copy_goes() -> None:
    """Sequences that ran side by side leave several, and the engine tells of each."""
    held, [key] = HeldBlocks(), block_keys([1, 2], 2)
    assert [held.store(stored([b"x"], None, [1, 2])).keys for _ in range(3)] == [[key], [], []]
    assert [held.remove(removed(b"x")) for _ in range(4)] == [[], [], [key], []]


def test_a_salted_prompts_blocks_are_found_with_its_salt_only() -> None:
    """As the engine shares them."""
    held, tokens = HeldBlocks(), [1, 2, 3, 4]
    held.store(stored([b"x", b"y"], None, tokens, extra_keys=[["secret"], None]))
    found = [held.leading(block_keys(tokens, 2, scope)) for scope in (salt_scope("secret"), salt_scope("other"), 0)]
    assert found == [2, 0, 0]


@pytest.mark.parametrize(
    "event",
    [
        stored([b"y"], b"unknown", [1, 2]),
        stored([b"y"], None, [1, 2, 3]),
        stored([b"y"], None, []),
        stored([b"y"], None, [1, 2], size=0),
        stored([b"y"], None, [1, 2], size=-2),
        stored([b"y"], None, [1, 2], extra_keys=[]),
    ],
    ids=["parent unknown", "too many tokens", "no tokens", "no size", "size below 0", "extra keys of other blocks"],
)
def test_blocks_that_cannot_be_keyed_are_counted_and_never_credited(event: BlockStored) -> None:
    """A router that comes late does not guess what it missed."""
    held = HeldBlocks()
    assert held.store(event) == ([], [], 1)
    assert len(held) == 0
    assert held.remove(removed(b"y")) == []


def test_it_never_holds_more_than_the_engine_can() -> None:
    """What an engine told of first goes first; then it is no longer exact, until it has cleared its cache."""
    held = HeldBlocks(capacity=2)
    tokens = [1, 2, 3, 4, 5, 6]
    keys = block_keys(tokens, 2)
    assert held.store(stored([b"a", b"b", b"c"], None, tokens)) == (keys, keys[:1], 0)
    assert (len(held), held.is_exact) == (2, False)
    held.clear()
    assert held.is_exact
    for _ in range(5):  # as vLLM tells of reused blocks where a request asks it to
        held.store(stored([b"a", b"b"], None, tokens[:4]))
    assert held.remove(removed(b"a", b"b")) == keys[:2]


def test_messages_are_read_as_vllm_writes_them() -> None:
    """Fields of a later release and those that are left out change nothing."""
    batch = [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [b"x" * 32],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "session_id": "s",
                "of_a_later_release": {},
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        3,
        "of a later release",
    ]
    events = decode_batch(msgspec.msgpack.encode(batch))
    assert events == [stored([b"x" * 32], None, [1, 2], medium="GPU"), BlockRemoved([7], "GPU"), AllBlocksCleared()]
    assert decode_batch(msgspec.msgpack.encode([1.5, []])) == []


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers(-9, 9) | st.text(), st.lists, max_leaves=9).map(msgspec.msgpack.encode)
)
def test_what_is_no_batch_is_a_value_error(payload: bytes) -> None:
    """Whatever the bytes are."""
    try:
        decode_batch(payload)
    except ValueError:
        return
    batch = msgspec.msgpack.decode(payload)
    assert isinstance(batch, list)
    assert isinstance(batch[1], list)


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (stored([b"x"], None, [1, 2]), True),
        (stored([b"x"], None, [1, 2], medium="GPU", group_idx=0, locality="LOCAL"), True),
        (stored([b"x"], None, [1, 2], medium="CPU"), False),
        (stored([b"x"], None, [1, 2], medium="GPU", group_idx=1), False),
        (stored([b"x"], None, [1, 2], locality="REMOTE"), False),
        (BlockRemoved([b"x"], "STORAGE"), False),
        (BlockRemoved([b"x"], "GPU", 0), True),
    ],
)
def test_only_the_cache_that_the_engine_computes_in_counts(event: BlockStored | BlockRemoved, counts: bool) -> None:
    """A block that was moved out to a disk is told of too."""
    assert is_in_gpu_memory(event) is counts
