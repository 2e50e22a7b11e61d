"""Loading a PEFT folder: every weight on its layer, cut for every tensor-parallel rank."""

import itertools
import json
import math
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.models.utils import WeightsMapper

from vllm_uno.adapter import LinearLora, load_adapter

HIDDEN, HEADS, KV_HEADS, HEAD, INTER = 16, 4, 2, 8, 24
RANK, ALPHA = 4, 6
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
# By module: input and output columns of the whole (unsharded) layer.
SHAPES = {
    "self_attn.q_proj": (HIDDEN, Q),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (Q, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTER),
    "mlp.up_proj": (HIDDEN, INTER),
    "mlp.down_proj": (INTER, HIDDEN),
    "mlp.extra_proj": (HIDDEN, INTER),  # column-parallel, not packed
    "mlp.router": (HIDDEN, 5),  # replicated
}
LAYERS = 2
PREFIX = "base_model.model.model.layers"


class Layer(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        attn, mlp = nn.Module(), nn.Module()
        attn.qkv_proj = linear.QKVParallelLinear(
            HIDDEN, HEAD, HEADS, KV_HEADS, bias=False, prefix=f"{prefix}.self_attn.qkv_proj"
        )
        attn.o_proj = linear.RowParallelLinear(Q, HIDDEN, bias=False)
        mlp.gate_up_proj = linear.MergedColumnParallelLinear(HIDDEN, [INTER, INTER], bias=False)
        mlp.down_proj = linear.RowParallelLinear(INTER, HIDDEN, bias=False)
        mlp.extra_proj = linear.ColumnParallelLinear(HIDDEN, INTER, bias=False)
        mlp.router = linear.ReplicatedLinear(HIDDEN, 5, bias=False)
        self.self_attn, self.mlp = attn, mlp
        self.input_layernorm = nn.LayerNorm(HIDDEN)


class Model(nn.Module):
    """The structure of a vLLM decoder, with its real linear layers."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    # As vLLM's Llama and Qwen3 have it. Used whole, it would merge q, k and v into one name.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(f"model.layers.{i}") for i in range(LAYERS))


@pytest.fixture(scope="module")
def vllm_config():
    return VllmConfig()


@pytest.fixture
def build(vllm_config, monkeypatch):
    """Builds the model of one tensor-parallel rank, without any process group."""

    def build(tp_rank=0, tp_size=1, cls=Model):
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: tp_rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tp_size)
        with set_current_vllm_config(vllm_config):
            return cls()

    return build


def random_weights(names=tuple(SHAPES), layers=LAYERS, ranks=None):
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer, name in itertools.product(range(layers), names):
        width, height = SHAPES[name]
        rank = (ranks or {}).get(name, RANK)
        weights[f"{PREFIX}.{layer}.{name}.lora_A.weight"] = torch.randn(
            rank, width, generator=generator
        )
        weights[f"{PREFIX}.{layer}.{name}.lora_B.weight"] = torch.randn(
            height, rank, generator=generator
        )
    return weights


def write(folder, weights, **config):
    save_file(weights, folder / "adapter_model.safetensors")
    base = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in SHAPES}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**base, **config}))
    return folder


def load(folder, model, dtype=torch.float32):
    return load_adapter(folder, model, dtype, "cpu")


def apply(lora: LinearLora, x):
    """What the docstring of LinearLora promises."""
    out = torch.zeros(x.shape[0], lora.out_features, dtype=x.dtype)
    h = x @ lora.a.T
    for b, (start, stop), (low, high) in zip(
        lora.b, lora.out_slices, lora.rank_slices, strict=True
    ):
        out[:, start:stop] += h[:, low:high] @ b.T
    return out


def full_delta(weights, layer, name, x, scale=ALPHA / RANK):
    """The definition of LoRA, on the whole layer."""
    a = weights[f"{PREFIX}.{layer}.{name}.lora_A.weight"]
    b = weights[f"{PREFIX}.{layer}.{name}.lora_B.weight"]
    return x @ a.T @ b.T * scale


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def rows(width, seed=1):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed))


def test_one_rank_equals_the_definition(tmp_path, build):
    weights = random_weights()
    loras = load(write(tmp_path, weights), build())
    assert len(loras) == 6 * LAYERS
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        x = rows(HIDDEN)
        qkv = [full_delta(weights, layer, f"self_attn.{n}_proj", x) for n in "qkv"]
        close(apply(loras[f"{at}.self_attn.qkv_proj"], x), torch.cat(qkv, 1))
        gate_up = [full_delta(weights, layer, f"mlp.{n}_proj", x) for n in ("gate", "up")]
        close(apply(loras[f"{at}.mlp.gate_up_proj"], x), torch.cat(gate_up, 1))
        for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.extra_proj", "mlp.router"):
            x = rows(SHAPES[name][0])
            close(apply(loras[f"{at}.{name}"], x), full_delta(weights, layer, name, x))


def test_layout_of_a_packed_layer(tmp_path, build):
    lora = load(write(tmp_path, random_weights()), build())["model.layers.0.self_attn.qkv_proj"]
    assert lora.a.shape == (3 * RANK, HIDDEN)
    assert [tuple(b.shape) for b in lora.b] == [(Q, RANK), (KV, RANK), (KV, RANK)]
    assert lora.out_slices == ((0, Q), (Q, Q + KV), (Q + KV, Q + 2 * KV))
    assert lora.rank_slices == ((0, 4), (4, 8), (8, 12))
    assert lora.out_features == Q + 2 * KV


@pytest.mark.parametrize("tp_size", [2, 4])  # 4: more ranks than key heads
def test_ranks_together_equal_the_definition(tmp_path, build, tp_size):
    weights = random_weights()
    write(tmp_path, weights)
    loras = [load(tmp_path, build(rank, tp_size)) for rank in range(tp_size)]
    x = rows(HIDDEN)

    def columns(name, slot):
        """One slice of every rank's output, side by side."""
        found = []
        for lora in loras:
            layer = lora[f"model.layers.1.{name}"]
            found.append(apply(layer, x)[:, slice(*layer.out_slices[slot])])
        return found

    q = torch.cat(columns("self_attn.qkv_proj", 0), 1)
    close(q, full_delta(weights, 1, "self_attn.q_proj", x))
    copies = max(1, tp_size // KV_HEADS)
    for slot, name in ((1, "k"), (2, "v")):
        pieces = columns("self_attn.qkv_proj", slot)
        # Each key head lies on `copies` neighbouring ranks.
        for rank, piece in enumerate(pieces):
            close(piece, pieces[rank // copies * copies])
        expected = full_delta(weights, 1, f"self_attn.{name}_proj", x)
        close(torch.cat(pieces[::copies], 1), expected)
    for slot, name in ((0, "gate"), (1, "up")):
        pieces = columns("mlp.gate_up_proj", slot)
        close(torch.cat(pieces, 1), full_delta(weights, 1, f"mlp.{name}_proj", x))
    pieces = columns("mlp.extra_proj", 0)
    close(torch.cat(pieces, 1), full_delta(weights, 1, "mlp.extra_proj", x))
    for piece in columns("mlp.router", 0):
        close(piece, full_delta(weights, 1, "mlp.router", x))

    for name in ("self_attn.o_proj", "mlp.down_proj"):
        width = SHAPES[name][0]
        x = rows(width)
        shares = x.split(width // tp_size, 1)
        total = sum(
            apply(lora[f"model.layers.1.{name}"], share)
            for lora, share in zip(loras, shares, strict=True)
        )
        close(total, full_delta(weights, 1, name, x))


def test_only_some_slices_of_a_packed_layer(tmp_path, build):
    weights = random_weights(("self_attn.v_proj", "self_attn.q_proj", "mlp.up_proj"))
    loras = load(write(tmp_path, weights), build())
    assert set(loras) == {
        f"model.layers.{i}.{n}"
        for i in range(LAYERS)
        for n in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    }
    lora = loras["model.layers.0.self_attn.qkv_proj"]
    assert lora.out_slices == ((0, Q), (Q + KV, Q + 2 * KV))
    x = rows(HIDDEN)
    out = apply(lora, x)
    close(out[:, :Q], full_delta(weights, 0, "self_attn.q_proj", x))
    close(out[:, Q : Q + KV], torch.zeros(3, KV))
    close(out[:, Q + KV :], full_delta(weights, 0, "self_attn.v_proj", x))
    assert loras["model.layers.0.mlp.gate_up_proj"].out_slices == ((INTER, 2 * INTER),)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_adapter_that_names_the_packed_layer_itself(tmp_path, build, tp_size):
    total = Q + 2 * KV
    a, b = torch.randn(RANK, HIDDEN), torch.randn(total, RANK)
    name = f"{PREFIX}.0.self_attn.qkv_proj"
    write(tmp_path, {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    x = rows(HIDDEN)
    pieces = []
    for rank in range(tp_size):
        (lora,) = load(tmp_path, build(rank, tp_size)).values()
        assert lora.out_slices == ((0, total // tp_size),)
        pieces.append(apply(lora, x).split([Q // tp_size, KV // tp_size, KV // tp_size], 1))
    out = torch.cat([torch.cat(slot, 1) for slot in zip(*pieces, strict=True)], 1)
    close(out, x @ a.T @ b.T * (ALPHA / RANK))


def test_rank_and_alpha_patterns(tmp_path, build):
    ranks = {"self_attn.k_proj": 2, "mlp.down_proj": 8}
    weights = random_weights(ranks=ranks)
    config = {"rank_pattern": {"k_proj": 2, "down_proj": 8}, "alpha_pattern": {"k_proj": 10}}
    loras = load(write(tmp_path, weights, **config), build())
    lora = loras["model.layers.0.self_attn.qkv_proj"]
    assert lora.rank_slices == ((0, 4), (4, 6), (6, 10))
    x = rows(HIDDEN)
    expected = [
        full_delta(weights, 0, "self_attn.q_proj", x),
        full_delta(weights, 0, "self_attn.k_proj", x, scale=10 / 2),
        full_delta(weights, 0, "self_attn.v_proj", x),
    ]
    close(apply(lora, x), torch.cat(expected, 1))
    x = rows(INTER)
    down = apply(loras["model.layers.1.mlp.down_proj"], x)
    close(down, full_delta(weights, 1, "mlp.down_proj", x, scale=ALPHA / 8))


def test_patterns_refer_to_the_adapters_own_names(tmp_path, build):
    class Renamed(Model):
        hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"old.": "model."})

    weights = random_weights(("mlp.router",))
    weights = {
        key.replace("model.model.layers", "model.old.layers"): w for key, w in weights.items()
    }
    config = {"alpha_pattern": {"old.layers.1.mlp.router": 40}}
    loras = load(write(tmp_path, weights, **config), build(cls=Renamed))
    assert set(loras) == {"model.layers.0.mlp.router", "model.layers.1.mlp.router"}
    b = weights["base_model.model.old.layers.1.mlp.router.lora_B.weight"]
    close(loras["model.layers.1.mlp.router"].b[0], b * 10)


def test_rslora(tmp_path, build):
    weights = random_weights(("mlp.router",))
    loras = load(write(tmp_path, weights, use_rslora=True), build())
    b = weights[f"{PREFIX}.0.mlp.router.lora_B.weight"]
    close(loras["model.layers.0.mlp.router"].b[0], b * (ALPHA / math.sqrt(RANK)))


def test_scale_is_folded_in_before_the_cast(tmp_path, build):
    weights = {k: w.to(torch.bfloat16) for k, w in random_weights(("mlp.router",)).items()}
    config = {"lora_alpha": 1.7}
    loras = load(write(tmp_path, weights, **config), build(), torch.bfloat16)
    lora = loras["model.layers.0.mlp.router"]
    b = weights[f"{PREFIX}.0.mlp.router.lora_B.weight"]
    assert lora.a.dtype == lora.b[0].dtype == torch.bfloat16
    assert torch.equal(lora.b[0], (b.float() * (1.7 / RANK)).bfloat16())
    lora = load(tmp_path, build(), torch.float32)["model.layers.0.mlp.router"]
    assert torch.equal(lora.b[0], b.float() * (1.7 / RANK))


def test_users_lora_wrappers_are_looked_through(tmp_path, build):
    class Wrapper(BaseLayerWithLoRA):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

    plain, wrapped = build(), build()
    for layer in wrapped.model.layers:
        layer.self_attn.qkv_proj = Wrapper(layer.self_attn.qkv_proj)
        layer.mlp.down_proj = Wrapper(layer.mlp.down_proj)
    write(tmp_path, random_weights())
    expected, found = load(tmp_path, plain), load(tmp_path, wrapped)
    assert set(found) == set(expected)
    for name, lora in expected.items():
        assert torch.equal(found[name].a, lora.a)
        assert found[name].out_slices == lora.out_slices


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"use_dora": True}, "it uses DoRA (use_dora)"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"peft_type": "LOHA"}, "peft_type is LOHA, only LORA"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"use_qalora": True}, "QALoRA"),
        ({"init_lora_weights": "pissa"}, "PiSSA"),
        ({"r": 0}, "must be a positive integer"),
    ],
)
def test_unsupported_kinds_are_refused(tmp_path, build, config, text):
    write(tmp_path, random_weights(), **config)
    with pytest.raises(ValueError, match=r"^uno_lora_path: .* is not supported: ") as error:
        load(tmp_path, build())
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("base_model.model.lm_head.lora_A.weight", "lm_head and embeddings cannot be targets"),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "lm_head and embeddings cannot be targets",
        ),
        (f"{PREFIX}.0.mlp.experts.3.up_proj.lora_A.weight", "MoE experts cannot be targets"),
        (f"{PREFIX}.0.self_attn.kv_b_proj.lora_A.weight", "MLA's kv_b_proj cannot be a target"),
        (f"{PREFIX}.0.mlp.router.lora_magnitude_vector", "DoRA is not supported"),
        (f"{PREFIX}.0.mlp.router.lora_B.bias", "LoRA biases (lora_bias) are not supported"),
    ],
)
def test_unsupported_targets_are_refused_by_name(tmp_path, build, key, text):
    write(tmp_path, {**random_weights(), key: torch.zeros(RANK, HIDDEN)})
    with pytest.raises(ValueError, match=r"^uno_lora_path: .* is not supported: ") as error:
        load(tmp_path, build())
    assert text in str(error.value)
    assert key in str(error.value)


def test_keys_without_a_module(tmp_path, build):
    weights = random_weights(layers=LAYERS + 3)  # an adapter for a deeper model
    write(tmp_path, weights)
    with pytest.raises(ValueError, match=r"^uno_lora_path: .* does not have") as error:
        load(tmp_path, build())
    text = str(error.value)
    assert f"{PREFIX}.2.mlp.down_proj.lora_A.weight" in text
    assert text.count("lora_A.weight") == 5
    assert f"({3 * len(SHAPES)} in all)" in text


def test_keys_of_modules_that_are_no_linear_layers(tmp_path, build):
    key = f"{PREFIX}.0.input_layernorm.lora_%s.weight"
    write(tmp_path, {key % "A": torch.zeros(RANK, HIDDEN), key % "B": torch.zeros(HIDDEN, RANK)})
    with pytest.raises(ValueError, match="no linear layers UNO knows") as error:
        load(tmp_path, build())
    assert f"{key % 'A'} (LayerNorm)" in str(error.value)


def test_keys_that_are_no_lora_weights(tmp_path, build):
    key = f"{PREFIX}.0.mlp.router.weight"
    write(tmp_path, {**random_weights(), key: torch.zeros(5, HIDDEN)})
    with pytest.raises(ValueError, match="no LoRA weights") as error:
        load(tmp_path, build())
    assert key in str(error.value)


@pytest.mark.parametrize("lost", ["A", "B"])
def test_half_a_pair(tmp_path, build, lost):
    weights = random_weights()
    left = f"{PREFIX}.1.mlp.up_proj.lora_{'B' if lost == 'A' else 'A'}.weight"
    del weights[f"{PREFIX}.1.mlp.up_proj.lora_{lost}.weight"]
    write(tmp_path, weights)
    with pytest.raises(ValueError, match=r"^uno_lora_path: .* is incomplete") as error:
        load(tmp_path, build())
    assert left in str(error.value)


@pytest.mark.parametrize(
    ("name", "side", "shape", "wanted"),
    [
        ("self_attn.q_proj", "B", (Q + 8, RANK), [Q, RANK]),
        ("self_attn.k_proj", "B", (Q, RANK), [KV, RANK]),
        ("mlp.down_proj", "A", (RANK, INTER + 8), [RANK, INTER]),
        ("mlp.gate_proj", "A", (RANK + 1, HIDDEN), [RANK, HIDDEN]),
    ],
)
def test_shapes_of_another_model(tmp_path, build, name, side, shape, wanted):
    key = f"{PREFIX}.0.{name}.lora_{side}.weight"
    write(tmp_path, {**random_weights(), key: torch.zeros(shape)})
    with pytest.raises(ValueError, match=r"^uno_lora_path: .* is for another model") as error:
        load(tmp_path, build())
    assert f"{key} has shape {list(shape)}" in str(error.value)
    assert f"call for {wanted}" in str(error.value)


def test_a_layer_that_the_model_holds_twice(tmp_path, build):
    model = build()
    model.model.alias = model.model.layers[0].mlp.router
    write(tmp_path, random_weights())
    with pytest.raises(ValueError, match="under several names") as error:
        load(tmp_path, model)
    assert "model.alias" in str(error.value)


def test_a_packed_layer_whole_and_by_slice(tmp_path, build):
    weights = random_weights()
    whole = f"{PREFIX}.0.mlp.gate_up_proj.lora_%s.weight"
    weights[whole % "A"] = torch.zeros(RANK, HIDDEN)
    weights[whole % "B"] = torch.zeros(2 * INTER, RANK)
    write(tmp_path, weights)
    with pytest.raises(ValueError, match="targets a packed layer as a whole and") as error:
        load(tmp_path, build())
    assert f"{PREFIX}.0.mlp.up_proj.lora_A.weight" in str(error.value)


def test_a_layer_with_its_own_sharding(tmp_path, build):
    class Own(linear.ColumnParallelLinear):
        def weight_loader(self, param, loaded_weight):
            raise AssertionError

    class OwnModel(Model):
        def __init__(self):
            super().__init__()
            for layer in self.model.layers:
                layer.mlp.extra_proj = Own(HIDDEN, INTER, bias=False, prefix="the.extra_proj")

    write(tmp_path, random_weights())
    assert load(tmp_path, build(cls=OwnModel))  # one rank: nothing is sharded
    with pytest.raises(ValueError, match=r"targets the.extra_proj, .*tensor_parallel_size=1"):
        load(tmp_path, build(0, 2, cls=OwnModel))


def test_missing_files(tmp_path, build):
    with pytest.raises(ValueError, match=r"uno_lora_path: .* has no adapter_config.json"):
        load(tmp_path, build())
    write(tmp_path, {})
    with pytest.raises(ValueError, match=r"uno_lora_path: .* holds no tensors"):
        load(tmp_path, build())
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"uno_lora_path: .* is not JSON"):
        load(tmp_path, build())


def test_rows_follow_the_order_that_k2_horizon_keeps_its_weights_in(tmp_path, build):
    weights = random_weights()
    model = build()
    attention = model.model.layers[0].self_attn
    attention.fold_rope_weights, attention.head_dim, attention.rope_head_dim = True, HEAD, 4
    loras = load(write(tmp_path, weights), model)
    x = rows(HIDDEN)
    # Rotary channels first (both halves), then the others: 0 1 4 5 | 2 3 6 7 of every head.
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    want = []
    for name in "qkv":
        delta = full_delta(weights, 0, f"self_attn.{name}_proj", x)
        if name != "v":
            delta = delta.view(3, -1, HEAD)[:, :, order].flatten(1)
        want.append(delta)
    close(apply(loras["model.layers.0.self_attn.qkv_proj"], x), torch.cat(want, 1))
    # The other layer folds nothing.
    qkv = [full_delta(weights, 1, f"self_attn.{n}_proj", x) for n in "qkv"]
    close(apply(loras["model.layers.1.self_attn.qkv_proj"], x), torch.cat(qkv, 1))
