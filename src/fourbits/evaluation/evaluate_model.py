"""One evaluation: the loss on text and the scores of tasks, in BF16 and in a recipe's precision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourbits.evaluate import HeldOut, evaluate, total_loss
from fourbits.evaluation.cost import differences, loss_values, total
from fourbits.evaluation.evaluated_model import BF16, EvaluatedModel
from fourbits.generate.held import HeldLayer, calibrate, in_use
from fourbits.harness.scoring import Report
from fourbits.harness.tasks import Tasks, run_tasks
from fourbits.harness.text_model import TextModel
from fourbits.train.ranks.ranks import Ranks

#: samples of each source on which the amaxes of inputs are measured
CALIBRATION = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """Options of an evaluation. recipe: bf16, or one to compare with it; text: whether to measure loss.

    data, seq_len, samples: see `EvaluatedModel.texts`. limit: questions per task. batch_size: in sequences.
    """

    recipe: str = BF16
    text: bool = True
    data: tuple[str, ...] = ()
    seq_len: int | None = None
    samples: int | None = None
    limit: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("seq_len", "samples", "limit", "batch_size"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')}: must be at least 1, got {value}. Omit it for its default."
                )


@dataclass(frozen=True, slots=True)
class EvaluationResults:
    """Results as plain values, in the form that results.py stores. layers: number of quantized layers."""

    precisions: dict[str, dict[str, Any]]
    layers: int


def evaluate_model(
    model: EvaluatedModel,
    options: EvalOptions,
    tasks: Tasks | None,
    ranks: Ranks,
    report: Report | None = None,
) -> EvaluationResults:
    """Evaluate in BF16 and, unless options.recipe is bf16, in that recipe's precision as well.

    ranks: processes that share the work, each with a separate model; only rank 0 has the scores of tasks.

    The amaxes of inputs are constant, measured on samples of the text or read from the checkpoint, so that no
    result depends on a batch. Raises ValueError for the same reasons as the functions that it calls.
    """
    recipe = options.recipe
    layers = [] if recipe == BF16 else model.layers(recipe)
    found: dict[str, dict[str, Any]] = {BF16: {}} | ({recipe: {}} if layers else {})
    uncalibrated = any(layer.amax is None for layer in layers)
    if options.text or uncalibrated:
        texts = model.texts(options.data, options.seq_len, options.samples)
        if uncalibrated:
            device = model.model.embed.weight.device
            batches = [text.samples[:CALIBRATION, :-1].clamp(min=0).to(device) for text in texts.values()]
            calibrate(model.model, layers, batches)
        if options.text:
            measured = _on_text(model, layers, recipe, texts, options.batch_size, ranks)
            for precision, values in measured.items():
                found[precision]["text"] = values
    if tasks is not None:
        text = TextModel(model.model, model.tokenizer, model.prefix)
        sharing = ranks if ranks.world > 1 else None
        for precision, part in found.items():
            with in_use(layers if precision != BF16 else ()):
                part["tasks"] = run_tasks(tasks, text, limit=options.limit, report=report, ranks=sharing)
    return EvaluationResults(found, len(layers))


def _on_text(
    model: EvaluatedModel,
    layers: Sequence[HeldLayer],
    recipe: str,
    texts: Mapping[str, HeldOut],
    batch_size: int,
    ranks: Ranks,
) -> dict[str, dict[str, Any]]:
    """For each precision, the losses on every source and on all text."""
    if not layers:
        losses = evaluate(model.model, texts, batch_size, ranks)
        sources = {name: loss_values(loss) for name, loss in losses.items()}
        return {BF16: {"sources": sources, "all": loss_values(total_loss(losses.values()))}}
    each = differences(model.model, layers, texts, batch_size, ranks)
    every = total(each)
    plain = {name: loss_values(one.bf16) for name, one in each.items()}
    quantized = {name: one.of_quantized() for name, one in each.items()}
    return {
        BF16: {"sources": plain, "all": loss_values(every.bf16)},
        recipe: {"sources": quantized, "all": every.of_quantized()},
    }
