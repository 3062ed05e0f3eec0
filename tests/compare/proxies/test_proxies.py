"""Recipes and layers measured on one BF16 checkpoint: what is planted is found, and proposals train."""

import itertools
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourbits.compare.proxies import forward
from fourbits.compare.proxies.findings import (
    Cost,
    GradientQuality,
    LayerSensitivity,
    Sensitivity,
)
from fourbits.compare.proxies.forward import exact_forward, forward_cost
from fourbits.compare.proxies.layers import gradient_quality, only, table_of
from fourbits.compare.proxies.measure import Checkpoint, measure_proxies, opened
from fourbits.compare.proxies.proposal import chosen, keeping, measure_sensitivity, whole_blocks, write_recipe
from fourbits.compare.techniques.operands import relative_error
from fourbits.compare.techniques.trained import without_kept_blocks
from fourbits.gemm.matmul import matmul
from fourbits.linear.convert import convert
from fourbits.linear.monitor.layer_health import snr_db
from fourbits.model.lm import LanguageModel
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe, recipe_from_mapping
from fourbits.settings import dump_yaml, to_dict
from fourbits.train.config import RunConfig, load_config
from fourbits.train.run import run
from fourbits.train.run_folder import read_json

PLANTED = "blocks.1.mixer.up_proj"


@pytest.fixture(scope="module")
def checkpoint(small_run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Generator[Checkpoint]:
    path = tmp_path_factory.mktemp("bf16") / "run"
    run(replace(small_run, recipe=get_recipe("bf16")), path)
    with opened(path, tokens=512) as found:
        yield found


@contextmanager
def planted(checkpoint: Checkpoint) -> Generator[Checkpoint]:
    """The same function, but one channel of each block of PLANTED's input is 100 times the others.

    The norm before it has the channel times 100, and the layer's weights of it are divided by 100.
    """
    model = checkpoint.trained.model
    norm, weight = model.get_parameter("blocks.1.norm.weight"), checkpoint.trained.layers[PLANTED].weight
    with torch.no_grad():
        norm[::16] *= 100
        weight[:, ::16] /= 100
    yield replace(checkpoint, exact=exact_forward(checkpoint.trained))
    with torch.no_grad():
        norm[::16] /= 100
        weight[:, ::16] *= 100


@pytest.fixture(scope="module")
def found(checkpoint: Checkpoint) -> Sensitivity:
    with planted(checkpoint) as changed:
        return measure_sensitivity(changed, get_recipe("nvfp4"), 0.3)


def test_a_planted_sensitive_layer_is_ranked_first_and_kept(found: Sensitivity):
    assert found.layers[0].layer == PLANTED
    assert found.layers[0].fprop.divergence > 3 * found.layers[1].fprop.divergence
    assert PLANTED in found.proposal.layers
    assert found.proposal.cost.divergence < 0.5 * found.nothing.cost.divergence


def test_every_layer_is_measured_and_shares_add_up_to_one(found: Sensitivity):
    assert len(found.layers) == 6  # q, k, v, o, up, down; not the head
    assert sum(row.share_of_flops for row in found.layers) == pytest.approx(1)
    assert sum(row.gradient_share for row in found.layers) == pytest.approx(1)
    for row in found.layers:
        for quality in (row.dgrad, row.wgrad):
            assert 5 < quality.snr_db < 40
            assert quality.bias <= 10 ** (-quality.snr_db / 20) * (1 + 1e-9)


def test_proposal_and_blocks_keep_to_the_budget(found: Sensitivity):
    for choice in (found.proposal, found.blocks):
        assert choice.share_of_flops <= 0.3 + 1e-9
    assert found.nothing.layers == ()


def test_the_proposal_is_a_recipe_file_that_trains(found: Sensitivity, small_run: RunConfig, tmp_path: Path):
    path = write_recipe(found, get_recipe("nvfp4"), tmp_path / "nvfp4-sensitive.yaml")
    assert "base: nvfp4" in path.read_text()
    small = replace(small_run, train=replace(small_run.train, steps=1, validation_interval=None))
    (tmp_path / "small.yaml").write_text(dump_yaml(to_dict(small)))
    config = load_config(tmp_path / "small.yaml", {}, {"recipe": str(path)})
    run(config, tmp_path / "run")
    manifest = read_json(tmp_path / "run/manifest.json")
    in_bf16 = {row["name"] for row in manifest["precision"]["linears"] if row["precision"] == "bf16"}
    assert in_bf16 == {*found.proposal.layers, "head"}
    assert manifest["recipe"]["name"] == "nvfp4-sensitive"


def test_a_changed_recipe_is_written_whole(found: Sensitivity, tmp_path: Path):
    recipe = recipe_from_mapping({"base": "nvfp4", "wgrad": {"lhs": {"rht": 32}}}, "recipe", "mine")
    text = write_recipe(found, recipe, tmp_path / "mine-sensitive.yaml").read_text()
    assert "base:" not in text
    assert get_recipe(tmp_path / "mine-sensitive.yaml").wgrad.lhs.rht == 32


def test_measuring_leaves_the_model_as_it_was(checkpoint: Checkpoint):
    measure_sensitivity(checkpoint, get_recipe("nvfp4"))
    assert exact_forward(checkpoint.trained).losses == checkpoint.exact.losses
    assert {type(layer).__name__ for layer in checkpoint.trained.layers.values()} == {"Linear"}


@pytest.mark.parametrize("budget", [0.0, 1.0, -0.1])
def test_a_budget_is_a_share(checkpoint: Checkpoint, budget: float):
    with pytest.raises(ValueError, match="--keep-flops: must be a share between 0 and 1"):
        measure_sensitivity(checkpoint, get_recipe("nvfp4"), budget)


def test_finer_formats_diverge_less_and_have_better_gradients(checkpoint: Checkpoint):
    recipes = [get_recipe(name) for name in ("fp8", "nvfp4", "mxfp4")]
    with planted(checkpoint) as changed:  # without outliers, BF16's own rounding hides the differences
        proxies = measure_proxies(changed, recipes)
        assert measure_proxies(changed, recipes) == proxies
    fp8, nvfp4, mxfp4 = proxies.rows
    assert (fp8.recipe, nvfp4.recipe, mxfp4.recipe) == ("fp8", "nvfp4", "mxfp4")
    assert fp8.forward.divergence < 0.5 * min(nvfp4.forward.divergence, mxfp4.forward.divergence)
    assert fp8.gradient.snr_db > max(nvfp4.gradient.snr_db, mxfp4.gradient.snr_db)
    assert proxies.tokens == sum(batch[:, 1:].numel() for batch in checkpoint.trained.batches) > 128


def test_the_divergence_is_that_of_the_predictions(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    trained, recipe = checkpoint.trained, without_kept_blocks("mxfp4")
    cost = forward_cost(trained, checkpoint.exact, recipe)
    inputs = torch.cat(trained.batches)[:, :-1]
    model = trained.model
    with torch.no_grad():
        exact = logits(model, inputs)
        convert(model, recipe)
        quantized = logits(model, inputs)
        convert(model, "bf16")
    expected = torch.nn.functional.kl_div(quantized, exact, log_target=True, reduction="batchmean")
    # Log-probabilities of about 6 in FP32 differ by about 0.01, so each difference has 1e-4 of rounding.
    assert cost.divergence == pytest.approx(float(expected), rel=1e-3)
    monkeypatch.setattr(forward, "CHUNK", 384 * 10)  # ten tokens at a time
    chunked = forward_cost(trained, checkpoint.exact, recipe)
    assert chunked.divergence == pytest.approx(cost.divergence, rel=1e-5)


def logits(model: LanguageModel, inputs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [tokens, V] with a head in FP64."""
    return (model.hidden(inputs).flatten(0, 1).double() @ model.head.weight.double().t()).log_softmax(1)


def test_one_gradient_alone_has_the_error_of_its_operands(checkpoint: Checkpoint):
    layer = checkpoint.trained.tensors(checkpoint.trained.batches[0])[4]
    naive = get_recipe("nvfp4-naive").wgrad  # without random bits
    exact = layer.dy.float().t() @ layer.x.float()
    found = matmul(quantize(layer.dy, naive.lhs, 0), quantize(layer.x, naive.rhs, 0), torch.float32)
    quality = gradient_quality(layer, get_recipe("nvfp4-naive"), "wgrad")
    # Equal operands; FP32 sums of 64 products in another order differ by 64 * 2^-24 at most.
    assert 10 ** (-quality.snr_db / 20) == pytest.approx(relative_error(found, exact), rel=1e-4)
    # BF16 rounds the gradient to 8 bits, which is 2^-9 of it at most.
    for gemm in ("dgrad", "wgrad"):
        assert gradient_quality(layer, get_recipe("bf16"), gemm).snr_db > snr_db(1.0, 2**-16)


def test_ms_eden_is_measured_in_both_gradients(checkpoint: Checkpoint):
    layer = checkpoint.trained.tensors(checkpoint.trained.batches[0])[4]
    for gemm in ("dgrad", "wgrad"):
        quality = gradient_quality(layer, get_recipe("quartet2"), gemm)
        assert 5 < quality.snr_db < 40
        assert quality.bias < 10 ** (-quality.snr_db / 20)


def test_layers_that_the_recipe_has_in_bf16_are_not_measured(checkpoint: Checkpoint):
    rules = [{"names": ["*.q_proj", "*.down_proj"], "table": {}}]
    recipe = recipe_from_mapping({"base": "nvfp4", "layers": rules}, "recipe", "mine")
    rows = {row.layer: row for row in measure_sensitivity(checkpoint, recipe, 0.5).layers}
    assert {name.split(".")[-1] for name in rows} == {"k_proj", "v_proj", "o_proj", "up_proj"}
    assert sum(row.share_of_flops for row in rows.values()) < 1


def test_one_gemm_alone_leaves_the_others_in_bf16():
    recipe = only(get_recipe("nemotron3-super"), "dgrad")
    for name in ("blocks.0.mixer.up_proj", "blocks.0.mixer.out_proj"):
        table = table_of(recipe, name)
        assert table.fprop.high_precision
        assert table.wgrad.high_precision
        assert not table.dgrad.high_precision
    assert table_of(recipe, "blocks.0.mixer.out_proj").dgrad.lhs.format == "mxfp8"
    assert table_of(recipe, "blocks.0.mixer.q_proj").dgrad.high_precision


def layer(name: str, share: float, divergence: float) -> LayerSensitivity:
    quality = GradientQuality(snr_db=20.0, bias=0.0, cosine=1.0)
    cost = Cost(loss_increase=0.0, loss_margin=None, divergence=divergence)
    return LayerSensitivity(
        layer=name, share_of_flops=share, fprop=cost, dgrad=quality, wgrad=quality, gradient_share=0.0
    )


def test_the_proposal_is_the_best_of_all_subsets_within_the_budget():
    rng = random.Random(0)
    for _ in range(20):
        sizes = [rng.randint(1, 40) for _ in range(8)]
        rows = [layer(str(i), size / sum(sizes), rng.random()) for i, size in enumerate(sizes)]
        budget = rng.uniform(0.1, 0.6)
        subsets = itertools.chain.from_iterable(itertools.combinations(rows, n) for n in range(9))
        best = max(
            sum(row.fprop.divergence for row in subset)
            for subset in subsets
            if sum(row.share_of_flops for row in subset) <= budget - 8 / 1000  # each rounded up to 0.1 %
        )
        kept = chosen(rows, budget)
        assert sum(row.share_of_flops for row in rows if row.layer in kept) <= budget + 1e-9
        assert sum(row.fprop.divergence for row in rows if row.layer in kept) >= best - 1e-12


def test_whole_blocks_are_divided_as_in_the_recipe():
    names = [f"blocks.{i}.mixer.up_proj" for i in range(10)]
    shares = dict.fromkeys(names, 0.1)
    recipe = recipe_from_mapping({"base": "nvfp4", "keep_bf16": {"first_blocks": 1, "last_blocks": 3}}, "r")
    kept = whole_blocks(recipe, names, shares, 0.4)
    assert kept == [names[0], *names[7:]]
    assert whole_blocks(recipe, names, shares, 0.05) == []
    naive = get_recipe("nvfp4-naive")
    assert whole_blocks(naive, names, shares, 0.25) == names[8:]


def test_keeping_nothing_quantizes_every_block():
    recipe = keeping(get_recipe("nvfp4"), [])
    assert recipe.layers == ()
    assert (recipe.keep_bf16.first_blocks, recipe.keep_bf16.last_blocks) == (0, 0)


def test_decibels_without_noise_are_bounded():
    assert snr_db(1.0, 0.0) == 200
    assert snr_db(1.0, 0.01) == pytest.approx(20)
