"""Tensors in pieces over files, in the layout of torch.distributed.checkpoint."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fourbits.exchange.tensor_pieces import OFFSETS, SHARDING, TensorPieces


def written(path, pieces):
    """A file of pieces: name -> (tensor, offsets)."""
    info = json.dumps({name: {OFFSETS: offsets} for name, (_, offsets) in pieces.items()})
    save_file({name: tensor for name, (tensor, _) in pieces.items()}, path, {SHARDING: info})
    return path


@pytest.fixture
def whole():
    torch.manual_seed(1)
    return {"matrix": torch.randn(5, 3), "vector": torch.randn(4), "step": torch.tensor(7.0)}


@pytest.fixture
def files(tmp_path, whole):
    """Rows 0-2 and a scalar in one file, rows 3-4 in the other."""
    first = {"matrix": (whole["matrix"][:3], [0, 0]), "vector": (whole["vector"][:1], [0])}
    first["step"] = (whole["step"], [])
    rest = {"matrix": (whole["matrix"][3:], [3, 0]), "vector": (whole["vector"][1:], [1])}
    return [written(tmp_path / "b", rest), written(tmp_path / "a", first)]


def test_pieces_are_put_together_in_any_order_of_files(files, whole):
    for order in (files, files[::-1]):
        found = TensorPieces(order)
        assert set(found) == set(whole)
        assert len(found) == 3
        for name, tensor in whole.items():
            assert found.described[name].shape == tensor.shape
            assert found[name].equal(tensor)


def test_pieces_may_be_runs_of_rows_of_runs_of_columns(tmp_path, whole):
    """As of ranks that share a layer by its input features, each of which has shards."""
    matrix = whole["matrix"]
    places = [(slice(0, 3), slice(0, 2)), (slice(3, 5), slice(0, 2)), (slice(0, 5), slice(2, 3))]
    files = [
        written(tmp_path / f"{n}", {"matrix": (matrix[place].contiguous(), [place[0].start, place[1].start])})
        for n, place in enumerate(places)
    ]
    assert TensorPieces(files)["matrix"].equal(matrix)
    for missing in range(2):
        with pytest.raises(ValueError, match="'matrix' is missing or there twice"):
            TensorPieces([file for n, file in enumerate(files) if n != missing])


def test_a_file_without_offsets_holds_whole_tensors(tmp_path, whole):
    save_file(whole, tmp_path / "whole")
    assert all(TensorPieces([tmp_path / "whole"])[name].equal(tensor) for name, tensor in whole.items())


def test_a_missing_and_a_repeated_piece_are_errors_that_name_the_tensor(files, tmp_path, whole):
    with pytest.raises(ValueError, match="a piece of 'matrix' is missing or there twice"):
        TensorPieces(files[:1])  # without the first rows
    again = written(tmp_path / "c", {"matrix": (whole["matrix"][:3], [0, 0])})
    with pytest.raises(ValueError, match="'matrix' is missing or there twice"):
        TensorPieces([*files, again])


def test_pieces_of_other_dimensions_are_an_error(files, tmp_path, whole):
    with pytest.raises(ValueError, match="'matrix' have different dimensions"):
        TensorPieces([*files, written(tmp_path / "c", {"matrix": (whole["vector"], [5])})])


@pytest.mark.parametrize("text", ["{", "[1]", '{"matrix": {}}', '{"matrix": {"saved_offsets": ["x"]}}'])
def test_damaged_offsets_are_an_error_that_names_the_file(tmp_path, whole, text):
    save_file({"matrix": whole["matrix"]}, tmp_path / "shard", {SHARDING: text})
    with pytest.raises(ValueError, match=f"shard: damaged: its {SHARDING}"):
        TensorPieces([tmp_path / "shard"])
