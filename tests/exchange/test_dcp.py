"""Llamas of torchtitan and Megatron-LM from DCP folders: logits, what is refused, and that nothing runs."""

import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from fourbits.exchange.dcp.llama import load_dcp
from fourbits.exchange.dcp.tensors import METADATA, DcpTensors
from support.llamas import (
    CONFIG,
    ROWS,
    logits_of_megatron,
    logits_of_titan,
    megatron,
    newer,
    per_layer,
    titan,
)
from support.two_processes import results_of

TOKENS = torch.randint(0, ROWS, (12,), generator=torch.Generator().manual_seed(5))
PLAIN = {"torchtitan": (titan, logits_of_titan), "megatron": (megatron, logits_of_megatron)}


def saved(state, folder):
    """A DCP folder of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


def assert_logits(folder, expected, config=CONFIG):
    """Within 2^-14 of the largest: FP32 sums of up to 64 products, through two layers, are far closer."""
    model = load_dcp(folder, config, compute_dtype=torch.float32)
    with torch.no_grad():
        found = model(TOKENS[None])[0].double()
    assert float((found - expected).abs().max()) < 2**-14 * float(expected.abs().max())


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("writer", PLAIN)
def test_logits_are_those_of_a_plain_implementation(tmp_path, writer, prefix):
    make, logits = PLAIN[writer]
    state = make()
    beside = {"optimizer": {"state": {"x": {"exp_avg": torch.zeros(3)}}}, "train_state": {"step": 3}}
    folder = saved({f"{prefix}{name}": tensor for name, tensor in state.items()} | beside, tmp_path / "saved")
    assert_logits(folder, logits(state, TOKENS))


def test_neighbouring_channels_and_halves_are_not_the_same_rotation():
    """So the test above fails if rows of wq and wk stay where they are."""
    state = titan()
    expected = logits_of_titan(state, TOKENS)
    halves = {
        name: tensor.unflatten(0, (-1, 2, CONFIG.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        if name.endswith(("wq.weight", "wk.weight"))
        else tensor
        for name, tensor in state.items()
    }
    other = logits_of_titan(halves, TOKENS)
    assert float((other - expected).abs().max()) > 0.1 * float(expected.abs().max())


def test_names_of_newer_versions_of_torchtitan_are_known(tmp_path):
    state = titan()
    assert_logits(saved(newer(state), tmp_path / "saved"), logits_of_titan(state, TOKENS))


def test_layers_of_megatron_may_be_tensors_of_their_own(tmp_path):
    state = megatron()
    assert_logits(saved(per_layer(state), tmp_path / "saved"), logits_of_megatron(state, TOKENS))


@pytest.mark.parametrize("writer", PLAIN)
def test_a_tied_head_may_be_missing_or_equal(tmp_path, writer):
    make, logits = PLAIN[writer]
    state, config = make(), replace(CONFIG, tie_embeddings=True)
    names = list(state)
    head, embedding = next(n for n in names if "output" in n), next(n for n in names if "embeddings" in n)
    state[head] = state[embedding].clone()
    expected = logits(state, TOKENS)
    assert_logits(saved(state, tmp_path / "both"), expected, config)
    without = {name: tensor for name, tensor in state.items() if name != head}
    assert_logits(saved(without, tmp_path / "one"), expected, config)
    state[head] = state[head] + 1
    with pytest.raises(ValueError, match=rf"{head}.*must be equal to.*Set it to false"):
        load_dcp(saved(state, tmp_path / "other"), config)
    with pytest.raises(ValueError, match=rf"{head}' is missing.*set model.tie_embeddings to true"):
        load_dcp(saved(without, tmp_path / "missing"), CONFIG)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_those_of_the_file_in_any_float(tmp_path, dtype):
    state = {name: tensor.to(dtype) for name, tensor in titan().items()}
    model = load_dcp(saved(state, tmp_path / "saved"), CONFIG)
    assert model.embed.weight.equal(state["tok_embeddings.weight"].float())
    assert model.get_parameter("blocks.1.ffn.up_proj.weight").equal(
        state["layers.1.feed_forward.w3.weight"].float()
    )


def test_strides_and_places_in_a_storage_are_those_of_the_file(tmp_path):
    base = torch.arange(60.0).view(3, 4, 5)
    state = {"t": base.transpose(0, 2), "part": base[1:, :2], "scalar": torch.tensor(2.5), "none": base[:0]}
    tensors = DcpTensors(saved(state, tmp_path / "saved"))
    for name, tensor in state.items():
        assert tensors[name].equal(tensor), name
    assert all(tensors.at("t", row).equal(state["t"][row]) for row in range(5))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    assert results_of(Path(__file__).parent / "two_ranks_dcp.py", folder) == [True, True]
    return folder


@pytest.mark.parametrize("name", ["titan", "megatron", "stages"])
def test_shards_of_two_ranks_are_put_together(shards, name):
    make, logits = PLAIN["torchtitan" if name == "titan" else "megatron"]
    assert len(list((shards / name).glob("*.distcp"))) == 2
    assert_logits(shards / name, logits(make(rows=51), TOKENS))


def test_logits_are_those_of_megatron_core(tmp_path):
    """Of a model that two ranks share by tensor parallelism, from the checkpoint that they saved."""
    expected, same = results_of(Path(__file__).parent / "two_ranks_megatron.py", tmp_path)
    assert expected.equal(same)
    model = load_dcp(tmp_path / "iter_0000001", CONFIG, compute_dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.arange(12)[None] * 5 % 52)
    assert float((found - expected).abs().max()) < 2**-14 * float(expected.abs().max())


def changed(**changes):
    return replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("writer", "config", "match"),
    [
        ("torchtitan", changed(pattern="T"), r"'layers.1.\S+' and 8 more are not parameters of this model"),
        ("torchtitan", changed(pattern="TTT"), r"'layers.2.attention_norm.weight' is missing"),
        (
            "torchtitan",
            changed(num_heads=8),
            r"attention.wq.weight' must have the shape \[64, 32\]",
        ),
        (
            "torchtitan",
            changed(d_ffn=64),
            r"feed_forward.w1.weight' must have the shape \[64, 32\]",
        ),
        ("torchtitan", changed(pattern="*-"), r"model.pattern must be T for each layer"),
        ("torchtitan", changed(rope_theta=None), r"model.rope_theta must be the base"),
        ("torchtitan", changed(activation="relu2"), r"model.activation must be swiglu"),
        ("torchtitan", changed(qk_norm=True), r"model.qk_norm must be false"),
        ("megatron", changed(pattern="T"), r"layer_norm_weight' must have the shape \[1, 32\]"),
        ("megatron", changed(num_kv_heads=4), r"linear_qkv.weight' must have the shape \[2, 96, 32\]"),
        ("megatron", changed(activation="relu2"), r"linear_fc1.weight' must have the shape \[2, 48, 32\]"),
        ("megatron", changed(qk_norm=True), r"q_layernorm.weight' is missing"),
    ],
)
def test_a_model_of_other_sizes_is_refused_with_the_tensor_and_the_rule(tmp_path, writer, config, match):
    folder = saved(PLAIN[writer][0](), tmp_path / "saved")
    with pytest.raises(ValueError, match=match) as error:
        load_dcp(folder, config)
    assert str(error.value).startswith(f"{folder}: ")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layers.0.attention.wq.bias": torch.zeros(32)}, "'layers.0.attention.wq.bias' is not a parameter"),
        ({"layers.0.attention.wq.weight": torch.zeros(32, 32, dtype=torch.int8)}, "Dequantize it first"),
        ({"norm.weight": torch.full((32,), float("nan"))}, "'norm.weight' has 32 values that are not finite"),
        ({"tok_embeddings.weight": None}, "holds no tok_embeddings.weight.*convert_to_hf.py"),
    ],
)
def test_other_weights_are_refused_by_name(tmp_path, change, match):
    state = {name: tensor for name, tensor in (titan() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=match):
        load_dcp(saved(state, tmp_path / "saved"), CONFIG)


class Runs:
    """Its pickle writes a file."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return shutil.copy, (__file__, str(self.proof))


def metadata(folder):
    return pickle.loads((folder / METADATA).read_bytes())


def test_code_in_the_metadata_is_refused_by_name_and_does_not_run(tmp_path):
    folder, proof = saved(titan(), tmp_path / "saved"), tmp_path / "ran"
    described = metadata(folder)
    described.planner_data = {"x": Runs(proof)}  # a real program would ignore it after it ran
    content = pickle.dumps(described)
    (folder / METADATA).write_bytes(content)
    pickle.loads(content)
    assert proof.exists()
    proof.unlink()
    with pytest.raises(ValueError, match=rf"{METADATA}: its pickle names shutil.copy, .* It was not run"):
        load_dcp(folder, CONFIG)
    assert not proof.exists()


def test_code_in_place_of_a_tensor_is_refused_by_name_and_does_not_run(tmp_path):
    folder, proof = saved(titan(), tmp_path / "saved"), tmp_path / "ran"
    described = metadata(folder)
    place = next(place for key, place in described.storage_data.items() if key.fqn == "norm.weight")
    torch.save(Runs(proof), folder / "evil.distcp")
    place.relative_path, place.offset = "evil.distcp", 0
    place.length = (folder / "evil.distcp").stat().st_size
    (folder / METADATA).write_bytes(pickle.dumps(described))
    with pytest.raises(ValueError, match=r"evil.distcp: its pickle names shutil.copy, .* It was not run"):
        load_dcp(folder, CONFIG)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("relative_path", "../saved/__0_0.distcp", "must name files of its folder"),
        ("relative_path", "gone.distcp", "gone.distcp: not readable as a tensor"),
        ("offset", 1, "not readable as a tensor"),
        ("length", 100, "not readable as a tensor"),
        ("transform_descriptors", ["zstd"], "tensors must be stored as they are, got .*zstd"),
    ],
)
def test_a_place_that_is_wrong_is_an_error_that_names_the_file(tmp_path, field, value, match):
    folder = saved(titan(), tmp_path / "saved")
    described = metadata(folder)
    place = next(place for key, place in described.storage_data.items() if key.fqn == "norm.weight")
    setattr(place, field, value)
    (folder / METADATA).write_bytes(pickle.dumps(described))
    with pytest.raises(ValueError, match=match):
        load_dcp(folder, CONFIG)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"no pickle", pickle.dumps([1, 2]), pickle.dumps({})])
def test_metadata_that_is_none_is_an_error_that_names_it(tmp_path, content):
    folder = saved(titan(), tmp_path / "saved")
    (folder / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{METADATA}: damaged"):
        load_dcp(folder, CONFIG)


def test_a_piece_that_is_missing_or_another_one_is_an_error(tmp_path):
    folder = saved(titan(), tmp_path / "saved")
    whole = metadata(folder)
    described = metadata(folder)
    described.state_dict_metadata["norm.weight"].chunks.clear()
    (folder / METADATA).write_bytes(pickle.dumps(described))
    with pytest.raises(ValueError, match=r"'norm.weight' has 32 values that are not finite"):
        load_dcp(folder, CONFIG)
    places = {key.fqn: place for key, place in whole.storage_data.items()}
    vars(places["norm.weight"]).update(vars(places["output.weight"]))
    (folder / METADATA).write_bytes(pickle.dumps(whole))
    with pytest.raises(ValueError, match=r"a piece has the shape \[50, 32\].* says \[32\]"):
        load_dcp(folder, CONFIG)
