"""A continuation by a trained model, from a prompt that it has not seen."""

from dataclasses import dataclass
from pathlib import Path

from fourbits.data.stream.dataset import PreparedData
from fourbits.evaluate import generate
from fourbits.train.trained import load_trained

PROMPT_TOKENS, WRITTEN_TOKENS = 32, 96
# Cool enough for words, warm enough not to run in circles, as a small model does at 0.
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Text that a trained model wrote. prompt: given to it; continuation: what it wrote."""

    recipe: str
    seed: int
    temperature: float
    source: str
    prompt: str
    continuation: str


def write_sample(run: Path, data: PreparedData) -> Sample:
    """Let the model of a run continue the first validation document of the first source. Same every time."""
    trained = load_trained(run)
    tokenizer = trained.tokenizer
    source, file = next(iter(data.validation.items()))
    prompt = file.document(0)[:PROMPT_TOKENS].tolist()
    written = generate(trained.model, prompt, WRITTEN_TOKENS, temperature=TEMPERATURE, num_ids=tokenizer.size)
    end = tokenizer.end_id
    if end in written:
        written = written[: written.index(end)]
    return Sample(
        recipe=trained.config.recipe.name,
        seed=trained.config.train.seed,
        temperature=TEMPERATURE,
        source=source,
        prompt=tokenizer.decode(prompt),
        continuation=tokenizer.decode(written),
    )
