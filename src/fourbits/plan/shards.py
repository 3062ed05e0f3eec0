"""Whether ranks can share the layers of a model under a recipe: heads, groups, and its blocks stay whole.

The trainer refuses the same: sizes that no recipe allows when a configuration is built (train/parallel.py),
and blocks or transforms longer than 16 when it splits the layers (train/ranks/tensor_parallel.py).
"""

from collections.abc import Iterator, Sequence

from fourbits.linear.feature_shard import feature_unit
from fourbits.model.config import ModelConfig
from fourbits.plan.linears import LinearGroup
from fourbits.train.parallel import Uneven, uneven

#: the unit of sizes in `uneven`
_BLOCK = 16


def uneven_layers(
    model: ModelConfig, groups: Sequence[LinearGroup], seq_len: int, tensor: int
) -> list[Uneven]:
    """Sizes that keep `tensor` ranks from sharing a model's layers, one entry per size."""
    found = {each.name: each for each in uneven(model, seq_len, tensor)}
    for each in _of_recipe(model, groups, tensor):
        if each.name not in found or found[each.name].multiple < each.multiple:
            found[each.name] = each
    return list(found.values())


def fitting_ranks(model: ModelConfig, groups: Sequence[LinearGroup], seq_len: int, below: int) -> int:
    """The largest number of ranks, fewer than `below`, that can share a model's layers; at least 1."""
    numbers = (n for n in range(min(below - 1, seq_len), 1, -1) if seq_len % n == 0)
    return next((n for n in numbers if not uneven_layers(model, groups, seq_len, n)), 1)


def _of_recipe(model: ModelConfig, groups: Sequence[LinearGroup], tensor: int) -> Iterator[Uneven]:
    """Sizes whose parts would split blocks or transforms longer than 16."""
    for group in groups:
        outputs = group.column_parallel
        unit = feature_unit(group.table, "out" if outputs else "in")
        if group.name == "head" or not group.quantized or unit <= _BLOCK:
            continue
        for name, size, rows in _split(model, group.name):
            if size % (unit * tensor):
                kind = rows or ("rows" if outputs else "columns")
                yield Uneven(name, size, unit * tensor, f"whole blocks of {unit} {kind} of {group.name}")


def _split(model: ModelConfig, layer: str) -> tuple[tuple[str, int, str], ...]:
    """(setting, size, rows) of the parts of a layer that are split, each by itself."""
    inner = model.mamba_num_heads * model.mamba_head_dim
    if layer == "in_proj":
        return (
            ("model.mamba_num_heads * model.mamba_head_dim", inner, "rows z and x"),
            ("model.num_groups * model.state_size", model.num_groups * model.state_size, "rows B and C"),
            ("model.mamba_num_heads", model.mamba_num_heads, "rows dt, one per head,"),
        )
    if layer == "out_proj":
        return (("model.mamba_num_heads * model.mamba_head_dim", inner, ""),)
    if layer in ("q_proj", "o_proj"):
        return (("model.num_heads * model.head_dim", model.num_heads * model.head_dim, ""),)
    if layer in ("k_proj", "v_proj"):
        return (("model.num_kv_heads * model.head_dim", model.num_kv_heads * model.head_dim, ""),)
    return (("model.d_ffn", model.d_ffn, ""),)
