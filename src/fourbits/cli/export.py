"""Write the model of a run as a folder for Hugging Face transformers: weights, configuration and tokenizer.

The weights are the masters of the newest checkpoint, rounded to --dtype and not quantized; config.json
records the recipe. A model in the folder is replaced when the new one is complete. AutoModelForCausalLM and
AutoTokenizer load the folder, and so does fourbits.load_hf.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from fourbits.exchange.config import to_hf_config
from fourbits.train.export import export_trained
from fourbits.train.load_run import load_trained

EXAMPLE = "fourbits export runs/30m --out exported/30m"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by fourbits train")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write the model")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights (default: bf16)")


def run(args: Namespace) -> int:
    """Export the run."""
    trained = load_trained(args.run)
    export_trained(trained, args.out, dtype=DTYPES[args.dtype])
    recipe = trained.config.recipe
    print(
        f"{args.out}: {to_hf_config(trained.config.model)['architectures'][0]} of step {trained.step}, "
        f"{args.dtype}, {trained.tokenizer.size} tokens, trained with {recipe.name} ({recipe.digest})"
    )
    return 0
