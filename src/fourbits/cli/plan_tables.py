"""The tables of `fourbits plan` in a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from fourbits.compare.number_format import count, long_duration, short_count
from fourbits.compare.report.plan_tables import TextTable, layout_text, megawatt_hours
from fourbits.plan.estimate import Plan
from fourbits.plan.published import Prediction
from fourbits.plan.road import Stage
from fourbits.plan.simulate import SEEDS, cluster_of, sensitivity

_GIB = 2**30


def shown(table: TextTable) -> Table:
    """A table of texts for the terminal."""
    found = Table(*table.columns, title=table.title, title_justify="left")
    for row in table.rows:
        found.add_row(*map(Text, row))
    return found


def published_table(found: Sequence[Prediction]) -> Table:
    """Predicted and measured values in one table."""
    columns = ("model, micro-batch", "recipe", "GPU", "predicted tokens/s", "measured tokens/s", "deviation")
    columns += ("predicted GiB", "measured GiB", "deviation")
    rows: list[tuple[str, ...]] = []
    for each in found:
        case, memory = each.case, each.memory_deviation
        packed = ", packed" if case.recipe.saved_inputs == "packed" else ""
        rows.append(
            (
                f"{case.name}, {case.layout.micro_batch} x {case.seq_len}",
                case.recipe.name + packed,
                case.gpu,
                count(each.tokens_per_second),
                count(case.tokens_per_second),
                f"{each.speed_deviation:+.0%}",
                "" if case.gib is None else f"{each.gib:.1f}",
                "" if case.gib is None else f"{case.gib:.1f}",
                "" if memory is None else f"{memory:+.1%}",
                case.why,
            )
        )
    title = "predicted beside measured; tokens/s and GiB of one GPU"
    return shown(TextTable(title, (*columns, "why"), rows))


def simulation(plan: Plan) -> Table:
    """Simulations of the run, with the default assumptions and with each one changed."""
    cluster = cluster_of(plan)
    rows = [(each.what, long_duration(each.seconds), f"{each.change:+.1%}") for each in sensitivity(cluster)]
    undisturbed = long_duration(cluster.steps * cluster.step)
    title = f"simulated, means of {SEEDS} seeds, without disturbance {undisturbed}; predicted"
    return shown(TextTable(title, ("assumption", "time", "change"), rows))


def road_table(stages: Sequence[Stage]) -> Table:
    """The stages of the road to 12B, planned."""
    columns = (
        "stage",
        "parameters",
        "tokens",
        "steps",
        "GPUs",
        "layout",
        "GiB",
        "step s",
        "tokens/s",
        "time",
    )
    columns += ("MWh", "checkpoint every")
    return shown(
        TextTable("the road to 12B in nvfp4; predicted", columns, [road_row(stage) for stage in stages])
    )


def road_row(stage: Stage) -> tuple[str, ...]:
    """One stage, in the columns of the table."""
    plan = stage.plan()
    own, steps = plan.estimate, plan.config.train.num_steps
    return (
        stage.preset,
        short_count(sum(plan.parameters.values())),
        short_count(plan.tokens),
        count(steps),
        f"{stage.gpus} {stage.gpu}",
        layout_text(own.choice.layout),
        f"{own.choice.memory.total / _GIB:.0f}",
        f"{own.step_seconds:.2f}",
        count(own.tokens_per_second),
        long_duration(own.seconds),
        megawatt_hours(own.megawatt_hours),
        f"{count(plan.failures.best_steps(own.step_seconds, steps))} steps",
    )
