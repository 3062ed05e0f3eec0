"""Every parameter that a product reads is in the summary, by whatever name and in whatever class."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fourbits as fb

NAMES = (
    "query",
    "w_pos",
    "transposed_w",
    "token_mix",
    "table",
    "latent_proj",
    "masked_w",
    "codebook_w",
    "bias_w",
)


FURTHER = "further parameter of LoRA"


class Raw(nn.Module):
    """A model whose forward multiplies by parameters with misleading names."""

    query: Tensor
    w_pos: Tensor
    transposed_w: Tensor
    token_mix: Tensor
    table: Tensor
    latent_proj: Tensor
    masked_w: Tensor
    codebook_w: Tensor
    bias_w: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.randn(32, 32) / 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.query + torch.matmul(x, self.w_pos.t()) + F.linear(x, self.transposed_w)
        mix = self.token_mix.to(x.dtype)
        x = torch.einsum("bi,io->bo", x, mix) + x.matmul(self.table)
        x = torch.addmm(x, x, self.latent_proj) + x.mm(self.masked_w[:, :])
        return F.linear(input=x, weight=self.codebook_w) + x @ self.bias_w


class Added(nn.Module):
    """Parameters that are added, looked up or multiplied elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(16, 32))
        self.cls_token = nn.Parameter(torch.randn(4, 32))
        self.layer_scale = nn.Parameter(torch.ones(4, 32))
        self.up = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x + self.pos_embed[: len(x)])


class LoRA(nn.Linear):
    """A linear layer with further matrices, as loralib has them."""

    def __init__(self) -> None:
        super().__init__(32, 48)
        self.a, self.b = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(48, 4))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.a.t() @ self.b.t()


class Normed(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(32)
        self.w = nn.Parameter(torch.randn(32, 32))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) @ self.w


class Convolved(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(32, 32, 3)
        self.proj = nn.Parameter(torch.randn(32, 32))

    def forward(self, input: Tensor) -> Tensor:
        return self.proj @ super().forward(input)


class MinimalGPT(nn.Module):
    """Its head is the embedding's table, without a layer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.body = nn.Embedding(64, 32), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.body(self.wte(tokens)), self.wte.weight)


def rows(model: nn.Module) -> dict[str, tuple[tuple[int, int], str]]:
    summary = fb.convert(model, "nvfp4-naive")
    return {row.name: (row.shape, row.reason) for row in summary.rows}


@pytest.mark.filterwarnings("ignore:fourbits. convert quantized nothing")
def test_what_the_source_multiplies_by_is_listed_whatever_its_name():
    assert rows(Raw()) == dict.fromkeys(NAMES, ((32, 32), "parameter of Raw, which is not a linear layer"))


def test_what_is_added_or_looked_up_is_not_counted_but_named():
    summary = fb.convert(Added(), "nvfp4-naive")
    assert [row.name for row in summary.rows] == ["up"]
    assert [(other.name, other.shape) for other in summary.others] == [
        ("pos_embed", (16, 32)),
        ("cls_token", (4, 32)),
        ("layer_scale", (4, 32)),
    ]
    assert summary.share_of_flops == 1.0
    assert "3 not counted   bf16     no product by it was found in the source" in str(summary)


@pytest.mark.filterwarnings("ignore:fourbits. convert quantized nothing")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (LoRA, {"0": "LoRA computes more than nn.Linear", "0.a": FURTHER, "0.b": FURTHER}),
        (Normed, {"0.w": "parameter of Normed, which is not a linear layer"}),
        (
            Convolved,
            {"0.weight": "convolution", "0.proj": "parameter of Convolved, which is not a linear layer"},
        ),
    ],
)
def test_further_parameters_of_derived_classes_are_listed(kind, expected):
    assert {name: reason for name, (_, reason) in rows(nn.Sequential(kind())).items()} == expected


def test_an_embedding_that_serves_as_output_matrix_counts_in_the_share():
    model = MinimalGPT()
    summary = fb.convert(model, "nvfp4-naive")
    reasons = {row.name: row.reason for row in summary.rows}
    assert reasons["wte.weight"] == "embedding that MinimalGPT also multiplies by"
    assert summary.share_of_flops == pytest.approx(32 * 32 / (32 * 32 + 64 * 32))
    lines = [line.split() for line in str(summary).splitlines()]
    assert [
        "1",
        "other",
        "weight",
        "bf16",
        "embedding",
        "that",
        "MinimalGPT",
        "also",
        "multiplies",
        "by",
    ] in lines


class Dense(nn.Module):
    """Every expert for every token, which no loop of experts computes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts_up = nn.Parameter(torch.randn(4, 32, 48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("td,edh->eth", x, self.experts_up)


@pytest.mark.filterwarnings("ignore:fourbits. convert quantized nothing")
def test_an_einsum_over_all_experts_is_not_claimed():
    reason = "stacked weights of Dense, not a known group of linear layers"
    assert rows(nn.Sequential(Dense())) == {"0.experts_up": ((128, 48), reason)}


class Reads(nn.Module):
    """Multiplies by the weight of a layer that it never calls, in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32, bias=False)
        self.outer = nn.Linear(32, 32)


class ReadsTransposed(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x @ self.inner.weight.T)


class ReadsConverted(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.addmm(x, x, self.inner.weight.to(x.dtype).t()))


class ReadsFacts(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.to(self.inner.weight.dtype)))


@pytest.mark.parametrize("kind", [ReadsTransposed, ReadsConverted])
def test_a_layer_whose_weight_is_read_in_any_form_and_never_called_is_not_claimed(kind):
    assert rows(kind(""))["inner"][1] == f"{kind.__name__} reads this weight and never calls the layer"


def test_reading_a_weights_dtype_is_no_product():
    assert rows(ReadsFacts(""))["inner"][1] == "recipe nvfp4-naive"


class HeadWithoutBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.to_logits = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 256)


def test_the_last_layer_with_a_column_for_each_row_of_the_embedding_is_the_head():
    found = rows(HeadWithoutBlocks())
    assert found["to_logits"][1] == "head: as many columns as the embedding has rows, 256"
    assert found["body"][1] == "recipe nvfp4-naive"


def test_a_last_layer_that_may_be_a_head_is_warned_of_without_blocks():
    model = HeadWithoutBlocks()
    model.to_logits = nn.Linear(32, 272)  # a padded vocabulary
    with pytest.warns(UserWarning, match="no output head was found, and 'to_logits' is .* the last layer"):
        fb.convert(model, "nvfp4-naive", stacks=[])


class RawConvolutions(nn.Module):
    """Kernels as parameters; the one per channel is no matrix, and neither counts as experts."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.depthwise = (
            nn.Parameter(torch.randn(64, 64, 3)),
            nn.Parameter(torch.randn(64, 1, 4)),
        )
        self.beside = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv1d(F.conv1d(x, self.kernel), self.depthwise, groups=64)
        return self.beside(x.transpose(1, 2))


def test_kernels_of_convolutions_are_listed_and_are_no_experts():
    found = rows(RawConvolutions())
    assert {name: reason for name, (_, reason) in found.items()} == {
        "kernel": "parameter of RawConvolutions, which is not a linear layer",
        "beside": "recipe nvfp4-naive",
    }


class Reader(nn.Module):
    """A second reader of the same table."""

    def __init__(self, inner: MinimalGPT) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens) + F.linear(self.inner.wte(tokens), self.inner.wte.weight)


class OwnHead(nn.Embedding):
    def logits(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def test_a_table_is_one_row_however_many_read_it():
    assert list(rows(Reader(MinimalGPT()))) == ["inner.wte.weight", "inner.body"]
    own = nn.ModuleDict({"embed": OwnHead(64, 32), "body": nn.Linear(32, 32)})
    assert rows(own)["embed.weight"] == ((64, 32), "embedding that OwnHead also multiplies by")


class Many(nn.Module):
    """One of each parameter that no product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(64, 32), nn.LayerNorm([4, 32])
        self.depthwise = nn.Conv1d(32, 32, 4, groups=32)
        self.experts_bias = nn.Parameter(torch.zeros(4, 32))
        self.named = nn.ParameterDict({"query": torch.randn(32, 32)})
        self.listed = nn.ParameterList([torch.randn(32, 32)])
        self.body = nn.Linear(32, 32)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 32))  # a vector


def test_every_parameter_of_two_dimensions_is_in_the_summary_once_whatever_it_is_called():
    model = Many()
    summary = fb.convert(model, "nvfp4-naive", include="body")  # which is the last layer, and no head
    assert {other.name: other.reason for other in summary.others} == {
        "table.weight": "embedding table",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "depthwise.weight": "depthwise convolution",
        "experts_bias": "bias",
        "named.query": "no product by it was found in the source",
    }
    named = [row.name for row in summary.rows] + [other.name for other in summary.others]
    assert sorted(named) == sorted({*named})
    matrices = {name for name, p in model.named_parameters() if sum(size > 1 for size in p.shape) > 1}
    assert {f"{name}.weight" if name == "body" else name for name in named} == matrices
    table = {"name": "table.weight", "shape": [64, 32], "reason": "embedding table"}
    assert table in summary.to_dict()["others"]  # pyright: ignore[reportOperatorIssue]


def times(x: Tensor, matrix: Tensor) -> Tensor:
    return x @ matrix.t()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 32) / 6)


class Elsewhere(nn.Module):
    """Multiplies by parameters called query or table, each in a place that its own class does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pos_mix = (nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))
        self.keyed = nn.ParameterDict({"query": torch.randn(32, 32)})
        self.tables = nn.ParameterList([torch.randn(32, 32) / 6 for _ in range(2)])
        self.inner, self.body = Table(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = times(x, self.query) @ getattr(self, "pos_mix") + self.inner.table.T @ x.t()  # noqa: B009
        for table in self.tables:
            x = F.linear(x, table.to(x.dtype))
        return self.body(x @ self.keyed["query"])


def test_a_parameter_that_a_helper_a_container_or_another_module_multiplies_by_is_counted():
    model = Elsewhere()
    of = dict.fromkeys(("query", "pos_mix"), "parameter of Elsewhere, which is not a linear layer")
    of |= {f"tables.{i}": "parameter of Elsewhere, which is not a linear layer" for i in range(2)}
    of |= {"keyed.query": "parameter of Elsewhere, which is not a linear layer"}
    of |= {"inner.table": "parameter of Table, which is not a linear layer", "body": "recipe nvfp4-naive"}
    summary = fb.convert(model, "nvfp4-naive")
    assert {row.name: row.reason for row in summary.rows} == of
    assert summary.others == ()
    assert summary.share_of_flops == pytest.approx(1 / 7)


class Hidden(nn.Module):
    """Multiplies by parameters that its source does not show, before and after its only linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.table, self.pos_added, self.mask_of = (
            nn.Parameter(torch.randn(32, 32) / 6) for _ in range(4)
        )
        self.body, self.embed = nn.Linear(32, 32), nn.Embedding(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        own = dict(self.named_parameters())
        x = torch.cat([self.embed(tokens), own["pos_added"][:4]]) + own["pos_added"][: len(tokens) + 4]
        x = x * own["mask_of"][: len(x)] @ own["query"].to(torch.bfloat16).float()
        return self.body(x) @ own["table"].t()


def test_the_audit_names_a_parameter_that_a_product_multiplied_by_and_the_summary_does_not_count():
    model = Hidden()
    assert len(fb.convert(model, "nvfp4-naive", include="body").others) == 5
    fb.set_step(model, 0)
    loss = model(torch.arange(12)).square().mean()
    loss.backward()
    report = fb.audit(model)
    assert (report.called, report.multiplied) == (("body",), ("query",))
    assert (report.claimed_share, report.called_share) == (1.0, 0.5)
    assert "multiplied, in high precision: query" in str(report)
    report = fb.audit(model, loss)  # also what comes after the last quantized layer
    assert report.multiplied == ("query", "table")
    assert report.called_share == pytest.approx(1 / 3)


def test_the_first_optimizer_step_warns_of_such_a_parameter_once():
    model = Hidden()
    fb.convert(model, "nvfp4-naive", include="body")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        fb.set_step(model, number)
        model(torch.arange(12)).square().mean().backward()
        if number:
            optimizer.step()  # a second warning would be an error
        else:
            with pytest.warns(UserWarning, match=r"products multiply by query, .* 50% .*, not 100%"):
                optimizer.step()
