"""Formats an error as the one or two lines that a user sees."""

from fourbits.data.whole_file import system_remedy

OUT_OF_MEMORY = (
    "Lower train.micro_batch_size and raise train.gradient_accumulation by the same factor, or set "
    "train.activation_checkpointing to full, or recipe.saved_inputs to packed."
)


def describe(error: Exception) -> str:
    """An error in at most two lines: an OSError has its file and a remedy, an unexpected one its type."""
    if isinstance(error, OSError) and error.strerror:
        remedy = system_remedy(error.errno)
        subject = f"{error.filename}: " if error.filename is not None else ""
        text = f"{subject}{error.strerror}{'' if remedy in error.strerror else remedy}"
        return text if text.endswith(".") else f"{text}."
    lines = [line for line in str(error).splitlines() if line.strip()][:2]
    if type(error).__name__ == "OutOfMemoryError":
        return f"{lines[0].partition(' GPU ')[0] if lines else 'out of memory'}\n{OUT_OF_MEMORY}"
    if "can't allocate memory" in str(error):  # of PyTorch on a CPU, a RuntimeError
        return f"out of memory.\n{OUT_OF_MEMORY}"
    plain = isinstance(error, ValueError) or type(error).__module__.startswith("fourbits.")
    return "\n".join(lines) if plain and lines else f"{type(error).__name__}: {' '.join(lines)}"
