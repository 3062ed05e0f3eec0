"""Continue texts with the trained model of a run.

A single text streams to the terminal; several are continued in batches and printed in order. --recipe trained
runs the forward pass in the precision of training, with weights quantized once and constant input scales from
the run's validation text, so that a text does not depend on its batch.
"""

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

import torch

from fourbits.device import probe
from fourbits.generate.generate import generate
from fourbits.generate.held import held_operands
from fourbits.generate.sampling import Sampling
from fourbits.generate.text import TextStream
from fourbits.linear.convert import convert
from fourbits.train.calibration import calibration_batches
from fourbits.train.load_run import Trained, load_trained

EXAMPLE = 'fourbits generate runs/30m "def main(" --tokens 40'


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by fourbits train")
    parser.add_argument("text", nargs="+", metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="maximum new tokens per text (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature (default: 0, always the most likely token)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the smallest set of tokens with total probability P",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="random seed of sampling (default: 0)"
    )
    parser.add_argument(
        "--recipe",
        choices=("bf16", "trained"),
        default="bf16",
        help="precision of the forward pass (default: bf16)",
    )
    parser.add_argument("--batch", type=int, default=64, metavar="B", help="texts per batch (default: 64)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if present, else cpu")


def run(args: Namespace) -> int:
    """Continue the given texts, and print them."""
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    device = torch.device(probe(args.device).torch_device)
    trained = load_trained(args.run, device)
    prompts = [_prompt(trained, text) for text in args.text]
    with ExitStack() as stack:
        if args.recipe == "trained":
            batches = [batch.to(device) for batch in calibration_batches(args.run, trained)]
            stack.enter_context(held_operands(trained.model, batches))
        else:
            convert(trained.model, "bf16")
        if len(prompts) == 1:
            _stream(trained, args.text[0], prompts[0], args.tokens, sampling)
        else:
            _print_all(trained, args.text, prompts, args.tokens, sampling, args.batch)
    return 0


def _prompt(trained: Trained, text: str) -> list[int]:
    """The tokens of a text after an end token, which precedes every document in training."""
    return [trained.tokenizer.end_id, *trained.tokenizer.encode(text)]


def _stream(trained: Trained, text: str, prompt: list[int], tokens: int, sampling: Sampling) -> None:
    stream = TextStream(trained.tokenizer)
    print(text, end="", flush=True)

    def show(_: int, token: int) -> None:
        print(stream.add(token), end="", flush=True)

    known = trained.tokenizer
    generate(
        trained.model,
        [prompt],
        tokens,
        sampling=sampling,
        end=known.end_id,
        num_ids=known.size,
        on_token=show,
    )
    print(stream.rest())


def _print_all(
    trained: Trained, texts: list[str], prompts: list[list[int]], tokens: int, sampling: Sampling, batch: int
) -> None:
    known = trained.tokenizer
    continued = generate(
        trained.model,
        prompts,
        tokens,
        sampling=sampling,
        end=known.end_id,
        num_ids=known.size,
        batch_size=batch,
    )
    for text, found in zip(texts, continued, strict=True):
        print(f"{text}{known.decode(found)}\n")
