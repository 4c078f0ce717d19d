import os

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process read INTELLECT_*; a developer's own must not change a test."""
    for name in list(os.environ):
        if name.startswith("INTELLECT_"):
            monkeypatch.delenv(name)
