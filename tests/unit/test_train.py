"""Trainer: masks, losses, gating, packing, acceptance, resuming and refusals."""

import dataclasses
import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DraftOracle
from transformers import (
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_uno.cli import main
from vllm_uno.tiny_model import write_tiny_model
from vllm_uno.train.acceptance import follow_cycles, measure, stand_probabilities, writing_starts
from vllm_uno.train.blocks import (
    PADDING,
    UNUSED,
    block_seeds,
    dense_mask,
    draw_offsets,
)
from vllm_uno.train.data import (
    DataError,
    Sample,
    load_samples,
    pack,
    render,
    row_order,
    split_heldout,
    tokenize,
)
from vllm_uno.train.losses import LossWeights, distillation_loss
from vllm_uno.train.model import (
    ModelError,
    NoisedModel,
    add_adapter,
    check_doubled_pass,
    learning_rows,
    load_model,
    noise_high,
)
from vllm_uno.train.settings import TrainSettings
from vllm_uno.train.trainer import SettingsError, train

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCAB = 64
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    eos_token_id=1,
)


def sample(length: int, first_generated: int = 1, seed: int = 0) -> Sample:
    r = random.Random(seed * 1000 + length)
    ids = [r.randrange(1, VOCAB) for _ in range(length)]
    return Sample(ids, [i >= first_generated for i in range(length)])


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SMALL | dict(head_dim=8, initializer_range=0.3, bos_token_id=None)
    torch.manual_seed(0)
    model: Any
    if request.param == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


def noised_model(checkpoint: Path) -> NoisedModel:
    base = load_model(
        str(checkpoint),
        revision=None,
        dtype=torch.float32,
        attention="sdpa",
        device=torch.device("cpu"),
    )
    torch.manual_seed(1)
    model = NoisedModel(add_adapter(base, TARGETS, rank=4, scale=2.0), "sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    return model


# Blocks and masks.


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    block=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_mask_is_the_rule(lengths: list[int], block: int, seed: int) -> None:
    """Against a statement of the rule over (document, position) pairs."""
    rows = pack([sample(n) for n in lengths], context=sum(lengths) + 3)
    documents, positions = rows.documents.long(), rows.positions.long()
    generator = torch.Generator().manual_seed(seed)
    offsets = draw_offsets(documents, block, generator)
    seeds = block_seeds(documents, positions, offsets, block)
    mask = dense_mask(documents, seeds)[0, 0]
    length = documents.shape[1]
    where = [(int(documents[0, t]), int(positions[0, t])) for t in range(length)]
    shift = {d: int(offsets[0, t]) for t, (d, _) in enumerate(where) if d != PADDING}

    def number_of_block(document: int, position: int) -> int:
        return (position + shift[document]) // block

    def first_of_block(document: int, position: int) -> int:
        return number_of_block(document, position) * block - shift[document]

    for query, key in itertools.product(range(2 * length), repeat=2):
        (qd, qp), (kd, kp) = where[query % length], where[key % length]
        q_noised, k_noised = query >= length, key >= length
        if query == key:
            expected = True
        elif qd == PADDING or qd != kd:
            expected = False
        elif not q_noised:
            expected = not k_noised and kp <= qp
        else:
            start = first_of_block(qd, qp)
            used = start >= 0 and qp > start
            if not used:
                expected = False
            elif not k_noised:
                expected = kp <= start
            else:
                expected = start < kp <= qp and number_of_block(kd, kp) == number_of_block(qd, qp)
        assert bool(mask[query, key]) == expected, (query, key)


def test_block_offsets_are_one_to_a_document_and_vary() -> None:
    rows = pack([sample(10), sample(12), sample(9)], context=40)
    documents = rows.documents.long().repeat(50, 1)
    offsets = draw_offsets(documents, 4, torch.Generator().manual_seed(0))
    for number in range(3):
        inside = offsets[:, documents[0] == number]
        assert bool((inside == inside[:, :1]).all())
        assert set(inside[:, 0].tolist()) == {0, 1, 2, 3}


# Losses.


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocab=st.integers(2, 40),
    chunk=st.integers(1, 10),
    tv=st.sampled_from([0.0, 1.0, 0.3]),
    ce=st.sampled_from([0.0, 0.5]),
    kl=st.sampled_from([0.01, 1.0]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradient_are_the_naive_ones(
    rows: int, vocab: int, chunk: int, tv: float, ce: float, kl: float, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    student = torch.randn(rows, 6, requires_grad=True)
    teacher, head = torch.randn(rows, 6), torch.randn(vocab, 6)
    shift = torch.randn(vocab) if bias else None
    targets = torch.randint(vocab, (rows,))
    weights = LossWeights(tv, ce, kl)
    loss, means = distillation_loss(student, teacher, head, shift, targets, weights, chunk)
    (loss * 3).backward()  # the incoming gradient counts

    exact = student.detach().double().requires_grad_()
    by_head = head.double().T
    add = shift.double() if shift is not None else 0.0
    q, p = (exact @ by_head + add).softmax(-1), (teacher.double() @ by_head + add).softmax(-1)
    each = torch.stack(
        [
            (q - p).abs().sum(-1).mean() / 2,
            -q.log().gather(-1, targets[:, None]).mean(),
            (p * (p.log() - q.log())).sum(-1).mean(),
        ]
    )
    naive = tv * each[0] + ce * each[1] + kl * each[2]
    (naive * 3).backward()
    torch.testing.assert_close(loss.double(), naive, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(means.double(), each, rtol=1e-4, atol=1e-5)
    assert student.grad is not None
    torch.testing.assert_close(student.grad.double(), exact.grad, rtol=1e-3, atol=1e-5)


# The doubled pass.


def passes(model: NoisedModel, block: int) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = pack([sample(20), sample(9)], context=32).rows(torch.arange(1), torch.device("cpu"))
    offsets = torch.full_like(rows.positions, 3 % block)
    seeds = block_seeds(rows.documents, rows.positions, offsets, block)
    noise = torch.randint(1, VOCAB, rows.ids.shape, generator=torch.Generator().manual_seed(5))
    return rows, seeds, noise, torch.arange(rows.ids.shape[1])


def test_clean_rows_are_the_base_models_bit_for_bit(checkpoint: Path) -> None:
    model = noised_model(checkpoint)
    assert model.layers == 2 * len(TARGETS)
    rows, seeds, noise, _ = passes(model, 4)
    with torch.no_grad():
        clean, noised = model.hidden_states(rows, seeds, noise)
        with model.peft_model.disable_adapter():
            base_clean, base_noised = model.hidden_states(rows, seeds, noise)
    assert torch.equal(clean, base_clean)
    used = seeds != UNUSED
    assert bool(((noised - base_noised).abs().amax(-1)[used] > 1e-3).all())
    assert torch.equal(noised[~used], base_noised[~used])


def test_clean_rows_get_no_gradient_from_the_adapter(checkpoint: Path) -> None:
    model = noised_model(checkpoint)
    rows, seeds, noise, _ = passes(model, 4)
    clean, _ = model.hidden_states(rows, seeds, noise)
    clean.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_marginals_are_those_of_a_draft_pass(checkpoint: Path, tmp_path: Path) -> None:
    """Trainer's noised rows against PEFT on [context, seed, noise], the engine tests' oracle."""
    model = noised_model(checkpoint)
    model.peft_model.save_pretrained(tmp_path)
    oracle = DraftOracle(checkpoint, tmp_path)
    block = 4
    rows, seeds, noise, columns = passes(model, block)
    with torch.no_grad():
        _, noised = model.hidden_states(rows, seeds, noise)
        logits = model.head(noised)
    compared = 0
    for seed in sorted(set(seeds[0].tolist()) - {UNUSED}):
        document = int(rows.documents[0, seed])
        start = int(columns[rows.documents[0] == document][0])
        members = columns[seeds[0] == seed]
        block_ids = [int(rows.ids[0, seed]), *noise[0, members].tolist()]
        reference = oracle.draft_logits(rows.ids[0, start:seed].tolist(), block_ids)
        torch.testing.assert_close(logits[0, members], reference[1:], rtol=1e-4, atol=1e-4)
        compared += len(members)
    assert compared >= 15


def test_attention_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": 16}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="full attention in every layer"):
        load(tmp_path / "m")
    with pytest.raises(ModelError, match="could not be loaded"):
        load(tmp_path / "nothing")


def test_a_window_without_layer_types_is_refused(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="full attention in every layer"):
        load(tmp_path)


def test_logits_that_are_not_the_heads_alone_are_refused(tmp_path: Path) -> None:
    GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="changes its logits after the output head"):
        load(tmp_path)


def test_a_pass_that_is_not_the_models_own_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = noised_model(checkpoint)
    rows = pack([sample(20), sample(9)], context=32)
    check_doubled_pass(model, rows, torch.device("cpu"))
    # A model that sees more than it may.
    monkeypatch.setattr(
        "vllm_uno.train.model.dense_mask",
        lambda documents, seeds: torch.ones(1, 1, 64, 64, dtype=torch.bool),
    )
    with pytest.raises(ModelError, match="differs from the doubled one"):
        check_doubled_pass(model, rows, torch.device("cpu"))


def test_dropout_of_the_base_model_is_taken_out(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, attention_dropout=0.5)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = noised_model(tmp_path)
    model.peft_model.train()  # as gradient checkpointing does
    rows, seeds, noise, _ = passes(model, 4)
    with torch.no_grad():
        first, second = (model.hidden_states(rows, seeds, noise) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_the_output_head_cannot_be_a_target(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="targets name the output head"):
        add_adapter(load(checkpoint), ["q_proj", "lm_head"], 4, 2.0)


def test_blocks_seeded_in_a_prompt_are_not_learnt() -> None:
    rows = pack([sample(16, 9)], 16).rows(torch.arange(1), torch.device("cpu"))
    offsets = torch.zeros_like(rows.positions)
    seeds = block_seeds(rows.documents, rows.positions, offsets, 4)
    # Seeds at 0, 4, 8 and 12; the first written token is 9, and the last row has no next token.
    assert learning_rows(seeds, rows.trained).tolist() == [9, 10, 11, 13, 14]


def load(folder: Path) -> Any:
    return load_model(
        str(folder),
        revision=None,
        dtype=torch.float32,
        attention="sdpa",
        device=torch.device("cpu"),
    )


def test_targets_that_no_layer_has(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"\['c_attn'\] are not layers.*q_proj"):
        add_adapter(load(checkpoint), ["q_proj", "c_attn"], 4, 2.0)


# Acceptance.


def test_cycles_are_those_that_decoding_goes_through() -> None:
    """The recursion against a simulation of decoding along fixed texts."""
    rows = pack([sample(30, 4), sample(26, 2)], context=60)
    generator = torch.Generator().manual_seed(0)
    block = 4
    stands = torch.rand(1, 60, block, generator=generator) * 0.6 + 0.4
    stands[..., 0] = 1.0
    for document in (range(30), range(30, 56)):
        for seed in document:  # nothing stands past the end of a text
            stands[0, seed, document[-1] - seed :] = 0.0
    starts = writing_starts(rows)
    assert starts.nonzero().tolist() == [[0, 4], [0, 32]]
    cycles, accepted = follow_cycles(stands, rows.trained, starts)
    draws = 4000
    r = random.Random(0)
    simulated = [0] * (block + 1)
    for _ in range(draws):
        for start, end in ((4, 30), (32, 56)):
            seed = start
            while seed < end - 1:
                count = 0
                while count < block and r.random() < stands[0, seed, count]:
                    count += 1
                seed += count + 1
                if seed >= end - 1:  # the text's last cycle
                    break
                simulated[0] += 1
                for k in range(count):
                    simulated[k + 1] += 1
    assert float(cycles) == pytest.approx(simulated[0] / draws, rel=0.02)
    for k in range(block):
        assert float(accepted[k]) == pytest.approx(simulated[k + 1] / draws, rel=0.03)


def test_drafted_tokens_stand_by_both_laws(checkpoint: Path) -> None:
    """Every probability against min(1, q/p), the base model's law by a plain pass."""
    model = noised_model(checkpoint)
    rows = pack([sample(14, 3)], context=16).rows(torch.arange(1), torch.device("cpu"))
    block, temperature = 3, 0.7
    stands = stand_probabilities(
        model, rows, block, (1, 2), temperature, torch.Generator().manual_seed(0)
    )  # noise is always token 1
    with torch.no_grad(), model.peft_model.disable_adapter():
        base = model.peft_model(input_ids=rows.ids[:, :14], use_cache=False).logits[0]
    for seed in range(3, 9):
        seeds = block_seeds(
            rows.documents, rows.positions, torch.full_like(rows.ids, -seed % block), block
        )
        with torch.no_grad():
            _, noised = model.hidden_states(rows, seeds, torch.ones_like(rows.ids))
        for row in range(1, block):
            at = seed + row
            token = int(rows.ids[0, at + 1])
            q = (model.head(noised)[0, at] / temperature).softmax(-1)[token]
            p = (base[at] / temperature).softmax(-1)[token]
            expected = min(1.0, float(q / p))
            assert float(stands[0, seed, row]) == pytest.approx(expected, rel=1e-4)
    assert stands[0, :, 0].tolist() == [0.0] * 2 + [1.0] * 11 + [0.0] * 3


def test_measuring_text_too_short_for_a_block(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no text is long enough for a block of 8"):
        measure(
            noised_model(checkpoint),
            pack([sample(6)], 8),
            8,
            (1, VOCAB),
            1.0,
            micro_batch=1,
            device=torch.device("cpu"),
        )


# Data.


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12))
def test_packing_keeps_documents_whole(lengths: list[int]) -> None:
    samples = [sample(n, 1 + n // 3, seed=i) for i, n in enumerate(lengths)]
    rows = pack(samples, context=12)
    found = []
    for at in range(len(rows)):
        for number in range(int(rows.documents[at].max()) + 1):
            inside = rows.documents[at] == number
            ids, trained = rows.ids[at][inside].tolist(), rows.trained[at][inside].tolist()
            assert rows.positions[at][inside].tolist() == list(range(len(ids)))
            found.append((ids, trained))
    assert sorted(found) == sorted((s.ids, [*s.generated[1:], False]) for s in samples)
    assert not rows.trained[rows.documents == PADDING].any()


def test_every_row_once_an_epoch_in_an_order_of_its_own() -> None:
    first, second = row_order(10, 3, range(10)), row_order(10, 3, range(10, 20))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()
    assert row_order(10, 3, range(7, 13)).tolist() == [*first[7:].tolist(), *second[:3].tolist()]


def test_texts_and_chats(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [("user", "a b"), ("assistant", "c d"), ("user", "e"), ("assistant", "f g h")]
    records: list[dict[str, Any]] = [
        {"messages": [{"role": r, "content": c} for r, c in turns]},
        {"text": "one two"},
        {"messages": [{"role": r, "content": c} for r, c in turns[:2]]},
    ]
    documents = [render(record, tokenizer, "here") for record in records]
    chat, text, short = tokenize(documents, tokenizer)
    assert text.ids[-1] == tokenizer.eos_token_id and tokenizer.decode(text.ids[:-1]) == "one two"
    assert list(text.generated) == [False] + [True] * (len(text.ids) - 1)
    for found, expected in ((chat, "c d;f g h;"), (short, "c d;")):
        written = [i for i, g in zip(found.ids, found.generated, strict=True) if g]
        assert tokenizer.decode(written) == expected
    assert tokenizer.decode(short.ids) == "<user>a b;<assistant>c d;"
    with pytest.raises(DataError, match="here: no assistant turn"):
        render({"messages": [{"role": "user", "content": "x"}]}, tokenizer, "here")
    bad: list[dict[str, Any]] = [{}, {"text": 3}, {"text": ""}, {"messages": []}]
    bad += [{"messages": ["x"]}, {"messages": [{"role": "assistant", "content": "x"}]}]
    for record in bad:
        with pytest.raises(DataError, match="here: "):
            render(record, tokenizer, "here")
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(DataError, match="here: the chat template refuses it: no such role"):
        render(records[0], tokenizer, "here")


def test_what_a_template_writes_behind_the_end_token_is_not_generated(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + tokenizer.eos_token + "\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    (chat,) = tokenize([render({"messages": turns}, tokenizer, "here")], tokenizer)
    written = [i for i, g in zip(chat.ids, chat.generated, strict=True) if g]
    assert tokenizer.decode(written) == "c d" + tokenizer.eos_token
    assert tokenizer.decode(chat.ids).endswith("\n")


def test_noise_ends_at_the_mask_token(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert noise_high(tokenizer, 4096, None) == len(tokenizer)
    assert noise_high(tokenizer, 4096, 77) == 77
    with pytest.raises(ModelError, match="mask_token_id=5000"):
        noise_high(tokenizer, 4096, 5000)


# Whole runs.


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    r = random.Random(0)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = (" ".join(r.choices(["ab", "cd", "ef", "gh"], k=12)) for _ in range(30))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("small"), vocab_size=512, std=0.1)


def settings_of(small: Path, texts: Path, output: Path | str, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = dict(
        model=str(small),
        data=str(texts),
        output=str(output),
        context=64,
        block_sizes=[2, 3],
        steps=6,
        batch_size=4,
        micro_batch_size=2,
        rank=2,
        scale=2.0,
        lr=1e-2,
        warmup_steps=1,
        dtype="float32",
        save_every=2,
        eval_every=3,
        log_every=1,
        heldout_samples=4,
    )
    return TrainSettings(**values | changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_interrupted_and_resumed_is_uninterrupted(small: Path, texts: Path, tmp_path: Path) -> None:
    whole = train(settings_of(small, texts, tmp_path / "whole"))
    assert whole.adapter == tmp_path / "whole" and whole.steps == 6
    parts = tmp_path / "parts"
    stopped = train(settings_of(small, texts, parts, stop_after=3))
    assert stopped.adapter is None and (parts / "checkpoint" / "state.pt").is_file()
    with pytest.raises(SettingsError, match=r"other settings \(lr: 0.01 there, 0.5 now\)"):
        train(settings_of(small, texts, parts, resume=True, lr=0.5))
    resumed = train(settings_of(small, texts, parts, resume=True))
    assert resumed.heldout == whole.heldout
    one, other = weights(tmp_path / "whole"), weights(parts)
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    assert any(v.abs().max() > 0 for k, v in one.items() if "lora_B" in k)

    def logged(folder: Path) -> list[tuple[int, float]]:
        entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        return [(e["step"], e.get("loss", e.get("tau"))) for e in entries]

    assert logged(parts) == logged(tmp_path / "whole")
    assert (parts / "training.png").stat().st_size > 10_000
    assert not (parts / "checkpoint").exists()
    metadata = json.loads((parts / "uno_config.json").read_text())
    assert metadata == {
        "noise_low": 1,
        "mask_token_id": 512,
        "block_sizes": [2, 3],
        "base_model": str(small),
        "revision": None,
    }
    with pytest.raises(SettingsError, match="is not empty"):
        train(settings_of(small, texts, parts))


def test_rows_weigh_the_same_in_any_micro_batch(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short answers side by side; and whatever accelerate is configured for."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    data = tmp_path / "uneven.jsonl"
    words = ["ab " * n for n in (1, 12) * 10]
    data.write_text("".join(json.dumps({"text": w.strip()}) + "\n" for w in words))
    changes: dict[str, Any] = {"context": 37, "batch_size": 4, "steps": 2, "block_sizes": [2]}
    for size in (1, 4):
        train(settings_of(small, data, tmp_path / str(size), micro_batch_size=size, **changes))
    one, other = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=2e-3, atol=2e-5)

    def losses(folder: Path) -> list[float]:
        entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        return [e["loss"] for e in entries if "loss" in e]

    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), rel=1e-3)


def test_a_loss_that_is_not_finite_ends_the_run(small: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="loss is not finite at step"):
        train(settings_of(small, texts, tmp_path / "out", lr=1e30))
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert "NaN" not in (tmp_path / "out" / "log.jsonl").read_text()


def test_resume_wants_the_same_data_and_finds_an_interrupted_checkpoint(
    small: Path, texts: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(texts.read_bytes())
    out = tmp_path / "out"
    train(settings_of(small, data, out, stop_after=2))
    # Killed between two renames.
    (out / "checkpoint").rename(out / "checkpoint.old")
    train(settings_of(small, data, out, stop_after=4, resume=True))
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join(lines[1:] + lines[:1]))
    with pytest.raises(SettingsError, match=r"is not the data that the run in .* began with"):
        train(settings_of(small, data, out, resume=True))


def test_control_c_leaves_a_checkpoint(
    small: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    from vllm_uno.train import trainer

    step = trainer._Run._optimizer_step

    def interrupted(self: Any, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    monkeypatch.setattr(trainer._Run, "_optimizer_step", interrupted)
    result = train(settings_of(small, texts, tmp_path / "out"))
    assert result.adapter is None and result.steps == 1
    monkeypatch.undo()
    assert train(settings_of(small, texts, tmp_path / "out", resume=True)).steps == 6


def test_offline_evaluation(small: Path, texts: Path, tmp_path: Path) -> None:
    train(settings_of(small, texts, tmp_path / "adapter"))
    flags = ["--model", str(small), "--adapter", str(tmp_path / "adapter"), "--data", str(texts)]
    flags += ["--samples", "4", "--max_new_tokens", "24", "--prompt_tokens", "4"]
    flags += ["--block_sizes", "1", "3", "--dtype", "float32", "--output", str(tmp_path / "ev")]
    assert main(["eval-adapter", *flags]) == 0
    table = json.loads((tmp_path / "ev" / "acceptance.json").read_text())
    assert [(r["block_size"], r["temperature"]) for r in table] == [
        (1, 0.0),
        (3, 0.0),
        (1, 1.0),
        (3, 1.0),
    ]
    for row in table:
        assert len(row["acceptance"]) == row["block_size"]
        assert row["acceptance"][0] == pytest.approx(1.0)
        assert row["tau"] == pytest.approx(1 + sum(row["acceptance"]))
    assert (tmp_path / "ev" / "acceptance.png").stat().st_size > 5_000
    assert main(["eval-adapter", *flags, "--temperatures", "-1"]) == 1
    assert main(["eval-adapter", *flags, "--adapter", str(tmp_path / "ev")]) == 1


# `vllm-uno train` in one of two processes, in which Control-C is pressed during a step in one.
WORKER = """
import signal, sys
from vllm_uno.cli import main
from vllm_uno.train.trainer import _Run

process, step = int(sys.argv[1]), int(sys.argv[2])
update = _Run._optimizer_step

def interrupted(self, *arguments):
    assert self.accelerator.num_processes == 2
    if (self.accelerator.process_index, self.step) == (process, step):
        signal.raise_signal(signal.SIGINT)
    return update(self, *arguments)

_Run._optimizer_step = interrupted
sys.exit(main(["train", *sys.argv[3:]]))
"""


def train_in_two(
    settings: TrainSettings, script: Path, interrupted: tuple[int, int] = (0, -1)
) -> None:
    """Trains in two processes; `interrupted`: the process and the step of Control-C."""
    script.write_text(WORKER)
    flags = [str(n) for n in interrupted]
    for name, value in dataclasses.asdict(settings).items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not None and value is not False:
            flags += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    # `accelerate launch --cpu` starts one process without MPI.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen([*launch, str(script), *flags], env=environment)
    try:
        assert launcher.wait(timeout=300) == 0  # processes that wait for each other never end
    finally:
        launcher.terminate()  # ends the processes too
        launcher.wait()


@pytest.mark.slow
def test_two_processes_train_the_same_adapter(small: Path, texts: Path, tmp_path: Path) -> None:
    """And end together, with a checkpoint, where only one of them hears Control-C."""
    settings = {n: settings_of(small, texts, tmp_path / n, micro_batch_size=1) for n in "123"}
    train(settings["1"])
    train_in_two(settings["2"], tmp_path / "worker.py")
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)

    # The third step, which saves nothing by itself, and not in the process that saves.
    train_in_two(settings["3"], tmp_path / "worker.py", interrupted=(1, 2))
    state = torch.load(tmp_path / "3" / "checkpoint" / "state.pt", weights_only=True)
    assert state["step"] == 3
    train_in_two(dataclasses.replace(settings["3"], resume=True), tmp_path / "worker.py")
    resumed = weights(tmp_path / "3")
    assert resumed.keys() == two.keys()
    assert all(torch.equal(resumed[name], two[name]) for name in two)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "{tmp}/none.jsonl"}, "data file .*none.jsonl does not exist"),
        ({"data": "{tmp}/empty.jsonl"}, "empty.jsonl holds no samples"),
        ({"data": "{tmp}/bad.jsonl"}, "bad.jsonl, line 2: not JSON"),
        ({"context": 8, "block_sizes": [2]}, "line 1: .* tokens, longer than context=8"),
        ({"context": 100_000}, "context=100000 is past the model's"),
        ({"targets": ["c_attn"]}, r"\['c_attn'\] are not layers of this model"),
        ({"output": "{tmp}/full"}, "output folder .*full is not empty"),
        ({"output": "{tmp}/void", "resume": True}, "no checkpoint to resume from"),
        ({"batch_size": 3}, "batch_size=3 must be a multiple of micro_batch_size"),
        ({"mask_token_id": 1 << 20}, "mask_token_id=1048576 is outside"),
        ({"noise_low": 512}, "noise_low=512 must be below mask_token_id=512"),
        ({"block_sizes": [2, 48]}, "no held-out text is long enough for a block of 48"),
        ({"model": "{tmp}/void"}, "tokenizer of .*void.* could not be loaded"),
    ],
)
def test_bad_input_writes_nothing(
    small: Path, texts: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "ab cd"}\n{"text": \n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    changed = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        train(settings_of(small, texts, **{"output": tmp_path / "out"} | changed))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"block_sizes": [1, 2]}, "block_sizes must be numbers of at least 2"),
        ({"block_sizes": [2, 65]}, "reach past context"),
        ({"steps": 1}, "must reach every one of block_sizes"),
        ({"schedule": "linear"}, "schedule must be constant or cosine"),
        ({"attention": "eager"}, "attention must be auto, flex or sdpa"),
        ({"dtype": "fp8"}, "dtype must be bfloat16 or float32"),
        ({"loss_tv": 0.0}, "not all zero"),
        ({"targets": []}, "targets must name"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"heldout_samples": -1}, "heldout_samples must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"warmup_steps": 7}, r"warmup_steps \(7\) must not be more than steps"),
        ({"noise_low": -3}, "noise_low must not be negative, not -3"),
        ({"stop_after": 0}, "stop_after must be at least 1, not 0"),
        ({"block_sizes": []}, "block_sizes must be numbers of at least 2"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"scale": 0.0}, "scale must be a number above 0, not 0.0"),
        ({"scale": math.inf}, "scale must be a number above 0, not inf"),
        ({"lr": -1.0}, "lr must be a number above 0, not -1.0"),
        ({"lr": math.nan}, "lr must be a number above 0, not nan"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0, not 0.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be above 0, not nan"),
        ({"loss_kl": math.nan}, "loss_tv, loss_ce and loss_kl must be numbers >= 0"),
        ({"loss_ce": -0.5}, "loss_tv, loss_ce and loss_kl must be numbers >= 0"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"seed": 1 << 60}, "seed must be from 0 to"),
        ({"lr": -1.0, "noise_low": -3}, "noise_low must .*; lr must"),
    ],
)
def test_bad_settings(small: Path, texts: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(small, texts, Path("out"), **changes)


def test_command_line(
    small: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0 and "eval-adapter" in capsys.readouterr().out
    assert main(["nonsense"]) == 2
    flags = ["--model", str(small), "--data", str(tmp_path / "no.jsonl")]
    assert main(["train", *flags, "--output", str(tmp_path / "out")]) == 1
    assert "no.jsonl does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "alpha / rank" in capsys.readouterr().out


def test_schedule_and_curriculum(small: Path, texts: Path) -> None:
    s = settings_of(small, texts, Path("o"), steps=10, block_sizes=[2, 4, 8], warmup_steps=4)
    assert [s.block_size_at(i) for i in range(10)] == [2] * 4 + [4] * 3 + [8] * 3
    assert [s.lr_at(i) for i in range(6)] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
    )
    c = settings_of(small, texts, Path("o"), steps=10, schedule="cosine", warmup_steps=0)
    assert c.lr_at(0) == pytest.approx(0.01) and c.lr_at(5) == pytest.approx(0.005)


def test_holding_out(model: Path, tmp_path: Path) -> None:
    samples = [sample(4, seed=i) for i in range(20)]
    training, heldout = split_heldout(samples, 64)
    assert len(heldout) == 4 and training + heldout == samples
    with pytest.raises(DataError, match="too few to hold some out"):
        split_heldout(samples[:3], 64)
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a b"}\n\n[1]\n')
    with pytest.raises(DataError, match="line 3: not a JSON object"):
        load_samples(str(path), AutoTokenizer.from_pretrained(model), 64)
