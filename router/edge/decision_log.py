"""One JSON line for each request that was to be placed: free of content, and replayed by `intellect sim --trace`."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from router.config import ConfigError
from router.edge.access_log import AccessLog


class DecisionRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came, what was decided and what became of it. Times are seconds."""

    t: float  # Unix time of arrival
    request_id: str
    outcome: str
    model: str
    blocks: Sequence[int]  # hashes of the prompt's chunks, see router.policy.prompt
    block_bytes: int  # they lie on the grid that begins with chunks of so many bytes
    prompt_bytes: int
    prompt_hash: int  # of all of it
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    session: str = ""  # hash of the client's word
    tenant: str = ""
    priority: str = "default"
    replica: str = ""  # the last one it was placed on
    attempts: int = 0
    waited_s: float = 0.0
    predicted_s: float | None = None
    ttft_s: float | None = None
    cached_tokens: int | None = None


class DecisionLog:
    """Call `close` before the process ends."""

    def __init__(self, path: Path, lock: Path | None = None) -> None:
        """Appends to a file; `lock` as in AccessLog. Raises ConfigError if it cannot be opened or is no regular file."""
        if path.exists() and not (path.is_file() or path.is_dir()):
            # To open a FIFO, and to write to it, waits for its reader.
            raise ConfigError(f"decision_log {path}: is not a regular file; give a file that may be written")
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            reason = f"cannot be opened: {error.strerror}; give a file that may be written"
            raise ConfigError(f"decision_log {path}: {reason}") from error
        self._lines = AccessLog(self._descriptor, lock, name="decision log")

    def write(self, record: DecisionRecord) -> None:
        self._lines.write(record)

    def close(self) -> None:
        self._lines.close()
        os.close(self._descriptor)
