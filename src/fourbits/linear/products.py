"""The matrix multiplications in source code: which expressions are their factors."""

import ast
from collections.abc import Iterator

#: functions and methods that multiply matrices -> how many of their first arguments are factors; None for all
_PRODUCTS: dict[str, int | None] = {
    **dict.fromkeys(
        ("matmul", "mm", "mv", "bmm", "einsum", "tensordot", "inner", "multi_dot", "chain_matmul")
    ),
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), 2),
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), 2),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 2),
    **dict.fromkeys(("bilinear", "scaled_dot_product_attention"), 3),
    **dict.fromkeys(("addmm", "addbmm", "addmv", "baddbmm"), 3),
}


def factors(node: ast.AST) -> Iterator[ast.AST]:
    """The factors of a node that is a product; none of any other node."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
        yield from (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    elif isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in _PRODUCTS:
            for argument in node.args[: _PRODUCTS[name]]:
                yield argument.value if isinstance(argument, ast.Starred) else argument
            yield from (keyword.value for keyword in node.keywords if keyword.arg != "bias")
            if isinstance(function, ast.Attribute):  # x.matmul(w)
                yield function.value
