"""Export the trained model of a run, with its tokenizer and its recipe: BF16, or NVFP4 in a public format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourbits.exchange.compare import Compared, compare
from fourbits.exchange.files import WeightFiles, read_config
from fourbits.exchange.folder import outgoing_of, save_hf
from fourbits.exchange.nvfp4_checkpoints import CHECKPOINT_FORMATS
from fourbits.exchange.weights import hf_names
from fourbits.recipe.provenance import ENTRY, provenance
from fourbits.settings import build, to_dict
from fourbits.train.export_weights import DTYPES, ExportOptions, weights_to_export
from fourbits.train.load_run import StoredModel, Trained
from fourbits.train.model_card import card_of


@dataclass(frozen=True, slots=True)
class Exported:
    """An export: its options, how it compared with the run, and notes for its user."""

    options: ExportOptions
    compared: Compared
    notes: tuple[str, ...]


def export_trained(run: Trained, folder: Path | str, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a run's masters, rounded to dtype, for AutoModelForCausalLM and AutoTokenizer.

    The weights are not quantized; config.json records the recipe under `fourbits`. Raises ValueError and
    OSError as `save_hf` does.
    """
    save_hf(
        run.model.state_dict(),
        run.config.model,
        folder,
        dtype=dtype,
        tokenizer=run.tokenizer,
        provenance=provenance(run.config.recipe),
    )


def export_stored(stored: StoredModel, folder: Path | str, options: ExportOptions) -> Exported:
    """Write the checkpoint of a run into a folder, a tensor at a time, and compare what was written.

    Raises ValueError for a model that the format cannot express, and otherwise as `save_hf`; then nothing in
    the folder has changed.
    """
    weights = weights_to_export(stored, options)
    entry = {**provenance(stored.config.recipe), "export": {**to_dict(options), "step": stored.step}}
    compared = save_hf(
        stored.state,
        stored.config.model,
        folder,
        dtype=DTYPES[options.dtype],
        tokenizer=stored.tokenizer,
        provenance=entry,
        quantization=weights.quantization,
        card=card_of(stored, options, weights),
        verify=True,
    )
    assert compared is not None
    return Exported(options, compared, weights.notes)


def check_export(stored: StoredModel, folder: Path | str) -> Exported:
    """Compare the weights in an exported folder with the run that it came from; writes nothing.

    Scales of inputs must be positive; they are not measured again. Raises ValueError naming the first tensor
    that differs, for a folder of another step, and for one that `fourbits export` did not write.
    """
    folder = Path(folder)
    options = _recorded_options(folder, stored)
    weights = weights_to_export(stored, options, _input_scales(folder, stored, options))
    outgoing = outgoing_of(
        stored.state, stored.config.model, DTYPES[options.dtype], stored.tokenizer, weights.quantization
    )
    return Exported(options, compare(folder, outgoing), weights.notes)


def _recorded_options(folder: Path, stored: StoredModel) -> ExportOptions:
    entry: Any = read_config(folder).get(ENTRY)
    recorded = entry.get("export") if isinstance(entry, Mapping) else None
    if not isinstance(recorded, Mapping):
        raise ValueError(f"{folder}: config.json must record how it was exported. Export the run again.")
    found = dict(recorded)
    step = found.pop("step", None)
    if step != stored.step:
        raise ValueError(
            f"{folder}: must be of step {stored.step}, the run's newest checkpoint, got {step}. Export the "
            "run again."
        )
    return build(ExportOptions, found, f"{folder}: {ENTRY}.export")


def _input_scales(folder: Path, stored: StoredModel, options: ExportOptions) -> dict[str, Tensor] | None:
    """The scales of inputs in a folder, by our names of weights. ValueError unless all are positive."""
    if options.format == "hf":
        return None
    checkpoint, files = CHECKPOINT_FORMATS[options.format], WeightFiles(folder)
    found: dict[str, Tensor] = {}
    for ours, theirs in hf_names(stored.config.model, files).items():
        name = f"{theirs.removesuffix('.weight')}.{checkpoint.input_scale}"
        if name in files:
            found[ours] = checkpoint.factor(name, files)
            if not 0 < found[ours] < float("inf"):
                raise ValueError(
                    f"{folder}: {name!r} must be positive and finite, got {float(found[ours])}. Export the "
                    "model again."
                )
    return found
