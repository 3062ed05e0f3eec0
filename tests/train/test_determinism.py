"""The setting of deterministic operations: where it applies, and what it restores."""

import os

import pytest
import torch
from torch.utils import deterministic as torch_setting

from fourbits.train.determinism import deterministic


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch_setting.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
    )


@pytest.mark.parametrize(
    ("wanted", "device", "inside"),
    [(True, "cuda", (True, False, False)), (False, "cuda", None), (True, "cpu", None)],
)
def test_operations_are_deterministic_inside_and_as_before_outside(wanted, device, inside, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before, seen = settings(), []

    def fails_inside():
        with deterministic(wanted, device):
            seen.append(settings())
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert seen == [before if inside is None else inside]
    assert settings() == before


def test_a_workspace_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True, "cuda"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
