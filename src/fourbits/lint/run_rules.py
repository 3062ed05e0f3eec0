"""Rules about a run: widths, shards, learning rate and batch, data, checkpoints."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import is_prepared
from fourbits.lint.finding import Finding, LintedRun
from fourbits.model.counts import count_parameters
from fourbits.plan.failures import HOURS_BETWEEN_FAILURES
from fourbits.plan.linears import linear_groups
from fourbits.plan.shards import fitting_ranks, uneven_layers
from fourbits.train.config import missing_path
from fourbits.train.preset_figures import estimated_seconds
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.samples import run_stream

#: factor by which a rate or a batch may differ from presets of similar size
_RATE_RANGE, _BATCH_RANGE = 3.0, 8.0
#: presets of similar size: parameters within this factor
_SIMILAR = 4.0
#: epochs up to which repeated text is nearly as good as new text (arXiv:2305.16264)
_EPOCHS = 4.0
#: share of the time that may be lost to failures
_LOST = 0.05


def widths(run: LintedRun) -> Iterator[Finding]:
    """The sides of linear layers are not multiples of 16."""
    padded = [row for row in run.summary.rows if row.quantized and "padded" in row.reason]
    if padded:
        yield Finding(
            "widths",
            f"{len(padded)} quantized layers have sides that are not multiples of 16, such as "
            f"{padded[0].name} {padded[0].shape[0]}x{padded[0].shape[1]}",
            "Padding them costs time, and FP4 tensor cores need multiples of 32 along K.",
            "Choose widths that are multiples of 32, better of 128.",
        )


def shards(run: LintedRun) -> Iterator[Finding]:
    """Tensor-parallel shards split blocks of the recipe, heads, or groups of Mamba heads."""
    model, seq_len, ranks = run.config.model, run.config.train.seq_len, run.tensor
    groups = linear_groups(model, run.config.recipe)
    found = uneven_layers(model, groups, seq_len, ranks) if ranks > 1 else []
    cut = [each for each in found if each.name != "model.num_groups"]
    fitting = fitting_ranks(model, groups, seq_len, ranks)
    remedy = f"Set parallel.tensor to {fitting}, the most below {ranks} that fits"
    if cut:
        sizes = ", ".join(f"{each.name} {each.size} (each rank needs {each.each})" for each in cut)
        multiples = ", ".join(f"{each.name} a multiple of {each.multiple}" for each in cut)
        yield Finding(
            "shards",
            f"{ranks} ranks cannot share {sizes}",
            "A block or head that two ranks share has values that neither can compute alone.",
            f"{remedy}, or make {multiples}.",
        )
    if len(cut) < len(found):
        yield Finding(
            "mamba-groups",
            f"{ranks} ranks share {model.num_groups} groups of Mamba heads",
            "Heads of a group share B, C and the norm's statistics, so groups are not split.",
            f"{remedy}, or make model.num_groups a multiple of {ranks}.",
        )


def rate_and_batch(run: LintedRun) -> Iterator[Finding]:
    """The learning rate or the batch is far from those of published runs of this size."""
    config = run.config
    own = sum(count_parameters(config.model).values())
    similar = {
        name: preset
        for name, preset in RUN_PRESETS.items()
        if 1 / _SIMILAR <= sum(count_parameters(preset.model).values()) / own <= _SIMILAR
    }
    if not similar:
        return
    for rule, name, value, values, factor in (
        ("rate", "optim.lr", config.optim.lr, [p.optim.lr for p in similar.values()], _RATE_RANGE),
        (
            "batch",
            "tokens per step",
            float(config.train.tokens_per_step),
            [float(p.train.tokens_per_step) for p in similar.values()],
            _BATCH_RANGE,
        ),
    ):
        low, high = min(values) / factor, max(values) * factor
        if not low <= value <= high:
            yield Finding(
                rule,
                f"{name} is {value:,.10g}, and presets near {own / 1e6:,.0f}M parameters have "
                f"{min(values):,.10g} to {max(values):,.10g}",
                "4-bit training diverges earlier than BF16 does where the rate is too high for the batch.",
                f"Compare with {', '.join(similar)}, or measure with a short fourbits compare.",
            )


def missing_data(run: LintedRun) -> Iterator[Finding]:
    """Data paths, or the tokenizer's file, do not exist on this machine."""
    data = run.config.data
    missing = [path for given in data.paths if (path := missing_path(given)) is not None]
    tokenizer = Path(data.tokenizer or "")
    if tokenizer.suffix == ".json" and not tokenizer.exists():  # other names may be of the Hub
        missing.append(tokenizer)
    if missing:
        yield Finding(
            "data",
            f"data.paths or data.tokenizer names {', '.join(map(str, missing))}, which "
            f"{'do' if len(missing) > 1 else 'does'} not exist on this machine",
            "The run would stop before its first step, and nothing about its data could be checked.",
            "Correct the path, or run lint where the data are.",
        )


def blend(run: LintedRun) -> Iterator[Finding]:
    """The blend reads a source many times. Prepared folders only: the size of other text is unknown."""
    data = run.config.data
    if len(data.paths) != 1 or not is_prepared(Path(data.paths[0])):
        return
    unlimited = replace(run.config, data=replace(data, max_epochs=None))
    stream = run_stream(unlimited, PreparedData.open(data.paths[0]))
    ends = stream.blend.cursors(stream.total_samples)
    limit = min(_EPOCHS, data.max_epochs or _EPOCHS)
    for name, windows in zip(stream.names, stream.windows, strict=True):
        epochs = ends[name] / windows.size
        if epochs > limit:
            yield Finding(
                "blend",
                f"the run reads {name!r} {epochs:.1f} times",
                f"Beyond {limit:g} times, repeated text teaches much less than new text (arXiv:2305.16264).",
                "Add text, lower its weight in data.phases, or train on fewer tokens.",
            )


def checkpoints(run: LintedRun) -> Iterator[Finding]:
    """Checkpoints are too rare for the rate of failures, so that too much work is lost."""
    train, gpus = run.config.train, run.gpus
    step = estimated_seconds(run.config) / train.num_steps / gpus
    whole = step * train.num_steps
    between = HOURS_BETWEEN_FAILURES * 3600 / gpus
    steps = train.checkpoint_interval
    interval = whole if steps is None else steps * step
    if train.save_every_minutes is not None:
        interval = min(interval, 60 * train.save_every_minutes)
    if whole > 3600 and interval / 2 / between > _LOST:
        yield Finding(
            "checkpoints",
            f"a checkpoint every {interval / 3600:.1f} h on {gpus} GPUs, of which one fails every "
            f"{between / 3600:.0f} h",
            "Half of an interval is lost at each failure: estimated from the utilization of an H100, and the "
            "failures of arXiv:2407.21783.",
            f"Set train.save_every_minutes to {max(1, round(2 * _LOST * between / 60))} or less.",
        )


RUN_RULES = (widths, shards, rate_and_batch, missing_data, blend, checkpoints)
