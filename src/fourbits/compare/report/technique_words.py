"""Writes sentences with measured numbers: what each technique fixes on a model, and where it harms."""

import statistics

from fourbits.compare.number_format import percent
from fourbits.compare.report.technique_summary import (
    format_rows,
    largest_error,
    rounding_errors,
    weight_errors,
)
from fourbits.compare.techniques.findings import NO_TENSOR_SCALE, Techniques

_OF_LARGE_MODELS = "At 12B parameters, arXiv:2509.25149 finds that the transform of nvfp4 lowers the loss."


def sentences(found: Techniques) -> list[str]:
    """A sentence or two per technique."""
    return [
        _about_scales(found),
        _about_rounding(found),
        _about_weights(found),
        f"{_about_transform(found, 'nvfp4')} {_about_transform(found, 'mxfp4')} {_OF_LARGE_MODELS}",
        _about_gradient(found),
    ]


def _about_scales(found: Techniques) -> str:
    nvfp4, fp8, mxfp4 = (percent(largest_error(found, "X", name)) for name in ("nvfp4", "fp8", "mxfp4"))
    square = percent(largest_error(found, "W", "nvfp4"))
    unscaled = percent(largest_error(found, "dY", NO_TENSOR_SCALE))
    return (
        f"E4M3 block scales keep the largest of 16 elements of X within {nvfp4}, near FP8's {fp8}; MXFP4's "
        f"powers of two leave {mxfp4}. In the 16x16 blocks of W only one element of 256 gains that, and the "
        f"error is {square}. Without the FP32 tensor scale, dY loses {unscaled} of those elements: its block "
        "scales underflow."
    )


def _about_rounding(found: Techniques) -> str:
    draws = found.rounding[0].draws
    nearest, one_draw, mean = rounding_errors(found, "nvfp4")
    clipped = rounding_errors(found, "mxfp4")[2]
    return (
        f"Stochastic rounding makes a single dY worse ({percent(one_draw)} in nvfp4; to nearest "
        f"{percent(nearest)}), but its errors average out: {percent(mean)} are left in the mean of {draws} "
        f"draws, where unbiased draws leave {percent(one_draw / draws**0.5)}, because scales that round down "
        f"clip the largest elements. In mxfp4, whose scales all round down, {percent(clipped)} are left."
    )


def _about_weights(found: Techniques) -> str:
    mismatch, error = weight_errors(found, "1x16")
    square_mismatch, square_error = weight_errors(found, "16x16")
    return (
        f"In 1x16 blocks, W in Dgrad differs from W in Fprop by {percent(mismatch)}, in 16x16 blocks by "
        f"{percent(square_mismatch)}. The price: an error of W of {percent(square_error)} instead of "
        f"{percent(error)}."
    )


def _about_transform(found: Techniques, recipe: str) -> str:
    rows = [each for each in found.transforms if each.recipe == recipe]
    worse = [each for each in rows if each.ratio > 1]
    mean = statistics.fmean(each.ratio for each in rows)
    text = (
        f"In {recipe}, RHT {rows[0].size} changes the error of dW by a factor of {mean:.2f} on average, and "
        f"raises it in {len(worse)} of {len(rows)} layers"
    )
    if worse:
        top = max(worse, key=lambda each: each.ratio)
        text += f", most in {top.layer} ({top.ratio:.2f})"
    return f"{text}."


def _about_gradient(found: Techniques) -> str:
    rows = {row.recipe: row for row in format_rows(found)}
    full, naive = rows["nvfp4"], rows["nvfp4-naive"]
    return (
        f"All techniques together: a gradient of nvfp4 has an error of {percent(full.error)}, the mean of "
        f"many draws one of {percent(full.bias)}. Without any technique (nvfp4-naive) both are "
        f"{percent(naive.error)}."
    )
