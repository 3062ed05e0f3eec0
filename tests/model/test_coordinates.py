"""Coordinate check: how large activations are at initialization, by width and by depth.

A norm hands every branch inputs of size 1, so a branch's output follows from its weights' deviations alone:
s = init_std for all linears, s / sqrt(branches) for those that write to the residual stream. What is checked
is the root mean square over tokens and channels.
"""

import math

import pytest
import torch

from model.shapes import random_tokens, small_model

STD = 0.02
WIDTHS = (64, 128, 256)
TOKENS = (8, 64)


def by_width(d_model, pattern="M-*-", **changes):
    heads = d_model // 16
    return small_model(
        pattern,
        d_model=d_model,
        d_ffn=4 * d_model,
        num_heads=heads,
        num_kv_heads=heads // 2,
        mamba_num_heads=2 * heads,
        num_groups=1,
        init_std=STD,
        **changes,
    )


def rms(x):
    return float(x.double().square().mean().sqrt())


@torch.no_grad()
def measured(model):
    """What each block adds to the stream, by number; the stream at the end; logits.

    Of attention only token 0, whose output is its one value and not an average.
    """
    found = {}

    def note(name, x):
        found[name] = rms(x)

    hooks = [model.norm.register_forward_hook(lambda _m, inputs, _o: note("stream", inputs[0]))]
    for index, (block, letter) in enumerate(zip(model.blocks, model.config.pattern, strict=True)):
        tokens = slice(0, 1) if letter == "*" else slice(None)
        hooks.append(
            block.mixer.register_forward_hook(
                lambda _m, _i, output, index=index, tokens=tokens: note(index, output[:, tokens])
            )
        )
    note("logits", model(random_tokens(*TOKENS)))
    for hook in hooks:
        hook.remove()
    return found


def derived(config):
    """The same from the deviations of the weights."""
    d, branches = config.d_model, config.num_residual_branches
    entering, writing = STD * math.sqrt(d), STD / math.sqrt(branches)
    squared_relu = math.sqrt(1.5) * entering**2  # E relu(x)^4 = 3/2 E[x^2]^2 for a normal x
    size = {
        "M": writing * math.sqrt(config.d_mamba),  # its last norm makes the size 1
        "-": writing * math.sqrt(config.d_ffn) * squared_relu,
        "*": writing * math.sqrt(d) * entering,
    }
    wanted: dict[int | str, float] = {index: size[letter] for index, letter in enumerate(config.pattern)}
    wanted["stream"] = math.sqrt(STD**2 + sum(value**2 for value in wanted.values()))
    return wanted | {"logits": STD * math.sqrt(d)}


@pytest.mark.parametrize("d_model", WIDTHS)
def test_activations_start_at_the_size_that_the_weights_deviations_say(d_model):
    model = by_width(d_model)
    found, wanted = measured(model), derived(model.config)
    for name, size in wanted.items():
        # The smallest sample is attention's: 8 tokens of 32 values, and a deviation is known to
        # 1 / sqrt(2 * 256) = 4.4 % of itself; three of those.
        assert abs(found[name] / size - 1) <= 0.13, name


@pytest.mark.parametrize("repeats", [2, 8, 16])
def test_the_streams_size_at_the_end_does_not_depend_on_depth(repeats):
    shallow, deep = (measured(by_width(64, "M-*-" * n)) for n in (1, repeats))
    for name in ("stream", "logits"):
        # Sums of independent branches: their sizes vary by about 1 / sqrt(64) over random weights.
        assert abs(deep[name] / shallow[name] - 1) <= 0.125, name


def growth(model, lr):
    """By which factor four steps of AdamW on random tokens change the size of the logits."""
    before = measured(model)["logits"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(4):
        tokens = random_tokens(4, 17)
        loss, count = model.loss(tokens[:, :-1], tokens[:, 1:])
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return measured(model)["logits"] / before


def test_first_steps_change_logits_alike_at_all_widths_if_the_rate_falls_with_the_width():
    """Adam moves every weight by about the rate, so a sum over d of them moves by d times as much."""
    falling = [growth(by_width(d_model), 1e-3 * 64 / d_model) for d_model in WIDTHS]
    assert min(falling) > 1.05, "steps this small would show nothing"
    assert max(falling) / min(falling) <= 1.1
    # At a rate that stays the same a model four times as wide grows by more than twice the excess.
    assert growth(by_width(WIDTHS[-1]), 1e-3) - 1 >= 2 * (falling[0] - 1)


def test_first_steps_change_logits_alike_at_all_depths():
    factors = [growth(by_width(64, "M-*-" * repeats), 1e-3) for repeats in (2, 6)]
    assert min(factors) > 1.05, "steps this small would show nothing"
    assert max(factors) / min(factors) <= 1.1
