"""Where things rest on this machine."""

from dataclasses import dataclass
from pathlib import Path

STATE_DIR_DEFAULT = Path("~/.cache/intellect")


@dataclass(frozen=True, slots=True)
class Places:
    """The folders below one state folder."""

    state_dir: Path

    @property
    def store(self) -> Path:
        """Checkpoints, as protocol.store lays them out."""
        return self.state_dir / "checkpoints"

    def logs(self, port: int) -> Path:
        """Of the stack on this public port; stacks that share a state folder do not share their logs."""
        return self.state_dir / "logs" / str(port)


def places(state_dir: Path = STATE_DIR_DEFAULT) -> Places:
    return Places(state_dir.expanduser().absolute())
