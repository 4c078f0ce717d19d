"""What the router reads of an engine's /metrics (vLLM 0.32): how far it has come, how much it runs, how much KV it holds.

The text is about 100 kB, mostly histogram buckets, so two series are searched for instead of parsing all of it.
"""

import re

from router.types import CacheFacts

# A sample's line in the Prometheus text format: name, labels in braces (a quoted value may hold any character), value,
# and perhaps a timestamp. The line break before the name, rather than `^`, lets the search skip ahead by the literal text.
_SAMPLE = (
    rb"\n%b(?:\{(?:[^\"}\n]|\"(?:[^\"\\\n]|\\.)*\")*\})?[ \t]+"
    rb"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?=[ \t\r\n])"
)
# How many steps the engine has made: the tokens of each are observed in a histogram, whose count counts the steps.
_ITERATIONS = re.compile(_SAMPLE % b"vllm:iteration_tokens_total_count")
_RUNNING = re.compile(_SAMPLE % b"vllm:num_requests_running")
# One line for each data-parallel rank behind the port; what is told stands in its labels.
_CACHE = re.compile(rb"\nvllm:cache_config_info\{([^\n]*)\}")
_LABEL = re.compile(rb"(\w+)=\"([0-9]+)\"")


def read_progress(metrics_text: bytes) -> tuple[float | None, float | None]:
    """Engine steps so far and requests running, each summed over the engines behind one port.

    None where there is no such series. A value that is no finite number, or whose line was cut off, counts as absent.
    """
    text = b"\n" + metrics_text
    return _sum(_ITERATIONS, text), _sum(_RUNNING, text)


def read_cache(metrics_text: bytes) -> CacheFacts | None:
    """The KV cache of each rank, and how many ranks there are; None where the engine does not say."""
    ranks = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(b"\n" + metrics_text)]
    if not ranks:
        return None
    block_tokens = int(ranks[0].get(b"block_size", b"0")) or None
    blocks = min(int(rank.get(b"num_gpu_blocks", b"0")) for rank in ranks)
    capacity = min(int(rank.get(b"kv_cache_size_tokens", b"0")) for rank in ranks) or blocks * (block_tokens or 0)
    return CacheFacts(capacity or None, block_tokens, len(ranks))


def _sum(sample: re.Pattern[bytes], text: bytes) -> float | None:
    values = sample.findall(text)
    return sum(map(float, values)) if values else None
