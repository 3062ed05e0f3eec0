"""Checkpoints of several ranks: each writes and reads its shards, by torch.distributed.checkpoint.

A folder per part (model, optimizer, recipe) holds a safetensors file per rank, and state.json is as in a
checkpoint of one process, whose single files are read, too. Nothing is pickled into a file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from fourbits.train.checkpoint import (
    Checkpoint,
    Tensors,
    appearing,
    first_non_finite,
    is_complete,
    not_saved,
    open_tensors,
    record_of,
    refused,
    sync_path,
    write_state_file,
)
from fourbits.train.ranks.background_ranks import SavingRanks
from fourbits.train.ranks.failure import OtherRankError
from fourbits.train.ranks.shard_writer import ShardWriter, shard_files


def save_shards(
    ranks: SavingRanks, folder: Path, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]
) -> None:
    """Write folder/step_N; all ranks must call it. Raises what `save_checkpoint` raises.

    files: DTensors of which this rank has a shard, and tensors that are equal on all ranks.
    """
    _refuse_non_finite(ranks, files, step)
    target = folder / f"step_{step}"
    if ranks.agreed(lambda: is_complete(target)):
        return
    if not ranks.is_first:
        try:
            _write(ranks, Path(ranks.agreed(str)), files)
        except OSError as error:
            raise not_saved(error, target) from error
        ranks.agreed(lambda: None)
        return
    with appearing(target) as unfinished:
        ranks.agreed(lambda: str(unfinished))
        write_state_file(unfinished, step, state, _write(ranks, unfinished, files))
    ranks.agreed(lambda: None)


def load_shards(checkpoint: Checkpoint, name: str, expected: Tensors) -> dict[str, Tensor] | None:
    """The tensors of one part, DTensors with this rank's shards; None for a single file of one process.

    expected: DTensors or tensors. Raises ValueError for other names, shapes or dtypes.
    """
    open_tensors(checkpoint, name, expected)
    if f"{name}.safetensors" in checkpoint.files:
        return None
    found = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(checkpoint.path / name)))
    return found


def _write(ranks: SavingRanks, unfinished: Path, files: Mapping[str, Tensors]) -> dict[str, Any]:
    """Write this rank's files, and return the records of all ranks' files."""
    own: dict[str, Any] = {}
    for name, tensors in files.items():
        folder = unfinished / name
        try:
            save(dict(tensors), storage_writer=ShardWriter(folder), process_group=ranks.group)
        except CheckpointException as error:
            raise _own_error(error, ranks.rank) from error
        for path in shard_files(folder, ranks.rank):
            own[f"{name}/{path.name}"] = record_of(path)
        sync_path(folder)
        ranks.progress()
    return {name: record for records in ranks.gathered(own) for name, record in sorted(records.items())}


def _own_error(error: CheckpointException, rank: int) -> BaseException:
    """This rank's error in a failed save, or an error saying that another rank failed."""
    if (own := error.failures.get(rank)) is not None:
        return own[0]
    other, (cause, _) = next(iter(error.failures.items()))
    return OtherRankError(f"rank {other} could not save: {cause}")


def _refuse_non_finite(ranks: SavingRanks, files: Mapping[str, Tensors], step: int) -> None:
    """Raises NonFiniteError on all ranks if one has a shard that is not finite."""
    names = [(name, key) for name, tensors in files.items() for key in tensors]
    local = {
        name: {key: x.to_local() if isinstance(x, DTensor) else x for key, x in tensors.items()}
        for name, tensors in files.items()
    }
    own = first_non_finite(local)
    for found in ranks.gathered(None if own is None else names.index(own)):
        if found is not None:
            raise refused(step, *names[found])
