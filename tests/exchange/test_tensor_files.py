"""Files written in parts are those of the safetensors library, aligned, and read one tensor at a time."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fourbits.exchange.tensor_files import DTYPES, TensorFile, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    found = {name: torch.arange(5).to(dtype) for name, dtype in DTYPES.items() if dtype.is_floating_point}
    return found | {
        "a byte": torch.full((3, 1), 7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "matrix": torch.randn(6, 4),
    }


def described(found) -> dict[str, torch.Tensor]:
    return {name: tensor.to("meta") for name, tensor in found.items()}


def same(one, other) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_the_library_reads_what_was_written_in_parts(tmp_path):
    own = tensors()
    rows = {name: tensor.split(2) if tensor.dim() else [tensor] for name, tensor in own.items()}
    parts = [(name, part) for name, parts in rows.items() for part in parts]
    write_tensors(tmp_path / "parts", described(own), parts)
    read, mine = load_file(tmp_path / "parts"), TensorFile(tmp_path / "parts")
    assert set(read) == set(own) == set(mine)
    for name, tensor in own.items():
        assert same(read[name].reshape(-1), tensor.reshape(-1))
        assert read[name].shape == tensor.shape == mine.described[name].shape
        assert same(mine[name].reshape(-1), tensor.reshape(-1))


def test_every_tensor_is_aligned(tmp_path):
    own = tensors()
    write_tensors(tmp_path / "file", described(own), own.items())
    content = (tmp_path / "file").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in own.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


def test_a_file_of_the_library_is_read(tmp_path):
    own = tensors()
    save_file(own, tmp_path / "file")
    mine = TensorFile(tmp_path / "file")
    assert all(same(mine[name].reshape(-1), own[name].reshape(-1)) for name in own)
    with pytest.raises(KeyError):
        mine["other"]


def test_a_file_that_is_shorter_than_its_header_says_is_named(tmp_path):
    write_tensors(tmp_path / "file", described(tensors()), tensors().items())
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="file: not a readable safetensors file"):
        TensorFile(tmp_path / "file")


def test_parts_that_leave_a_gap_are_an_error(tmp_path):
    own = tensors()
    with pytest.raises(AssertionError, match="do not fill"):
        write_tensors(tmp_path / "file", described(own), list(own.items())[:-1])
