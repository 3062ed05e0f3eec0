"""The amaxes of the inputs of a run's quantized layers, measured on the run's validation text.

Training scales each batch by its own amax; a server needs one number per layer beforehand.
"""

from functools import partial

import torch
from torch import Tensor, nn

from fourbits.evaluate import evaluation_mode, uncompiled
from fourbits.linear.stacked.layer import converted_layers
from fourbits.train.calibration import calibration_batches
from fourbits.train.load_run import StoredModel


@torch.no_grad()
def input_amaxes(stored: StoredModel, samples: int) -> dict[str, Tensor]:
    """The largest magnitude of every quantized layer's input, fp32 scalars by the name of its weight.

    samples: sequences of the run's length, from each of its sources. Holds the whole model in memory. Raises
    ValueError if the run's text cannot be read.
    """
    try:
        batches = calibration_batches(stored.folder, stored, samples)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"calibration: the run's text cannot be read: {error} Or quantize weights only, with "
            "--calibration 0."
        ) from error
    model = stored.converted("cpu")
    found: dict[str, Tensor] = {}
    layers = list(converted_layers(model.named_modules()))
    hooks = [layer.register_forward_pre_hook(partial(_record, found, f"{n}.weight")) for n, layer in layers]
    with evaluation_mode(model), uncompiled(model):
        for batch in batches:
            for row in batch.split(1):
                model(row)
    for hook in hooks:
        hook.remove()
    return found


def _record(found: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    amax = inputs[0].abs().amax().float().cpu()
    found[name] = torch.maximum(found[name], amax) if name in found else amax
