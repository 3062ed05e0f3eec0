"""Sections of a comparison's report that are not charts: table, costs, precision, sample, text, commands."""

from collections.abc import Mapping, Sequence

from fourbits.compare import words
from fourbits.compare.comparison import Comparison
from fourbits.compare.corpus import CorpusFacts
from fourbits.compare.html import Markup, Node, join, section, table, tag
from fourbits.compare.precision_map import legend, precision_map, reasons, why_kept
from fourbits.compare.sample import Sample
from fourbits.compare.table import Row

Colours = Mapping[str, str]


def result_section(comparison: Comparison, rows: Sequence[Row], colours: Colours) -> Markup:
    """The final table."""
    head: list[Node] = ["recipe", "validation loss", f"gap to {comparison.baseline}", "gap", "training loss"]
    head += ["tokens/s", f"of {comparison.baseline}", "peak memory", "seeds", "course"]
    body = [_result_row(row, row.recipe == comparison.baseline, colours[row.recipe]) for row in rows]
    note = "Losses and gaps in nats per token, after the last step. tokens/s: of the median training step."
    if len(comparison.seeds) > 1:
        note += f" {words.PLUS_MINUS}: standard deviation over seeds; a gap is taken within its seed."
    return section("Result", table(head, body), tag("p", note, class_="note"))


def _result_row(row: Row, is_baseline: bool, colour: str) -> list[Node]:
    course: Node = row.verdict
    if row.verdict != "stable":
        course = tag("span", row.verdict, class_="bad", title=row.verdict_reason)
    return [
        tag("span", row.recipe, class_="name", style=f"--c:{colour}"),
        words.loss(row.val_loss, row.val_loss_spread),
        words.DASH if is_baseline else words.signed(row.gap_nats, 4, row.gap_nats_spread),
        words.DASH if is_baseline else words.percent(row.gap_percent),
        words.loss(row.train_loss),
        words.count(row.tokens_per_second),
        words.ratio(row.speed_ratio),
        words.mebibytes(row.peak_memory_bytes),
        row.seeds,
        course,
    ]


def cost_section(comparison: Comparison, rows: Sequence[Row], colours: Colours) -> Markup:
    """Bars of throughput and of memory."""
    speeds = {row.recipe: (row.tokens_per_second, words.count(row.tokens_per_second)) for row in rows}
    memory = {
        row.recipe: (float(row.peak_memory_bytes), words.mebibytes(row.peak_memory_bytes)) for row in rows
    }
    ratios = {row.recipe: words.ratio(row.speed_ratio) for row in rows}
    small = tag("small", f"and ratio to {comparison.baseline}")
    left = tag("div", tag("h3", "Tokens per second", small), _bars(speeds, colours, ratios))
    right = tag("div", tag("h3", "Peak memory"), _bars(memory, colours, {}))
    note = (
        "Costs of this machine, which computes the numbers of 4-bit hardware without its speed. Memory is "
        "the largest of the process, or of the accelerator, while the run lasted."
    )
    if any(made and made.jobs > 1 for made in comparison.made.values()):
        note += " Several runs shared the machine: a step is slower than alone, and their memory adds up."
    return section("Speed and memory", tag("div", left, right, class_="bars"), tag("p", note, class_="note"))


def _bars(values: Mapping[str, tuple[float, str]], colours: Colours, notes: Mapping[str, str]) -> Markup:
    largest = max(value for value, _ in values.values())
    items: list[Node] = []
    for name, (value, text) in values.items():
        style = f"--c:{colours[name]}"
        bar = tag("span", class_="bar", style=f"{style};width:{100 * value / largest:.1f}%")
        note = tag("small", notes[name]) if name in notes else None
        items += [tag("dt", name, style=style), tag("dd", bar), tag("dd", text, note, class_="value")]
    return tag("dl", *items)


def maps_section(comparison: Comparison, colours: Colours) -> Markup:
    """The precision map of every recipe that quantizes anything, with every linear and its reason."""
    run = comparison.any_run
    found = {name: runs[comparison.seeds[0]].manifest["precision"] for name, runs in comparison.runs.items()}
    found = {name: each for name, each in found.items() if each["share_of_linears"] > 0}
    parts: list[Node] = [legend(list(found.values()), colours)]
    for recipe, precision in found.items():
        kept = why_kept(precision)
        what = f"In BF16: {kept}. All linears" if kept else "All linears"
        parts.append(precision_map(recipe, precision, run.config["model"]["pattern"], colours))
        parts.append(tag("details", tag("summary", what), reasons(precision)))
    lead = "Every linear, blocks in order (M: Mamba-2, -: FFN, *: attention). Outlined: kept in BF16."
    return section("Precision map", *parts, lead=lead) if found else join()


def sample_section(sample: Sample) -> Markup:
    """What the model writes."""
    text = tag("pre", tag("span", sample.prompt, class_="prompt"), sample.continuation, class_="wrap")
    note = (
        f"The {sample.recipe} model of seed {sample.seed} continues the grey text, which is from the "
        f"validation text of {sample.source}, at temperature {sample.temperature:g}."
    )
    return section("A continuation", text, tag("p", note, class_="note"))


def corpus_section(corpus: CorpusFacts) -> Markup:
    """Where the text came from, and its unigram entropy."""
    head: list[Node] = ["source", "licence", "documents", "text MB", "tokens", "unigram entropy"]
    rows: list[list[Node]] = [
        [
            source.name,
            source.licence or "unknown",
            words.count(source.documents),
            f"{source.text_bytes / 1e6:.2f}",
            words.count(source.tokens),
            f"{source.unigram_entropy:.3f}",
        ]
        for source in corpus.sources
    ]
    note = (
        f"Tokenizer: {corpus.vocabulary} ids, sha256 {corpus.tokenizer_sha256[:16]}. The unigram entropy, in "
        "nats per token, is the loss of a model that knows how frequent each token is and nothing else; over "
        f"all sources it is {corpus.unigram_entropy:.3f}."
    )
    return section("Text", table(head, rows, text_columns=2), tag("p", note, class_="note"))


def commands_list(commands: Sequence[str]) -> Markup:
    """What to type to repeat it."""
    return join(tag("h3", "To repeat it"), tag("pre", "\n".join(commands)))
