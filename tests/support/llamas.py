"""A Llama's weights as torchtitan and as Megatron-LM store them, and its logits from each, in plain FP64."""

import math

import torch

from fourbits.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=1,  # a checkpoint's own counts
    d_model=32,
    pattern="TT",
    d_ffn=48,
    activation="swiglu",
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=500.0,
    norm_eps=1e-5,
)
ROWS = 50
_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"


def drawn(shape, rng, scale=0.3):
    return torch.randn(shape, generator=rng) * scale


def titan(config=CONFIG, rows=ROWS, seed=0):
    """A state_dict of torchtitan."""
    rng = torch.Generator().manual_seed(seed)
    d, f, q, kv = config.d_model, config.d_ffn, config.num_heads, config.num_kv_heads
    state = {"tok_embeddings.weight": drawn((rows, d), rng), "output.weight": drawn((rows, d), rng)}
    state["norm.weight"] = 1 + drawn((d,), rng)
    for layer in range(len(config.pattern)):
        shapes = {
            "attention.wq": (q * config.head_dim, d),
            "attention.wk": (kv * config.head_dim, d),
            "attention.wv": (kv * config.head_dim, d),
            "attention.wo": (d, q * config.head_dim),
            "feed_forward.w1": (f, d),
            "feed_forward.w2": (d, f),
            "feed_forward.w3": (f, d),
        }
        state |= {f"layers.{layer}.{name}.weight": drawn(shape, rng) for name, shape in shapes.items()}
        for norm in ("attention_norm", "ffn_norm"):
            state[f"layers.{layer}.{norm}.weight"] = 1 + drawn((d,), rng)
    return state


def newer(state):
    """The same in the names of torchtitan 0.3."""
    inner = {f"attention.{part}.weight": f"attention.qkv_linear.{part}.weight" for part in ("wq", "wk", "wv")}
    inner["output.weight"] = "lm_head.weight"
    found = {}
    for name, tensor in state.items():
        own = name.split(".", 2)[-1] if name.startswith("layers.") else name
        found[name.removesuffix(own) + inner.get(own, own)] = tensor
    return found


def megatron(config=CONFIG, rows=ROWS, seed=1):
    """A state_dict of Megatron-LM, with all layers in one tensor."""
    rng = torch.Generator().manual_seed(seed)
    layers, d, f = len(config.pattern), config.d_model, config.d_ffn
    heads = config.num_heads + 2 * config.num_kv_heads
    return {
        "embedding.word_embeddings.weight": drawn((rows, d), rng),
        "decoder.final_layernorm.weight": 1 + drawn((d,), rng),
        "output_layer.weight": drawn((rows, d), rng),
        f"decoder.layers.{_QKV}.weight": drawn((layers, heads * config.head_dim, d), rng),
        f"decoder.layers.{_QKV}.layer_norm_weight": 1 + drawn((layers, d), rng),
        "decoder.layers.self_attention.linear_proj.weight": drawn(
            (layers, d, config.num_heads * config.head_dim), rng
        ),
        f"decoder.layers.{_FC1}.weight": drawn((layers, 2 * f, d), rng),
        f"decoder.layers.{_FC1}.layer_norm_weight": 1 + drawn((layers, d), rng),
        "decoder.layers.mlp.linear_fc2.weight": drawn((layers, d, f), rng),
    }


def per_layer(state):
    """Megatron's tensors one by one, with norms that stand alone, as without Transformer Engine."""
    found = {}
    for name, tensor in state.items():
        if not name.startswith("decoder.layers."):
            found[name] = tensor
            continue
        inner = name.removeprefix("decoder.layers.")
        inner = inner.replace(f"{_QKV}.layer_norm_weight", "input_layernorm.weight")
        inner = inner.replace(f"{_FC1}.layer_norm_weight", "pre_mlp_layernorm.weight")
        found |= {f"decoder.layers.{index}.{inner}": each.clone() for index, each in enumerate(tensor)}
    return found


def logits_of_titan(state, tokens, config=CONFIG):
    """Logits [T, rows] of tokens [T]; channels 2 i and 2 i + 1 of a head are a complex number, turned."""
    state = {name: tensor.double() for name, tensor in state.items()}
    head, per_group = config.head_dim, config.num_heads // config.num_kv_heads

    def turned(vectors):
        """vectors: [T, P]"""
        pairs = torch.view_as_complex(vectors.reshape(len(vectors), head // 2, 2).contiguous())
        turns = angles(len(vectors), config)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten(1)

    x = state["tok_embeddings.weight"][tokens]
    for layer in range(len(config.pattern)):
        own = {name.split(".", 2)[2]: t for name, t in state.items() if name.startswith(f"layers.{layer}.")}
        y, out = normed(x, own["attention_norm.weight"], config), []
        for number in range(config.num_heads):
            group = number // per_group
            q = turned(y @ own["attention.wq.weight"][number * head : (number + 1) * head].T)
            k = turned(y @ own["attention.wk.weight"][group * head : (group + 1) * head].T)
            out.append(attended(q, k, y @ own["attention.wv.weight"][group * head : (group + 1) * head].T))
        x = x + torch.cat(out, 1) @ own["attention.wo.weight"].T
        y = normed(x, own["ffn_norm.weight"], config)
        gate = torch.nn.functional.silu(y @ own["feed_forward.w1.weight"].T)
        x = x + (gate * (y @ own["feed_forward.w3.weight"].T)) @ own["feed_forward.w2.weight"].T
    return normed(x, state["norm.weight"], config) @ state["output.weight"].T


def logits_of_megatron(state, tokens, config=CONFIG):
    """The same of Megatron's layout, where channels i and i + P/2 of a head turn together."""
    state = {name: tensor.double() for name, tensor in state.items()}
    head, per_group = config.head_dim, config.num_heads // config.num_kv_heads

    def turned(vectors):
        one, other = vectors.chunk(2, 1)
        cos, sin = angles(len(vectors), config).cos(), angles(len(vectors), config).sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), 1)

    x = state["embedding.word_embeddings.weight"][tokens]
    for layer in range(len(config.pattern)):
        start = "decoder.layers."
        own = {name.removeprefix(start): t[layer] for name, t in state.items() if name.startswith(start)}
        y, out = normed(x, own[f"{_QKV}.layer_norm_weight"], config), []
        rows = own[f"{_QKV}.weight"].split(head)  # per KV head: its heads of q, then k, then v
        for group in range(config.num_kv_heads):
            *queries, key, value = rows[group * (per_group + 2) : (group + 1) * (per_group + 2)]
            out += [attended(turned(y @ q.T), turned(y @ key.T), y @ value.T) for q in queries]
        x = x + torch.cat(out, 1) @ own["self_attention.linear_proj.weight"].T
        y = normed(x, own[f"{_FC1}.layer_norm_weight"], config)
        gate, up = (y @ own[f"{_FC1}.weight"].T).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ own["mlp.linear_fc2.weight"].T
    return normed(x, state["decoder.final_layernorm.weight"], config) @ state["output_layer.weight"].T


def angles(length, config):
    """[T, P / 2]"""
    powers = torch.arange(0, config.head_dim, 2).double() / config.head_dim
    return torch.outer(torch.arange(length).double(), config.rope_theta**-powers)


def normed(x, gain, config):
    return x / (x.square().mean(1, keepdim=True) + config.norm_eps).sqrt() * gain


def attended(q, k, v):
    scores = (q @ k.T) / math.sqrt(q.shape[1])
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(1) @ v
