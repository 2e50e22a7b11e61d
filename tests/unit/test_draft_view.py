"""The draft view's sharing and copying, and the row-gated LoRA, on plain modules."""

import types

import pytest
import torch
from torch import nn

from vllm_uno.adapter import LinearLora
from vllm_uno.draft_view import build_draft_view, check_every_lora_runs, view_digest
from vllm_uno.lora_linear import UnoLinearMethod, add_lora


class PlainMethod:
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class Linear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.quant_method = PlainMethod()
        self.kept_forward = self.forward  # as CustomOp keeps its dispatch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.proj = Linear(6, 6)
        self.other = Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other.kept_forward(self.proj.kept_forward(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def lora(rank: int = 2, out: int = 6, columns: int = 6, start: int = 0) -> LinearLora:
    return LinearLora(
        a=torch.randn(rank, columns),
        b=(torch.randn(out, rank),),
        out_slices=((start, start + out),),
        rank_slices=((0, rank),),
        out_features=6,
    )


CONFIG = types.SimpleNamespace()


def test_add_lora_packed_slices_and_seed_rows() -> None:
    torch.manual_seed(0)
    n, block, columns = 12, 4, 5
    x, out = torch.randn(n, columns), torch.randn(n, 9)
    a = torch.randn(3, columns)
    b = [torch.randn(4, 2), torch.randn(2, 1)]
    got = add_lora(out, x, a, b, ((1, 5), (7, 9)), ((0, 2), (2, 3)), block)
    want = out.clone()
    for row in range(n):
        if row % block:
            h = a @ x[row]
            want[row, 1:5] += b[0] @ h[:2]
            want[row, 7:9] += b[1] @ h[2:]
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.equal(got[::block], out[::block])


def test_view_without_lora_is_the_target_bitwise() -> None:
    model = Model()
    view = build_draft_view(model, {}, 4, CONFIG)  # type: ignore[arg-type]
    ids = torch.arange(8)
    assert view is not model  # get_draft_model() must not be the target
    assert torch.equal(view(ids), model(ids))


def test_view_shares_what_it_does_not_target() -> None:
    torch.manual_seed(1)
    model = Model()
    before = model(torch.arange(8))
    view = build_draft_view(model, {"layers.1.proj": lora()}, 4, CONFIG)  # type: ignore[arg-type]
    assert view.embed is model.embed and view.layers[0] is model.layers[0]
    assert view.layers[1] is not model.layers[1]
    assert view.layers[1].norm is model.layers[1].norm
    assert view.layers[1].other is model.layers[1].other
    assert view.layers[1].proj.weight is model.layers[1].proj.weight
    assert {n for n, _ in view.named_buffers()} == {"layers.1.proj.uno_a", "layers.1.proj.uno_b0"}
    assert not list(model.named_buffers())  # the verify model is untouched
    assert torch.equal(model(torch.arange(8)), before)
    # A weight replaced on the target, as reloads do, is the view's too.
    model.layers[1].proj.weight = nn.Parameter(torch.zeros(6, 6))
    assert view.layers[1].proj.weight is model.layers[1].proj.weight


def test_lora_acts_on_noise_rows_only_through_kept_methods() -> None:
    torch.manual_seed(2)
    model = Model()
    view = build_draft_view(model, {"layers.0.proj": lora()}, 4, CONFIG)  # type: ignore[arg-type]
    ids = torch.arange(8)
    changed = (view(ids) != model(ids)).any(1)
    assert changed.tolist() == [False, True, True, True] * 2


def test_unknown_module_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no such module.*layers\.7"):
        build_draft_view(Model(), {"layers.7.proj": lora()}, 4, CONFIG)  # type: ignore[arg-type]


def test_self_check_names_layers_that_never_run() -> None:
    view = build_draft_view(
        Model(),
        {"layers.0.proj": lora(), "layers.1.other": lora()},
        4,
        CONFIG,  # type: ignore[arg-type]
    )
    check_every_lora_runs(view, lambda: view(torch.arange(8)))
    with pytest.raises(RuntimeError, match=r"1 of 2 .*layers\.1\.other"):
        check_every_lora_runs(view, lambda: view.layers[0](torch.randn(4, 6)))
    method = view.layers[0].proj.quant_method
    assert isinstance(method, UnoLinearMethod) and method.calls is None


def test_digest_tells_block_size_and_shapes_not_weights() -> None:
    one = {"layers.0.proj": lora()}
    assert view_digest(one, 4) == view_digest({"layers.0.proj": lora()}, 4)
    assert view_digest(one, 4) != view_digest(one, 8)
    assert view_digest(one, 4) != view_digest({"layers.0.proj": lora(rank=3)}, 4)
    assert view_digest(one, 4) != view_digest({"layers.1.proj": lora()}, 4)


def test_targeted_layers_ask_for_unquantised_input() -> None:
    view = build_draft_view(Model(), {"layers.0.proj": lora()}, 4, CONFIG)  # type: ignore[arg-type]
    assert view.layers[0].proj.requires_unquantized_input  # maybe_fused_act_quant's test
    assert not hasattr(view.layers[0].other, "requires_unquantized_input")


def test_three_dimensional_input_as_the_transformers_backend_has() -> None:
    torch.manual_seed(3)
    view = build_draft_view(Model(), {"layers.0.proj": lora()}, 4, CONFIG)  # type: ignore[arg-type]
    x = torch.randn(8, 6)
    proj = view.layers[0].proj
    assert torch.allclose(proj(x[None])[0], proj(x), atol=1e-6)
