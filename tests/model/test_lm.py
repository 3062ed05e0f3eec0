"""The model as a whole: devices, dtypes, state, determinism, training."""

import copy
import pickle

import pytest
import torch

from fourbits.model.config import RopeScaling
from model.shapes import random_tokens, small_config, small_model


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_it_works_on_the_meta_device():
    with torch.device("meta"):
        model = small_model("M-*-T", dtype=torch.bfloat16)
        tokens = random_tokens(2, 32)
        logits = model(tokens)
        loss, count = model.loss(tokens, tokens)
    loss.backward()
    assert logits.shape == (2, 32, 64)
    assert logits.is_meta
    assert count.is_meta
    assert all(gradient(parameter).shape == parameter.shape for parameter in model.parameters())


def test_masters_are_fp32_activations_bf16_and_gradients_fp32():
    model = small_model("M-*-T", dtype=torch.bfloat16)
    seen = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _m, inputs, output: seen.update((inputs[0].dtype, output.dtype))
            )
    loss, _ = model.loss(random_tokens(2, 16), random_tokens(2, 16))
    loss.backward()
    assert loss.dtype == torch.float32
    assert seen == {torch.bfloat16}
    assert (
        {p.dtype for p in model.parameters()}
        == {gradient(p).dtype for p in model.parameters()}
        == {torch.float32}
    )


@pytest.mark.parametrize(
    ("name", "compute_dtype", "dtype"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp32", torch.bfloat16, torch.float32),
        ("bf16", torch.float32, torch.float32),
    ],
)
def test_the_residual_stream_has_the_configured_dtype_or_that_of_the_branches_if_wider(
    name, compute_dtype, dtype
):
    model = small_model("M-*-T", dtype=compute_dtype, residual_dtype=name)
    seen = set()
    for block in model.blocks:
        block.register_forward_hook(lambda _m, inputs, output: seen.update((inputs[0].dtype, output.dtype)))
    assert model(random_tokens(1, 8)).dtype == compute_dtype
    assert seen == {dtype}


def test_bf16_activations_stay_close_to_fp32():
    tokens = random_tokens(4, 32)
    wanted = small_model("M-*-T", dtype=torch.float32)(tokens)
    for residual in ("bf16", "fp32"):
        found = small_model("M-*-T", dtype=torch.bfloat16, residual_dtype=residual)(tokens)
        # Each of the five branches and the head rounds a few times, by eps / 2 = 2^-9 of its own size.
        assert (found.float() - wanted).norm() <= 8 * 2**-9 * wanted.norm()


def test_a_state_dict_restores_the_same_model():
    source, target = small_model("M-*-T", seed=1), small_model("M-*-T", seed=2)
    tokens = random_tokens(2, 16)
    assert not torch.equal(source(tokens), target(tokens))
    assert target.load_state_dict(source.state_dict(), strict=True) == ([], [])
    assert torch.equal(source(tokens), target(tokens))


def test_copies_compute_the_same():
    model = small_model("M-*-T")
    tokens = random_tokens(2, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(model(tokens), twin(tokens))


def test_equal_inputs_give_equal_bits():
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        model = small_model("M-*-T", dtype=torch.bfloat16)
        loss, _ = model.loss(random_tokens(4, 40), random_tokens(4, 40))
        loss.backward()
        runs.append([loss, *(parameter.grad for parameter in model.parameters())])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_a_tied_head_shares_the_embeddings_parameter_and_its_gradient():
    model = small_model("-", tie_embeddings=True)
    assert model.head.weight is model.embed.weight
    tokens = random_tokens(2, 16)
    model.loss(tokens, tokens)[0].backward()
    unused = torch.ones(64, dtype=torch.bool)
    unused[tokens.flatten()] = False
    assert (gradient(model.embed.weight)[unused] != 0).any(), (
        "the head's part reaches rows that no token used"
    )


@pytest.mark.parametrize("pattern", ["M-*-", "TT"])
def test_it_overfits_one_batch(pattern):
    model = small_model(pattern, dtype=torch.bfloat16)
    tokens = random_tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for _ in range(40):
        total, count = model.loss(tokens[:, :-1], tokens[:, 1:])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((total / count).detach()))
    assert losses[0] > 4  # ln 64 = 4.16
    assert losses[-1] < 0.3


def test_a_sequence_longer_than_the_models_limit_is_refused():
    model = small_model("M", max_seq_len=8)
    with pytest.raises(ValueError, match=r"at most max_seq_len = 8 tokens, got 9"):
        model(random_tokens(1, 9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "M-x"}, "pattern must be one letter per block"),
        ({"pattern": ""}, "pattern must be one letter per block"),
        ({"mamba_num_heads": 0}, "mamba_num_heads must be at least 1"),
        ({"num_groups": 3}, "mamba_num_heads must be a multiple of num_groups"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"d_ffn": 0}, "d_ffn must be at least 1"),
        ({"rope_theta": 1e4, "head_dim": 15}, "head_dim even"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"min_time_step": -0.1}, "min_time_step must be at least 0, got -0.1"),
        ({"rope_scaling": RopeScaling(kind="linear", factor=2)}, "rope_scaling needs rotary positions"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, or null, got 0"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_built_says_which_value_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        small_config(**{"pattern": "M-*-", **changes})


def test_sizes_of_parts_that_the_pattern_lacks_may_stay_zero():
    small_config("-", num_heads=0, num_kv_heads=0, head_dim=0, mamba_num_heads=0)
