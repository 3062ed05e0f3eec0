"""A fixture for small models: the eager reference is fast enough, and a hundred compilations are not."""

import pytest

from fourbits.quant.cpu import compiled


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1 << 62)
