"""The model card of an export: what the model is, how to load it, and the manifest of its run."""

import json
from pathlib import Path
from typing import Any

from fourbits.exchange.config import to_hf_config
from fourbits.exchange.model_card import MARK
from fourbits.harness.results import read_results
from fourbits.harness.score_rows import score_rows
from fourbits.train.export_weights import ExportedWeights, ExportOptions
from fourbits.train.load_run import StoredModel

_LOADERS = {
    "hf": "transformers: `AutoModelForCausalLM.from_pretrained(folder)`; fourbits: `load_hf(folder)`.",
    "compressed-tensors": "vLLM; transformers with the package compressed-tensors installed; fourbits: "
    "`load_hf(folder)`.",
    "modelopt": "vLLM, SGLang and TensorRT-LLM, as a checkpoint of modelopt; fourbits: `load_hf(folder)`. "
    "transformers alone does not decode this format.",
}


def card_of(stored: StoredModel, options: ExportOptions, weights: ExportedWeights) -> str:
    """The text of README.md."""
    recipe = stored.config.recipe
    return f"""---
library_name: transformers
tags: [fourbits, nvfp4]
---
{MARK}

# {to_hf_config(stored.config.model)["architectures"][0]} trained with {recipe.name}

| | |
|---|---|
| recipe | {recipe.name}, hash {recipe.digest}{f", {recipe.source}" if recipe.source else ""} |
| steps | {stored.step} |
| weights | {_weights(options, weights)} |
| tokenizer | {stored.tokenizer.size} tokens, SHA-256 {stored.tokenizer.sha256} |

{_results(stored)}{_notes(weights)}Readers: {_LOADERS[options.format]}

`config.json` has the whole recipe under `fourbits`. The manifest of the run:

```json
{json.dumps(_public(stored.manifest), indent=1)}
```
"""


def _notes(weights: ExportedWeights) -> str:
    return "".join(f"Note: {note}.\n\n" for note in weights.notes)


def _weights(options: ExportOptions, weights: ExportedWeights) -> str:
    if weights.quantization is None:
        return f"masters rounded to {options.dtype}, not quantized"
    inputs = "inputs calibrated (W4A4)" if weights.quantization.with_input else "inputs in BF16 (W4A16)"
    count = len(weights.quantization.weights)
    return f"{count} linear layers in NVFP4, {options.format} format, {inputs}; the others in BF16"


def _public(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest without the paths of the machine that trained."""
    data = {key: value for key, value in manifest["data"].items() if key != "folder"}
    ancestry = [
        {key: Path(value).name if key in ("run", "model") else value for key, value in entry.items()}
        for entry in manifest.get("ancestry", [])
    ]
    return {**manifest, "data": data, "ancestry": ancestry}


def _results(stored: StoredModel) -> str:
    """The scores of the tasks that the checkpoint was evaluated on, as a section; empty without any."""
    found = [each for each in read_results(stored.folder) if each.step == stored.step]
    rows = score_rows(found[0].precisions) if found else []
    if not rows:
        return ""
    names = list(found[0].precisions)
    head = ["task", "metric", "shots", *names, "paper, FP8 (%)", "paper, NVFP4 (%)"]
    lines = ["## Results", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [row["task"], row["metric"], row["shots"], *(row["values"].get(name, "") for name in names)]
        lines.append(f"| {' | '.join([*cells, *map(str, row['paper'] or ('', ''))])} |")
    note = "The paper's model (arXiv:2509.25149) has 12B parameters and was trained on 10T tokens."
    return "\n".join((*lines, "", note, "", ""))
