"""Write the model of a run as a folder for Hugging Face transformers, vLLM and other readers.

--format hf (default) rounds the newest checkpoint's FP32 master weights to --dtype. compressed-tensors and
modelopt store the linear layers that the recipe trains in NVFP4 as the codes and scales of the training
forward, and the others in BF16. Inputs are calibrated on validation text, which holds the model in memory;
with --calibration 0 only weights are quantized (W4A16). The new files are read back and compared before they
replace a model in the folder. config.json records the recipe; fourbits.load_hf reads every format.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fourbits.exchange.config import to_hf_config
from fourbits.exchange.model_card import CARD, may_write_card
from fourbits.train.export import Exported, check_export, export_stored
from fourbits.train.export_weights import DTYPES, FORMATS, SCALES, ExportOptions
from fourbits.train.load_run import StoredModel, open_trained

EXAMPLE = "fourbits export runs/30m --format compressed-tensors --scales shared --out exported/30m"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by fourbits train")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write the model")
    parser.add_argument("--format", choices=FORMATS, help="format of the files (default: hf)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights with --format hf (default: bf16)"
    )
    parser.add_argument(
        "--scales",
        choices=SCALES,
        help="global scales of projections that servers fuse (q, k, v; gate, up): those of training, which "
        "must agree (default); shared: quantize again with one per group; separate: those of training, even "
        "if they differ, for readers that do not fuse",
    )
    parser.add_argument(
        "--calibration",
        type=int,
        metavar="N",
        help="validation sequences per source for calibration; 0: quantize weights only (default: 32)",
    )
    parser.add_argument("--keep-bf16", nargs="+", metavar="NAMES", help="patterns of layers to write in BF16")
    parser.add_argument(
        "--check", action="store_true", help="compare the model in FOLDER with the run, and write nothing"
    )


def run(args: Namespace) -> int:
    """Export the run, or check an export of it."""
    names = ("format", "dtype", "scales", "calibration", "keep_bf16")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if "keep_bf16" in given:
        given["keep_bf16"] = tuple(given["keep_bf16"])
    if args.check and given:
        option = next(iter(given)).replace("_", "-")
        raise ValueError(
            f"--check takes the settings of the export from {args.out}, got --{option}. Remove the option."
        )
    stored = open_trained(args.run)
    if args.check:
        print(_described(stored, args.out, check_export(stored, args.out)))
        return 0
    print(_described(stored, args.out, export_stored(stored, args.out, ExportOptions(**given))))
    if not may_write_card(args.out):
        print(f"{args.out / CARD}: unchanged; remove it to get a model card")
    return 0


def _described(stored: StoredModel, out: Path, exported: Exported) -> str:
    """A line about the content of the folder, and a line per note."""
    recipe, options, compared = stored.config.recipe, exported.options, exported.compared
    weights = options.dtype if options.format == "hf" else f"{options.format} format"
    if compared.quantized:
        weights += f", {compared.quantized} layers in NVFP4"
    head = (
        f"{out}: {to_hf_config(stored.config.model)['architectures'][0]} of step {stored.step}, {weights}, "
        f"{stored.tokenizer.size} tokens, trained with {recipe.name} ({recipe.digest}); "
        f"{compared.tensors + compared.quantized} weights read back, all equal"
    )
    return "\n".join((head, *(f"  {note}" for note in exported.notes)))
