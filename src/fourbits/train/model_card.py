"""The model card of an export: what the model is, how to load it, and the manifest of its run."""

import json
from typing import Any

from fourbits.exchange.config import to_hf_config
from fourbits.exchange.model_card import MARK
from fourbits.train.export_plan import ExportOptions, ExportPlan
from fourbits.train.load_run import StoredModel

_LOADERS = {
    "hf": "transformers: `AutoModelForCausalLM.from_pretrained(folder)`; fourbits: `load_hf(folder)`.",
    "compressed-tensors": "vLLM; transformers with the package compressed-tensors installed; fourbits: "
    "`load_hf(folder)`.",
    "modelopt": "vLLM, SGLang and TensorRT-LLM, as a checkpoint of modelopt; fourbits: `load_hf(folder)`. "
    "transformers alone does not decode this layout.",
}


def card_of(stored: StoredModel, options: ExportOptions, plan: ExportPlan) -> str:
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
| weights | {_weights(options, plan)} |
| tokenizer | {stored.tokenizer.size} tokens, SHA-256 {stored.tokenizer.sha256} |

{"".join(f"Note: {note}.{chr(10) * 2}" for note in plan.notes)}Readers: {_LOADERS[options.format]}

`config.json` has the whole recipe under `fourbits`. The manifest of the run:

```json
{json.dumps(_public(stored.manifest), indent=1)}
```
"""


def _weights(options: ExportOptions, plan: ExportPlan) -> str:
    if plan.quantization is None:
        return f"masters rounded to {options.dtype}, not quantized"
    inputs = "inputs calibrated (W4A4)" if plan.quantization.with_input else "inputs in BF16 (W4A16)"
    count = len(plan.quantization.weights)
    return f"{count} linear layers in NVFP4, {options.format} layout, {inputs}; the others in BF16"


def _public(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest without the paths of the machine that trained."""
    data = {key: value for key, value in manifest["data"].items() if key != "folder"}
    return {**manifest, "data": data}
