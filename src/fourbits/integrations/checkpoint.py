"""The state that another library's checkpoint needs so that a converted model resumes with equal bits.

Random bits follow from seed, step and token. So the state consists of the recipe, which reveals a wrong
resume, and of the values that amax policies and adaptive layouts have tracked.
"""

import base64
import warnings
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import nn

from fourbits.linear.amax_policy import Reduce
from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state
from fourbits.linear.conversion import conversions_of, layers_digest
from fourbits.linear.step import enter_phase, last_step


def run_state(model: nn.Module, reduce: Reduce | None = None) -> dict[str, Any]:
    """The state to save with weights, optimizer and step, in JSON's types.

    recipe: names, hashes and seeds of the recipes, for readers. layers: hash of the quantized layers and
    their tables. tracked: the recipe state in base64, if there is one. step: the last step, which names the
    phase of a schedule. reduce: as for `recipe_state`; then all ranks must call this.
    """
    used = [f"{each.recipe.name} ({each.recipe.digest}), seed {each.seed}" for each in conversions_of(model)]
    tracked = recipe_state(model, reduce)
    return {
        "recipe": "; ".join(used) or "none",
        "layers": layers_digest(model),
        "tracked": base64.b64encode(save(tracked)).decode() if tracked else "",
        "step": last_step(model),
    }


def restore_run_state(
    model: nn.Module, saved: Mapping[str, Any] | None, reduce: Reduce | None = None, strict: bool = True
) -> None:
    """Load a saved state into a model that was converted as before.

    saved: what `run_state` returned, or None for a checkpoint without it, which is a warning, but an error if
    the recipe tracks past steps. Raises ValueError for a model that quantizes other layers, or with another
    recipe or seed; with strict=False that is only a warning, and tracked values start from the beginning.
    """
    now = run_state(model, reduce)
    if not saved:
        _report(
            "has no recipe recorded, so it cannot be compared with the model's. Write checkpoints with the "
            "callback or the function of fourbits.integrations, or pass strict=False if the recipe is right.",
            bool(now["tracked"]) and strict,
        )
    elif saved["layers"] != now["layers"]:
        _report(
            f"was written with recipe {saved['recipe']}, the model has {now['recipe']}, and they quantize "
            "differently. Convert the model with the recipe, the seed and the choice of layers of the "
            "checkpoint, or pass strict=False to change them here.",
            strict,
        )
    else:
        enter_phase(model, saved.get("step", 0))
        if saved["tracked"]:
            load_recipe_state(model, load(base64.b64decode(saved["tracked"])))


def _report(problem: str, is_error: bool) -> None:
    text = f"fourbits: the checkpoint to resume from {problem}"
    if is_error:
        raise ValueError(text)
    warnings.warn(text, stacklevel=4)
