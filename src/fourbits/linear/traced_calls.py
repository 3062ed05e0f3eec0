"""Where a call begins among the tokens of a micro-batch, if a graph calls a layer several times.

`layer_state.Calls` counts eager calls. A graph's calls are counted while the back end traces it, so that the
position of a call is a part of the graph, and costs nothing where a layer is called once.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.weak import WeakTensorKeyDictionary

from fourbits.quant.request import OPERAND_ROLES, draws
from fourbits.recipe.recipe import table_from_text

#: counters of graphs that are being traced -> (layer, whether it records) -> tokens of its calls so far
_traced: Any = WeakTensorKeyDictionary()


def tokens_before(counter: Tensor, layer: int, table: str, training: bool, tokens: "int | Tensor") -> Any:
    """How many tokens the earlier calls of a layer in the same graph read, each rounded up to a block of 16.

    counter: the graph's, a different tensor in each trace; layer: its number, may be symbolic;
    tokens: of this call, may be symbolic, or those of each layer of a group [E]. The result is of the same
    kind. None for a first call, outside of a trace, and for calls that draw no random bits.
    """
    if not (isinstance(counter, FunctionalTensor) and training):
        return None
    parsed = table_from_text(table)
    if not any(draws(parsed.operand(role)) for role in OPERAND_ROLES):
        return None
    starts = _traced.setdefault(counter, {})
    call = str(layer), torch.is_grad_enabled()  # a symbolic number has no hash
    before = starts.get(call)
    starts[call] = (0 if before is None else before) + -(-tokens // 16) * 16
    return before
