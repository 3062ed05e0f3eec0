"""Two ranks on CPUs that share a Llama of Megatron Core, save it in its own way, and compute its logits."""
# pyright: reportMissingImports=false

import contextlib
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

from support.llamas import CONFIG
from support.two_processes import write_result

VOCABULARY, LENGTH = 52, 12
TOKENS = torch.arange(LENGTH)[None] * 5 % VOCABULARY


def configured():
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=len(CONFIG.pattern),
        hidden_size=CONFIG.d_model,
        num_attention_heads=CONFIG.num_heads,
        num_query_groups=CONFIG.num_kv_heads,
        kv_channels=CONFIG.head_dim,
        ffn_hidden_size=CONFIG.d_ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=CONFIG.norm_eps,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        init_method_std=0.3,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def built():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(0)
    model = GPTModel(
        configured(),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=int(CONFIG.rope_theta or 0),
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    ).eval()
    rng = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # whole on each rank
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=rng)
    return model


def saved(rank):
    """The logits [1, T, V]; the checkpoint is beside the result file."""
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    # it asks for the CUDA device and its generator, and on a CPU needs neither
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=contextlib.nullcontext)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = built()
    folder = Path(sys.argv[3]).parent / "iter_0000001"
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model(TOKENS, torch.arange(LENGTH)[None], hidden)


if __name__ == "__main__":
    write_result(saved)
