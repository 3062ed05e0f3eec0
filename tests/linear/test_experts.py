"""Experts of transformers' interface: the bits of a loop of linear layers, in common training loops."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from fourbits.func_transforms import UnsupportedTransformError
from fourbits.linear import sr_counter
from fourbits.linear.audit import audit
from fourbits.linear.convert import convert
from fourbits.linear.set_recipe import set_recipe
from fourbits.linear.stacked.experts import QuantizedExperts
from fourbits.linear.step import counters_of, set_step
from fourbits.operators import OVERLOAD
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes

EXPERTS, WIDTH, INNER, TOKENS, TOP_K = 5, 32, 48, 37, 2
RECIPES = ["nvfp4", "nvfp4-46", "quartet2", "mxfp4", "fp8", "nvfp4-fwd"]


class Mixture(nn.Module):
    """A linear layer before and after experts, whose numbers and gradients depend on theirs."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = experts
        self.after = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.after(self.experts(self.before(x), chosen, weights))


class Loop(nn.Module):
    """The same experts as a list of linear layers up and a list down, one after the other."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        first = "gate_up_proj" if source.has_gate else "up_proj"
        self.up, self.down = (_linears(source, name) for name in (first, "down_proj"))
        self.act: Callable[[Tensor], Tensor] = source._apply_gate if source.has_gate else source.act_fn

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = [torch.zeros_like(x) for _ in range(chosen.shape[1])]
        for expert in range(EXPERTS):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                y = self.down[f"e{expert}"](self.act(self.up[f"e{expert}"](x[token])))
                y = y * weights[token, place, None]
                for k in range(chosen.shape[1]):
                    total[k] = total[k].index_put((token[place == k],), y[place == k])
        return torch.stack(total, 1).sum(1)


def _linears(source: Any, name: str) -> nn.ModuleDict:
    weight, bias = getattr(source, name).detach(), getattr(source, f"{name}_bias", None)
    found = nn.ModuleDict()
    for expert in range(EXPERTS):
        w = weight[expert].t() if source.is_transposed else weight[expert]
        linear = nn.Linear(w.shape[1], w.shape[0], bias=bias is not None)
        linear.weight.data.copy_(w)
        if bias is not None:
            linear.bias.data.copy_(bias[expert].detach())
        found[f"e{expert}"] = linear
    return found


def config_of(cls: Any, **named: Any) -> Any:
    config = cls(hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1, **named)
    config._experts_implementation = "eager"
    return config


FAMILIES: dict[str, Callable[[], Any]] = {
    "gate and up": lambda: MixtralExperts(config_of(MixtralConfig, num_local_experts=EXPERTS)),
    "transposed, interleaved, with biases": lambda: GptOssExperts(
        config_of(GptOssConfig, num_local_experts=EXPERTS)
    ),
    "without a gate": lambda: NemotronHExperts(
        config_of(NemotronHConfig, n_routed_experts=EXPERTS, moe_intermediate_size=INNER)
    ),
}


def mixture(family: str) -> Any:
    torch.manual_seed(3)
    model = Mixture(FAMILIES[family]())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def routing(unused: int = 2) -> tuple[Tensor, Tensor]:
    """Each token's experts, all different, none of them `unused`, and their weights."""
    usable = torch.tensor([e for e in range(EXPERTS) if e != unused])
    chosen = torch.stack([usable[torch.randperm(len(usable))[:TOP_K]] for _ in range(TOKENS)])
    return chosen, torch.rand(TOKENS, TOP_K)


def everywhere(model: nn.Module, recipe: str, **named: Any) -> Any:
    return convert(model, recipe, seed=5, keep_first=0, keep_last=0, stacks=[], **named)


def step(model: Any, x: Tensor, route: tuple[Tensor, Tensor], number: int | None = 3) -> dict[str, Tensor]:
    """Output and gradients of a training step; those of weights by parameter."""
    model.zero_grad()
    if number is not None:
        set_step(model, number)
    x, weights = x.clone().requires_grad_(), route[1].clone().requires_grad_()
    y = model(x, route[0], weights)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found: dict[str, Any] = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def as_experts(grads: dict[str, Tensor], like: Any) -> dict[str, Tensor]:
    """Gradients of a loop, stacked as the experts' parameters are."""
    found = {name: grad for name, grad in grads.items() if not name.startswith("experts.")}
    for name, parameter in like.experts.named_parameters():
        side, kind = ("down" if "down" in name else "up"), ("bias" if name.endswith("bias") else "weight")
        parts = []
        for expert in range(EXPERTS):
            grad = grads.get(f"experts.{side}.e{expert}.{kind}")
            if grad is None:
                grad = torch.zeros_like(parameter[expert])
            elif kind == "weight" and like.experts.is_transposed:
                grad = grad.t()
            parts.append(grad)
        found[f"experts.{name}"] = torch.stack(parts)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_have_the_bits_of_a_loop_of_linear_layers(family, recipe):
    model = mixture(family)
    loop = copy.deepcopy(model)
    loop.experts = Loop(model.experts)
    x, route = torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, recipe)
    everywhere(loop, recipe)
    for number in (3, 4):
        found, expected = step(model, x, route, number), as_experts(step(loop, x, route, number), model)
        assert found.keys() == expected.keys()
        for name in expected:
            if name.endswith("bias"):  # sums of dY, which activations over other vectors may round otherwise
                torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
            else:
                assert_same_bytes(found[name], expected[name], name)
    assert not found["experts.down_proj"][2].any(), "an expert without tokens has a gradient of zero"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_summary_and_the_audit_say_what_runs_and_bf16_restores_it(family):
    model = mixture(family)
    original, keys = type(model.experts), list(model.state_dict())
    parameters = dict(model.named_parameters())
    x, route = torch.randn(TOKENS, WIDTH), routing()
    plain = step(model, x, route, None)
    summary = everywhere(model, "nvfp4")
    first = "gate_up_proj" if model.experts.has_gate else "up_proj"
    quantized = {row.name: row.shape for row in summary.rows if row.quantized}
    width = 2 * INNER if model.experts.has_gate else INNER
    assert quantized == {
        "before": (WIDTH, WIDTH),
        f"experts.{first}": (EXPERTS * width, WIDTH),
        "experts.down_proj": (EXPERTS * WIDTH, INNER),
        "after": (WIDTH, WIDTH),
    }
    assert isinstance(model.experts, QuantizedExperts)
    assert isinstance(model.experts, original)
    assert audit(model).called == ()
    assert not torch.equal(step(model, x, route)["y"], plain["y"])
    report = audit(model)
    assert (set(report.called), report.called_share) == (set(quantized), 1.0)
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    convert(model, "bf16")
    assert type(model.experts) is original
    again = step(model, x, route, None)
    for name in plain:
        assert_same_bytes(again[name], plain[name], name)


def test_patterns_choose_single_projections_and_the_rest_stays_in_high_precision():
    model, x, route = mixture("gate and up"), torch.randn(TOKENS, WIDTH), routing()
    plain = step(copy.deepcopy(model), x, route, None)["y"]
    summary = everywhere(model, "nvfp4", exclude=["before", "after", "*.down_proj"])
    assert [row.name for row in summary.rows if row.quantized] == ["experts.gate_up_proj"]
    y = step(model, x, route)["y"]
    assert audit(model).called == ("experts.gate_up_proj",)
    assert 0 < torch.dist(y, plain) / plain.norm() < 0.3
    assert [r.name for r in everywhere(model, "nvfp4", include=["experts"]).rows if r.quantized] == [
        "experts.gate_up_proj",
        "experts.down_proj",
    ]
    with pytest.warns(UserWarning, match="quantized nothing"):
        everywhere(model, "nvfp4", exclude=["before", "after", "experts"])
    assert_same_bytes(step(model, x, route, None)["y"], plain)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_graphs_do_not_break_and_keep_the_bits(family, recipe):
    torch._dynamo.reset()
    model, x, route = mixture(family), torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, recipe)
    expected = step(model, x, route)
    set_step(model, 3)
    assert torch._dynamo.explain(model)(x, *route).graph_break_count == 0
    model.compile(backend="aot_eager", fullgraph=True)
    found = step(model, x, route)
    for name in expected:
        assert_same_bytes(found[name], expected[name], name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_repeats_the_bits(reentrant):
    model, x, route = mixture("gate and up"), torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, "nvfp4")
    expected = step(model, x, route)
    inner = copy.deepcopy(model)
    forward = type(inner).forward
    inner.forward = lambda *args: checkpoint(forward, inner, *args, use_reentrant=reentrant)
    found = step(inner, x, route)
    for name in expected:
        assert_same_bytes(found[name], expected[name], name)


def test_micro_batches_of_one_step_draw_different_bits_and_calls_follow_each_other():
    """The second call of a micro-batch draws what rows behind those of the first would."""
    model = mixture("gate and up").experts
    everywhere(model, "nvfp4")
    x, weights = torch.randn(32, WIDTH), torch.ones(32, 1)
    chosen = torch.zeros(32, 1, dtype=torch.int64)

    def gradient(first_token: int, calls: int) -> Tensor:
        set_step(model, 1, first_token=first_token)
        found: list[Any] = []
        for _ in range(calls):
            given = x.clone().requires_grad_()
            model(given, chosen, weights).sin().sum().backward()
            found.append(given.grad)
        return found[-1]

    first, second, follows = gradient(0, 1), gradient(0, 2), gradient(32, 1)
    assert not torch.equal(first, second)
    assert_same_bytes(second, follows)


def test_experts_called_in_chunks_draw_in_a_graph_what_they_draw_eagerly():
    """The second chunk of each expert begins where its rows of the first end, at the next block."""
    model, x, (chosen, weights) = mixture("gate and up").experts, torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, "nvfp4")

    def both(x: Tensor) -> Tensor:
        return torch.cat([model(x[:20], chosen[:20], weights[:20]), model(x[20:], chosen[20:], weights[20:])])

    found: list[Tensor] = []
    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        set_step(model, 1)
        given = x.clone().requires_grad_()
        call(given).sin().sum().backward()
        assert given.grad is not None
        found.append(given.grad)
    assert_same_bytes(found[0], found[1])


def test_flops_are_those_of_the_rows_that_experts_multiply():
    model, x, route = mixture("gate and up").experts, torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, "nvfp4")
    set_step(model, 0)
    with FlopCounterMode(display=False) as counted:
        model(x.requires_grad_(), *route).sum().backward()
    rows = TOKENS * TOP_K
    assert counted.get_total_flops() == 3 * 2 * rows * (WIDTH * 2 * INNER + INNER * WIDTH)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_compiler_knows_what_operators_return(transposed):
    x, dy, bias = torch.randn(20, WIDTH), torch.randn(20, INNER), torch.randn(3, INNER)
    weight = torch.randn(3, *((WIDTH, INNER) if transposed else (INNER, WIDTH)))
    offsets = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    counters, table = sr_counter.new_counter(1, 2, 0)[None], get_recipe("nvfp4").table.to_text()
    checks = ("test_faketensor", "test_schema")
    forward = (x, weight, bias, offsets, counters, 4, table, transposed, [True, True])
    opcheck(getattr(torch.ops.fourbits.experts_forward, OVERLOAD), forward, test_utils=checks)
    for needs in ([True, True, True], [False, True, False]):
        backward = (dy, x, weight, offsets, counters, [], 4, table, transposed, needs)
        opcheck(getattr(torch.ops.fourbits.experts_backward, OVERLOAD), backward, test_utils=checks)


def test_copies_and_pickles_of_converted_experts_compute_the_same():
    model, x, route = mixture("gate and up"), torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, "nvfp4")
    expected = step(model, x, route)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bytes(step(other, x, route)["y"], expected["y"])
        assert audit(other).called_share == 1.0
        other.experts.down_proj.data.zero_()
        assert_same_bytes(step(model, x, route)["y"], expected["y"], "the original")


def test_a_recipe_changes_between_steps():
    model, x, route = mixture("gate and up"), torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, "nvfp4", exclude=["experts.gate_up_proj"])
    step(model, x, route, 2)
    summary = set_recipe(model, "mxfp8")
    precisions = {row.name: row.precision for row in summary.rows}
    assert precisions["experts.down_proj"] == "mxfp8"
    assert precisions["experts.gate_up_proj"] == "bf16"
    other = mixture("gate and up")
    everywhere(other, "mxfp8", exclude=["experts.gate_up_proj"])
    assert_same_bytes(step(model, x, route, 3)["y"], step(other, x, route, 3)["y"])


def test_without_set_step_noise_is_fresh_at_every_step(monkeypatch):
    monkeypatch.setattr(sr_counter, "_warned", [True])
    model, x, route = mixture("gate and up"), torch.randn(TOKENS, WIDTH), routing()
    everywhere(model, "nvfp4")
    first, second = step(model, x, route, None), step(model, x, route, None)
    assert {int(counter[1]) for counter in counters_of(model)} == {2}
    assert_same_bytes(first["y"], second["y"])
    assert not torch.equal(first["experts.down_proj"], second["experts.down_proj"])


def test_evaluation_without_quantization_is_the_experts_own():
    model, x, route = mixture("gate and up"), torch.randn(TOKENS, WIDTH), routing()
    plain = copy.deepcopy(model)
    everywhere(model, "nvfp4")
    for layer in model.experts.quantization.layers.values():
        layer.quantization.quantize_eval = False
    assert_same_bytes(model.eval().experts(x, *route), plain.eval().experts(x, *route))


def test_rows_of_experts_on_other_ranks_are_zero_and_get_no_gradient():
    model = mixture("gate and up").experts
    everywhere(model, "nvfp4")
    set_step(model, 0)
    model._is_expert_parallel = True
    x: Any = torch.randn(4, WIDTH, requires_grad=True)
    chosen, weights = torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS], [1, 0], [2, EXPERTS]]), torch.ones(4, 2)
    y = model(x, chosen, weights)
    y.sin().sum().backward()
    assert not y[1].any()
    assert not x.grad[1].any()
    assert y[[0, 2, 3]].any(1).all()
    assert x.grad[[0, 2, 3]].isfinite().all()


def test_autocast_casts_as_it_casts_for_linear_layers():
    model = mixture("gate and up")
    loop = copy.deepcopy(model)
    loop.experts = Loop(model.experts)
    x, route = torch.randn(TOKENS, WIDTH), routing()
    for each in (model, loop):
        everywhere(each, "nvfp4")
        set_step(each, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bytes(model.experts.forward(x, *route), loop.experts.forward(x, *route).float())


def test_transforms_of_functions_are_refused_by_name():
    model = mixture("gate and up").experts
    everywhere(model, "nvfp4")
    chosen, weights = routing()
    with pytest.raises(UnsupportedTransformError, match=r"experts .* grad and vjp included"):
        torch.func.grad(lambda x: model(x, chosen, weights).sum())(torch.randn(TOKENS, WIDTH))


def test_an_amax_policy_leaves_experts_in_bf16_and_says_so():
    model = mixture("gate and up")
    recipe: Any = override(get_recipe("nvfp4-naive"), {"fprop.lhs.amax_policy": "delayed"})
    reasons = {row.name: row.reason for row in everywhere(model, recipe).rows if not row.quantized}
    why = "groups of linear layers do not support amax policies or adaptive layouts"
    assert reasons == {"experts.gate_up_proj": why, "experts.down_proj": why}
