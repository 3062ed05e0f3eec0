"""Measures one trained run, and caches the findings in techniques.json until its checkpoint changes.

Quantizers run uncompiled here, because each of many formats quantizes too few tensors for compilation to pay
off.
"""

from dataclasses import replace
from pathlib import Path

from fourbits.compare.run.jobs import SMALL_MODEL
from fourbits.compare.techniques.findings import Techniques
from fourbits.compare.techniques.gradients import gradient_error, transform_effect
from fourbits.compare.techniques.operands import (
    largest_elements,
    operand_errors,
    rounding_bias,
    weight_mismatch,
)
from fourbits.compare.techniques.trained import LayerTensors, TrainedModel
from fourbits.data.whole_file import write_json
from fourbits.quant.cpu.compiled import uncompiled_quantizers
from fourbits.settings import build, to_dict
from fourbits.train.fork import Fork
from fourbits.train.run import num_threads
from fourbits.train.run_folder import read_json

TECHNIQUES_JSON = "techniques.json"
#: the formats compared, by the recipes that train in them
FORMATS = ("fp8", "mxfp4", "nvfp4")
#: recipes whose gradients are measured: the formats', and NVFP4 without any technique
GRADIENTS = (*FORMATS, "nvfp4-naive")
#: recipes that round dY stochastically, and transform the operands of Wgrad
TECHNIQUE_RECIPES = ("mxfp4", "nvfp4")


def measure_once(run: Path, path: Path) -> Techniques:
    """The findings in `path` if they are of the run's newest checkpoint; else measures and writes them."""
    checkpoint = Fork.of(run).sha256
    if path.is_file():
        record = read_json(path)
        if record.get("checkpoint") == checkpoint:
            return build(Techniques, record, str(path))
    found = replace(measure(run), checkpoint=checkpoint)
    write_json(path, to_dict(found))
    return found


def measure(run: Path) -> Techniques:
    """Measure the newest checkpoint of a BF16 run, on the CPU. Raises what `TrainedModel.of_run` raises."""
    trained = TrainedModel.of_run(run)
    # A second thread gains little for small layers, and loses much if another process uses the core.
    small = sum(layer.weight.numel() for layer in trained.layers.values()) <= SMALL_MODEL
    with num_threads(1 if small else None), uncompiled_quantizers():
        layers = trained.tensors(trained.batches[0])
        exact = [trained.gradients(batch) for batch in trained.batches]
        gradients = [
            gradient_error(trained, batch, exact[batch], recipe)
            for recipe in GRADIENTS
            for batch in range(len(exact))
        ]
        return replace(
            _of_layers(layers),
            run=str(run),
            step=trained.step,
            gradients=tuple(gradients),
            tokens_per_batch=trained.batches[0][:, 1:].numel(),
            batches=len(exact),
        )


def _of_layers(layers: list[LayerTensors]) -> Techniques:
    """The measurements of single layers."""
    numbered = list(enumerate(layers))
    return Techniques(
        run="",
        checkpoint="",
        step=0,
        layers=tuple(layer.name for layer in layers),
        tokens_per_batch=0,
        batches=0,
        gradients=(),
        operands=tuple(
            found for name in FORMATS for i, layer in numbered for found in operand_errors(name, i, layer)
        ),
        largest=tuple(
            found for name in FORMATS for layer in layers for found in largest_elements(name, layer)
        ),
        rounding=tuple(rounding_bias(name, i, layer) for name in TECHNIQUE_RECIPES for i, layer in numbered),
        weights=tuple(found for layer in layers for found in weight_mismatch(layer)),
        transforms=tuple(
            transform_effect(name, i, layer) for name in TECHNIQUE_RECIPES for i, layer in numbered
        ),
    )
