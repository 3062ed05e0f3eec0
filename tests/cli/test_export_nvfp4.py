"""`fourbits export --format`: NVFP4 in both formats, what is refused, and that a refusal changes nothing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fourbits.cli.main import main
from fourbits.exchange.folder import load_hf, save_hf
from fourbits.exchange.nvfp4_checkpoints import CHECKPOINT_FORMATS
from fourbits.train.export_weights import ExportOptions, weights_to_export
from fourbits.train.forward_weights import forward_weights
from fourbits.train.load_run import load_trained, open_trained
from support.small_runs import HYBRID, trained

NVFP4 = tuple(CHECKPOINT_FORMATS)
GROUPS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Four blocks, of which the last one stays in BF16."""
    return trained(tmp_path_factory.mktemp("trained"), pattern="TTTT", width=32)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """Without attention: nothing that servers fuse."""
    return trained(tmp_path_factory.mktemp("hybrid"), pattern="M-M-", width=32, family=HYBRID)


def export(*argv: Any) -> int:
    return main(["export", *map(str, argv)])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("format_name", NVFP4)
def test_an_import_of_an_export_has_the_values_of_the_training_forward(format_name, run, tmp_path):
    assert export(run, "--format", format_name, "--scales", "separate", "--out", tmp_path) == 0
    stored, found = open_trained(run), load_hf(tmp_path).state_dict()
    weights = forward_weights(stored.converted("meta"))
    assert len(weights) == 3 * 7
    for name, tensor in found.items():
        master = stored.state[name][: tensor.shape[0]]
        values = master.bfloat16().float()
        if name in weights:
            values = torch.cat([q.dequantize(torch.float32) for q in weights[name].quantized(master)])
        assert torch.equal(tensor, values), name


@pytest.mark.parametrize("format_name", NVFP4)
def test_weights_of_a_run_with_error_feedback_are_exported_without_scales_of_inputs(
    format_name, tmp_path, capsys
):
    run = trained(tmp_path, recipe="fourbits", width=32)
    options = "--format", format_name, "--scales", "separate", "--out", tmp_path / "out"
    assert export(run, *options) == 0
    assert "has error feedback in training" in capsys.readouterr().out
    stored, found = open_trained(run), load_file(tmp_path / "out" / "model.safetensors")
    assert len(forward_weights(stored.converted("meta"))) == 2 * 7
    assert not [name for name in found if "input_" in name and "norm" not in name]


@pytest.mark.parametrize("format_name", NVFP4)
def test_files_have_the_names_types_and_sizes_of_the_format(format_name, hybrid, tmp_path):
    assert export(hybrid, "--format", format_name, "--out", tmp_path) == 0
    found = load_file(tmp_path / "model.safetensors")
    module = "model.layers.0.mixer.in_proj"
    master = open_trained(hybrid).state["blocks.0.mixer.in_proj.weight"]
    own = {name.removeprefix(f"{module}."): t for name, t in found.items() if name.startswith(module)}
    codes, block, scale, of_input = CHECKPOINT_FORMATS[format_name].suffixes
    one = [1] if format_name == "compressed-tensors" else []
    rows, columns = master.shape
    assert {end: (t.dtype, list(t.shape)) for end, t in own.items()} == {
        codes: (torch.uint8, [rows, columns // 2]),
        block: (torch.float8_e4m3fn, [rows, columns // 16]),
        scale: (torch.float32, one),
        of_input: (torch.float32, one),
    }
    amax = master.bfloat16().abs().max().float()
    factor = amax / 2688 if format_name == "modelopt" else 2688 / amax
    assert torch.allclose(own[scale].reshape(()), factor, rtol=2**-22)
    quantized = sum(own[end].nbytes for end in own)
    assert quantized <= 0.30 * 2 * master.numel()


@pytest.mark.parametrize("format_name", NVFP4)
def test_head_and_kept_blocks_are_bf16_and_the_config_lists_them(format_name, run, tmp_path):
    assert export(run, "--format", format_name, "--scales", "shared", "--out", tmp_path) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {"lm_head", *(f"model.layers.3.{name}" for name in ("self_attn.q_proj", "mlp.down_proj"))}
    assert kept <= set(config["quantization_config"]["ignore"])
    assert len(config["quantization_config"]["ignore"]) == 1 + 7
    found = load_file(tmp_path / "model.safetensors")
    assert all(found[f"{name}.weight"].dtype == torch.bfloat16 for name in kept)
    if format_name == "modelopt":
        described = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
        assert described["exclude_modules"] == config["quantization_config"]["ignore"]
        assert described["quant_algo"] == config["quantization_config"]["quant_algo"] == "NVFP4"


def test_fused_projections_with_different_scales_are_refused(run, tmp_path, capsys):
    assert export(run, "--format", "modelopt", "--out", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert (
        "q_proj, blocks.0.attention.k_proj, blocks.0.attention.v_proj are one matrix with one glob" in error
    )
    assert "Pass --scales shared" in error
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("format_name", NVFP4)
def test_shared_scales_are_one_per_fused_matrix_and_said_to_be_new(format_name, run, tmp_path, capsys):
    assert export(run, "--format", format_name, "--scales", "shared", "--out", tmp_path) == 0
    assert "their codes and scales are not those of training" in capsys.readouterr().out
    found = load_file(tmp_path / "model.safetensors")
    end = CHECKPOINT_FORMATS[format_name].global_scale
    for group in GROUPS:
        scales = {float(found[f"model.layers.1.{name}.{end}"]) for name in group}
        assert len(scales) == 1
        amax = max(
            float(_master(run, f"blocks.1.{_ours(name)}.weight").bfloat16().abs().max()) for name in group
        )
        factor = scales.pop() if format_name == "modelopt" else 1 / scales.pop()
        assert factor == pytest.approx(amax / 2688, rel=2**-22)
    card = (tmp_path / "README.md").read_text()
    assert "their codes and scales are not those of training" in card
    assert '"digest"' in card


@pytest.mark.parametrize("format_name", NVFP4)
def test_several_files_with_an_index_hold_the_same_model(format_name, hybrid, tmp_path):
    """The tensors of a layer stay in one file, which is one layer where that exceeds the limit."""
    assert export(hybrid, "--format", format_name, "--calibration", 0, "--out", tmp_path / "one") == 0
    stored = open_trained(hybrid)
    weights = weights_to_export(stored, ExportOptions(format=format_name, calibration=0))
    config, folder = stored.config.model, tmp_path / "several"
    options: Any = {"tokenizer": stored.tokenizer, "quantization": weights.quantization, "verify": True}
    save_hf(stored.state, config, folder, **options, shard_bytes=3000)
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(where.values())) > 4
    by_module: dict[str, set[str]] = {}
    for name, file in where.items():
        by_module.setdefault(name.rpartition(".")[0], set()).add(file)
    assert all(len(by_module[name.rpartition(".")[0]]) == 1 for name in where if "weight_scale" in name)
    one, several = (load_hf(path).state_dict() for path in (tmp_path / "one", folder))
    assert all(torch.equal(one[name], several[name]) for name in one)


FUSED = """{base: nvfp4, fprop: {rhs: {amax_policy: delayed, amax_headroom: 1.05}},
  dgrad: {rhs: {amax_policy: delayed, amax_headroom: 1.05}},
  shared_weight_amax: [[q_proj, k_proj, v_proj], [gate_proj, up_proj]]}"""


def test_a_run_trained_with_shared_amaxes_is_exported_with_the_scales_of_training(tmp_path, capsys):
    run = trained(tmp_path, FUSED, pattern="TTTT", width=32)
    capsys.readouterr()
    assert export(run, "--format", "modelopt", "--out", tmp_path / "out") == 0
    assert "not those of training" not in capsys.readouterr().out
    found = load_file(tmp_path / "out" / "model.safetensors")
    for group in GROUPS:
        assert len({float(found[f"model.layers.1.{name}.weight_scale_2"]) for name in group}) == 1
    assert export(run, "--out", tmp_path / "out", "--check") == 0


def test_a_fused_matrix_of_which_a_part_stays_in_bf16_is_refused(run, tmp_path, capsys):
    keep = ["--keep-bf16", "*.k_proj"]
    assert export(run, "--format", "modelopt", *keep, "--scales", "shared", "--out", tmp_path / "x") == 2
    assert "must be all quantized or all in BF16" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def _ours(name: str) -> str:
    return name.replace("self_attn", "attention").replace("mlp", "ffn")


def _master(run: Path, name: str) -> torch.Tensor:
    return open_trained(run).state[name]


def test_inputs_are_calibrated_on_validation_text(hybrid, tmp_path):
    """The first layer's input is the embedding of the text, normalized, which is computed here directly."""
    assert export(hybrid, "--format", "modelopt", "--calibration", 2, "--out", tmp_path) == 0
    scales = {n: float(t) for n, t in load_file(tmp_path / "model.safetensors").items() if "input_scale" in n}
    trained_run = load_trained(hybrid)
    text = open_trained(hybrid).folder.parent / "text.md"
    tokens = torch.tensor(trained_run.tokenizer.encode(text.read_text()))
    block: Any = trained_run.model.blocks[0]
    with torch.no_grad():
        seen = block.norm(trained_run.model.embed(tokens.unique()[None])).abs().max()
    found = scales["model.layers.0.mixer.in_proj.input_scale"]
    assert 0 < found <= float(seen) / 2688 * (1 + 2**-7)
    assert found >= 0.5 * float(seen) / 2688
    assert len(set(scales.values())) > 3


def test_without_calibration_an_export_is_w4a16_and_says_so(hybrid, tmp_path, capsys):
    for format_name, entry in (
        ("modelopt", ["quant_algo"]),
        ("compressed-tensors", ["config_groups", "group_0"]),
    ):
        assert export(hybrid, "--format", format_name, "--calibration", 0, "--out", tmp_path) == 0
        assert "W4A16: only weights are quantized, because calibration is 0" in capsys.readouterr().out
        found: Any = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        for key in entry:
            found = found[key]
        assert found == "W4A16_NVFP4" or found["input_activations"] is None
        with safe_open(tmp_path / "model.safetensors", "pt") as opened:
            assert not [name for name in opened.keys() if "input" in name]  # noqa: SIM118


@pytest.mark.parametrize("format_name", ["hf", *NVFP4])
def test_a_check_passes_until_a_byte_changes(format_name, hybrid, tmp_path, capsys):
    assert export(hybrid, "--format", format_name, "--out", tmp_path) == 0
    first = capsys.readouterr().out
    assert export(hybrid, "--out", tmp_path, "--check") == 0
    assert capsys.readouterr().out == first
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    with safe_open(path, "pt") as opened:
        names = list(opened.keys())
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for name in names:
        place = 8 + length + header[name]["data_offsets"][1] - 1
        changed = bytearray(whole)
        changed[place] ^= 0x10  # in a scale of inputs or weights, a power of two; in a code, two steps
        path.write_bytes(changed)
        if name.endswith(("input_scale", "input_global_scale")):
            continue  # a check takes the recorded ones
        assert export(hybrid, "--out", tmp_path, "--check") == 2, name
        module = name.removesuffix(".weight").removesuffix("_packed").rpartition(".weight")[0] or name
        assert module.split(".weight")[0] in capsys.readouterr().err


def changed_recipe(**rhs: Any) -> str:
    return "{base: nvfp4, fprop: {rhs: " + json.dumps(rhs) + "}}"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("mxfp4", "cannot express blocks.0.mixer.in_proj (and 7 more layers): its weight is mxfp4"),
        ("fp8", "its weight is fp8"),
        (
            "nemotron3-super",
            "cannot express blocks.0.mixer.out_proj (and 1 more layers): its weight is mxfp8",
        ),
        ("bf16", "the recipe 'bf16' leaves no layer to quantize"),
    ],
)
def test_a_layer_that_the_format_cannot_express_is_named(recipe, message, tmp_path, capsys):
    run = trained(tmp_path, recipe, pattern="M*M-", width=32, family=HYBRID)
    capsys.readouterr()
    assert export(run, "--format", "modelopt", "--out", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()
    if recipe == "nemotron3-super":
        out = tmp_path / "x"
        keep = ["--keep-bf16", "*.out_proj"]
        assert export(run, "--format", "modelopt", *keep, "--out", out) == 0
        assert (
            load_file(out / "model.safetensors")["model.layers.0.mixer.out_proj.weight"].dtype
            == torch.bfloat16
        )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--format", "modelopt", "--dtype", "fp32"], "dtype must be bf16 in the modelopt format"),
        (["--format", "modelopt", "--calibration", "-1"], "calibration must be at least 0, got -1"),
        (
            ["--format", "modelopt", "--keep-bf16", "head"],
            "keep_bf16 must match quantized layers, got 'head'",
        ),
        (["--keep-bf16", "*.in_proj"], "--keep-bf16 and --scales are for quantized formats, got hf"),
        (["--check"], "not a transformers model (no config.json)"),
        (["--check", "--keep-bf16", "x"], "takes the settings of the export from"),
    ],
)
def test_options_without_meaning_are_one_line_with_code_2(argv, message, hybrid, tmp_path, capsys):
    assert export(hybrid, *argv, "--out", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def _cut(run: Path) -> None:
    path = next(run.glob("checkpoints/*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def _newer(run: Path) -> None:
    path = next(run.glob("checkpoints/*/state.json"))
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))


def _other_tokenizer(run: Path) -> None:
    path = run / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"extra{n}": len(vocabulary) + n for n in range(200)}
    path.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, r"model.safetensors: truncated or replaced"),
        (_newer, r"state.json: version must be 1 or 2, got 3"),
        (_other_tokenizer, r"tokenizer.json: is not the tokenizer that the run was trained with"),
    ],
)
@pytest.mark.parametrize("format_name", ["hf", *NVFP4])
def test_a_damaged_run_is_named_and_an_earlier_export_stays(
    damage, message, format_name, hybrid, tmp_path, capsys
):
    out = tmp_path / "out"
    assert export(hybrid, "--format", "compressed-tensors", "--out", out) == 0
    before = files(out)
    shutil.copytree(hybrid, tmp_path / "run")
    damage(tmp_path / "run")
    assert export(tmp_path / "run", "--format", format_name, "--out", out) == 2
    assert re.search(message, capsys.readouterr().err)
    assert files(out) == before


def test_another_format_replaces_every_file_of_the_first_and_no_readme_of_the_user(hybrid, tmp_path, capsys):
    assert export(hybrid, "--format", "modelopt", "--out", tmp_path) == 0
    assert (tmp_path / "hf_quant_config.json").exists()
    (tmp_path / "README.md").write_text("mine")
    assert export(hybrid, "--out", tmp_path) == 0
    assert not (tmp_path / "hf_quant_config.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "README.md: unchanged" in capsys.readouterr().out
