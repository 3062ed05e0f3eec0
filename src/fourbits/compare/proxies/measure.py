"""Proxies: recipes compared on one BF16 checkpoint over fixed batches, in place of training each of them."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fourbits.compare.proxies.findings import GradientQuality, Proxies, Proxy
from fourbits.compare.proxies.forward import Exact, exact_forward, forward_cost
from fourbits.compare.run.jobs import SMALL_MODEL
from fourbits.compare.techniques.gradients import gradient_error
from fourbits.compare.techniques.trained import MAX_BATCHES, Gradients, TrainedModel, without_kept_blocks
from fourbits.linear.monitor.layer_health import snr_db
from fourbits.quant.cpu.compiled import uncompiled_quantizers
from fourbits.recipe.recipe import Recipe
from fourbits.train.fork import Fork
from fourbits.train.run import num_threads


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trained model under measurement. exact: its forward in BF16."""

    run: Path
    sha256: str
    trained: TrainedModel
    exact: Exact

    @property
    def tokens(self) -> int:
        """The number of tokens whose loss is measured."""
        return sum(batch[:, 1:].numel() for batch in self.trained.batches)


@contextmanager
def opened(run: Path, device: str = "cpu", tokens: int | None = None) -> Generator[Checkpoint]:
    """The newest checkpoint of a run. tokens: the least number to measure, if the text has as many.

    Quantizers run uncompiled on a CPU, as for techniques. Raises what `TrainedModel.of_run` raises.
    """
    trained = TrainedModel.of_run(run, device, tokens)
    small = sum(layer.weight.numel() for layer in trained.layers.values()) <= SMALL_MODEL
    with num_threads(1 if small else None), uncompiled_quantizers():
        yield Checkpoint(run, Fork.of(run).sha256, trained, exact_forward(trained))


def measure_proxies(found: Checkpoint, recipes: Sequence[Recipe]) -> Proxies:
    """A row per recipe, every block quantized. At most MAX_BATCHES batches measure the gradient."""
    trained = found.trained
    number = min(MAX_BATCHES, len(trained.batches))
    exact = [trained.gradients(batch) for batch in trained.batches[:number]]
    return Proxies(
        run=str(found.run),
        checkpoint=found.sha256,
        step=trained.step,
        tokens=found.tokens,
        gradient_tokens=sum(batch[:, 1:].numel() for batch in trained.batches[:number]),
        loss=found.exact.loss,
        rows=tuple(_proxy(found, recipe, exact) for recipe in recipes),
    )


def _proxy(found: Checkpoint, recipe: Recipe, exact: Sequence[Gradients]) -> Proxy:
    errors = [gradient_error(found.trained, batch, exact[batch], recipe) for batch in range(len(exact))]
    squares = [each.error**2 for each in errors]
    return Proxy(
        recipe=recipe.name,
        digest=recipe.digest,
        forward=forward_cost(found.trained, found.exact, without_kept_blocks(recipe)),
        gradient=GradientQuality(
            snr_db=snr_db(1.0, sum(squares) / len(squares)),
            bias=(sum(each.bias**2 for each in errors) / len(errors)) ** 0.5,
            cosine=sum(each.cosine for each in errors) / len(errors),
        ),
    )
