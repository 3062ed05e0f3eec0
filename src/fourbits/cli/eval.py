"""Evaluate a model: loss and bits per byte of text, and tasks of lm-evaluation-harness.

MODEL is a run, RUN/checkpoints/step_N, or a transformers folder, in BF16 or NVFP4 (compressed-tensors,
modelopt). It is evaluated in BF16, as in arXiv:2509.25149. With --recipe R, the forward pass in R is measured
and compared as well. Text: the run's validation text; for other models --data, by default the Python standard
library. Results of a run go to RUN/evaluations/step_N.json and its report; those of averaged checkpoints
(--average K) are only printed.

Under torchrun every rank has the whole model and evaluates its part of the text and of the questions.

Tasks need the extra `eval`. --tasks mmlu_pro is the metric of the paper: 5 examples, answers with reasoning.
mmlu_pro_letters is a cheap curve that does not compare with it. paper, paper-general, paper-math,
paper-multilingual, paper-code and paper-commonsense are the paper's lists. Offline: --datasets DIR.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.console import Console

from fourbits.cli.eval_tables import precision_note, task_table, text_table
from fourbits.cli.run_page import refresh_report
from fourbits.compare.terminal import print_table
from fourbits.data.whole_file import write_json
from fourbits.evaluation.evaluate_model import EvalOptions, EvaluationResults, evaluate_model
from fourbits.evaluation.evaluated_model import EvaluatedModel, open_model
from fourbits.harness.results import add_results
from fourbits.harness.tasks import TaskOptions, load_tasks
from fourbits.train.parallel import ParallelConfig
from fourbits.train.ranks.join import joined

EXAMPLE = "fourbits eval runs/30m --tasks mmlu_pro --datasets datasets"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run, a checkpoint or a model folder")
    parser.add_argument("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness, or lists of them")
    parser.add_argument("--recipe", default="bf16", metavar="R", help="nvfp4, trained ...: compare with bf16")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="TEXT", help="text to evaluate on, or a prepared folder"
    )
    parser.add_argument("--no-text", action="store_true", help="run tasks only, no text")
    parser.add_argument(
        "--seq-len", type=int, metavar="T", help="tokens per sample of text (default: the run's, or 2048)"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples per source of text (default: the run's, or 32)"
    )
    parser.add_argument(
        "--shots", type=int, metavar="N", help="number of examples in a prompt (default: each task's)"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N questions of each task, for a trial"
    )
    parser.add_argument(
        "--datasets", type=Path, metavar="DIR", help="read datasets from DIR/OWNER/NAME, without network"
    )
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder with custom task files")
    parser.add_argument("--run-code", action="store_true", help="execute programs that the model writes")
    parser.add_argument(
        "--average",
        type=int,
        default=1,
        metavar="K",
        help="the mean of the weights of the last K checkpoints",
    )
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="sequences per batch (default: 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if present, else cpu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: Namespace) -> int:
    """Evaluate the model, and print or store the results."""
    if args.no_text and not args.tasks:
        raise ValueError("--no-text: leaves nothing to evaluate. Name --tasks, or remove the option.")
    options = EvalOptions(
        recipe=args.recipe,
        text=not args.no_text,
        data=tuple(args.data),
        seq_len=args.seq_len,
        samples=args.samples,
        limit=args.limit,
        batch_size=args.batch,
    )
    how = TaskOptions(shots=args.shots, datasets=args.datasets, include=args.include, run_code=args.run_code)
    with joined(ParallelConfig(), args.device) as ranks:
        tasks = load_tasks(args.tasks.split(","), how) if args.tasks else None
        model = open_model(args.model, ranks.device, args.average)

        def report(what: str, done: int, count: int) -> None:
            ranks.progress()
            if ranks.is_first and sys.stderr.isatty():
                _show(what, done, count)

        found = evaluate_model(model, options, tasks, ranks, report)
        if ranks.is_first:
            _store(args, model, found)
    return 0


def _store(args: Namespace, model: EvaluatedModel, found: EvaluationResults) -> None:
    """Write the results where they belong, and print them."""
    step = model.run.step if model.run else None
    record: dict[str, Any] = {"model": str(args.model), "step": step, "precisions": found.precisions}
    if args.average > 1:
        record["average"] = args.average
    if args.out:
        write_json(args.out, record)
    where = None
    if model.run is not None and args.limit is None and args.average == 1:
        where = add_results(model.run.folder, model.run.step, found.precisions)
        refresh_report(model.run.folder)
    if args.json:
        print(json.dumps(record, indent=2))
        return
    console = Console()
    for table in (text_table(found.precisions), task_table(found.precisions)):
        if table is not None:
            print_table(table, console)
    for note in precision_note(found, args.recipe):
        console.print(note, soft_wrap=True)
    if where is not None:
        print(f"results: {where}")


def _show(what: str, done: int, count: int) -> None:
    print(f"\r{what}: {done:,} of {count:,}", end="\n" if done == count else "", file=sys.stderr, flush=True)
