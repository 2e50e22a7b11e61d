"""The draft vocabulary: the file's checks, the tool that makes one, and the rows it gathers."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_uno.cli import main
from vllm_uno.draft_vocab import fewest_ids, read_draft_vocab
from vllm_uno.tiny_model import write_tiny_model
from vllm_uno.train.data import Sample
from vllm_uno.train.draft_vocab import count_tokens, most_frequent, special_tokens
from vllm_uno.train.model import load_tokenizer

VOCAB = 100


def written(folder: Path, content: object, name: str = "v.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_reads_both_formats_in_any_order(tmp_path: Path) -> None:
    ids = list(range(90, 30, -2))
    expected = np.array(sorted(ids))
    torch.save(ids, tmp_path / "list.pt")
    torch.save(torch.tensor(ids, dtype=torch.int32), tmp_path / "tensor.pt")
    for path in (written(tmp_path, ids), tmp_path / "list.pt", tmp_path / "tensor.pt"):
        found = read_draft_vocab(path, VOCAB)
        assert found.dtype == np.int64 and np.array_equal(found, expected)
    assert len(read_draft_vocab(written(tmp_path, list(range(VOCAB))), VOCAB)) == VOCAB


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "is empty"),
        ([*range(20), VOCAB], r"1 ids outside the model's vocabulary \[0, 100\) \(100\)"),
        ([*range(20), -1], "outside"),
        ([*range(20), 3, 4, 4], r"2 ids more than once \(3, 4\)"),
        (list(range(11)), "11 ids, fewer than 12"),
        ([0.5] * 20, "no list of token ids"),
        ([[1, 2], [3, 4]], "no list of token ids"),
        ([[1], [2, 3]], "could not be read"),
        ({"ids": [1]}, "no list of token ids"),
        ("[1, 2", "could not be read"),
        ([True] * 20, "no list of token ids"),
    ],
)
def test_refuses_with_the_settings_name_and_the_way_out(
    tmp_path: Path, content: object, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"uno_draft_vocab: .*v\.json.*{reason}") as error:
        read_draft_vocab(written(tmp_path, content), VOCAB)
    assert "`vllm-uno draft-vocab`, or leave uno_draft_vocab out" in str(error.value)


def test_refuses_what_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_draft_vocab(tmp_path / "no.json", VOCAB)
    with pytest.raises(ValueError, match="is no file"):
        read_draft_vocab(tmp_path, VOCAB)
    with pytest.raises(ValueError, match=r"must end in \.json"):
        read_draft_vocab(written(tmp_path, [1], "v.txt"), VOCAB)
    with pytest.raises(ValueError, match="could not be read"):
        read_draft_vocab(written(tmp_path, "no torch file", "v.pt"), VOCAB)
    torch.save(SimpleNamespace(a=1), tmp_path / "object.pt")
    with pytest.raises(ValueError, match="could not be read"):
        read_draft_vocab(tmp_path / "object.pt", VOCAB)


def test_least_number_of_ids() -> None:
    assert [fewest_ids(v) for v in (16, 2048, 151_936)] == [2, 256, 256]


# --- the tool


@given(
    st.lists(st.integers(0, 5), min_size=40, max_size=40), st.sets(st.integers(0, 39), max_size=5)
)
def test_most_frequent_against_a_plain_sort(counts: list[int], always: set[int]) -> None:
    size = 12
    found = most_frequent(np.array(counts), always, size)
    others = [i for i in range(40) if i not in always]
    others.sort(key=lambda i: (-counts[i], i))
    expected = sorted(always | set(others[: size - len(always)]))
    assert found.ids == expected
    covered = sum(counts[i] for i in expected)
    assert found.coverage == pytest.approx(covered / max(sum(counts), 1))
    assert found.unseen == sum(counts[i] == 0 for i in expected)
    assert found.tokens == sum(counts)


def test_only_generated_tokens_count() -> None:
    samples = [Sample([3, 4, 4], [False, True, True]), Sample([4, 5], [False, True])]
    assert count_tokens(samples, 7).tolist() == [0, 0, 0, 0, 2, 1, 0]


def test_sizes_that_do_not_fit_are_refused() -> None:
    counts = np.ones(10, np.int64)
    for size in (2, 11):
        with pytest.raises(ValueError, match=f"size={size}"):
            most_frequent(counts, {0, 1}, size)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model", vocab_size=512, hidden_size=32)
    tokenizer = load_tokenizer(str(model), None)
    frequent = tokenizer.decode([100, 101, 100, 101])
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": frequent}) + "\n" for _ in range(3)))
    output = tmp_path / "made" / "vocab.json"
    flags = ["--model", str(model), "--data", str(data), "--output", str(output)]
    assert main(["draft-vocab", *flags, "--size", "64"]) == 0
    assert "64 tokens cover 100.00 % of" in capsys.readouterr().out
    ids = read_draft_vocab(output, 512).tolist()
    text = set(tokenizer(frequent)["input_ids"])
    assert text | special_tokens(tokenizer) | {tokenizer.eos_token_id} <= set(ids)
    assert len(ids) == 64
    # What the text does not have is filled up with low ids.
    assert set(range(40)) <= set(ids)

    assert main(["draft-vocab", *flags, "--size", "100000"]) == 1
    assert "size=100000 must be" in capsys.readouterr().err
    assert main(["draft-vocab", *flags[:-1], "v.txt"]) == 1
    assert "must end in .json" in capsys.readouterr().err
    flags[3] = str(tmp_path / "no.jsonl")
    assert main(["draft-vocab", *flags]) == 1
    assert "does not exist" in capsys.readouterr().err


# --- the gathered rows


class FakeHead:
    """A vocabulary-parallel head: rank `rank`'s shard of `full`, padded to whole shards."""

    def __init__(self, full: torch.Tensor, rank: int, ranks: int) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        rows = -(-len(full) // ranks)
        start, end = rank * rows, min((rank + 1) * rows, len(full))
        padded = full.new_full((rows, full.shape[1]), float("nan"))
        padded[: end - start] = full[start:end]
        self.weight = torch.nn.Parameter(padded, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.tp_size, self.tp_rank = ranks, rank
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_its_share_of_the_kept_rows(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_uno import draft_head

    torch.manual_seed(0)
    full = torch.randn(29, 4)
    full[3, 1] = float("inf")
    ids = torch.tensor([0, 2, 3, 4, 8, 9, 10, 11, 15, 27, 28])  # most of them the first rank's
    sent: list[list[torch.Tensor]] = []

    def all_reduce(rows: torch.Tensor) -> torch.Tensor:
        sent[-1].append(rows.clone())
        return rows

    monkeypatch.setattr(draft_head, "tensor_model_parallel_all_reduce", all_reduce)
    for rank in range(ranks):
        sent.append([])
        rows = draft_head._RowsOfHead(ids)
        rows.adopt(FakeHead(full, rank, ranks), None)
    if ranks == 1:
        assert not sent[0] and torch.equal(rows.weight, full[ids])
        return
    share = -(-len(ids) // ranks)
    shares = [sum(parts) for parts in zip(*sent, strict=True)]  # what the all-reduce would give
    assert len(shares) == ranks and all(s.shape == (share, 4) for s in shares)
    assert torch.equal(torch.cat(shares)[: len(ids)], full[ids])
    assert not torch.cat(shares)[len(ids) :].any()
    # This rank (the last) kept the last of them: its own part, here.
    assert torch.equal(rows.weight, sent[-1][-1])


def test_a_quantised_head_is_refused() -> None:
    from vllm_uno import draft_head

    head = FakeHead(torch.randn(8, 4), 0, 1)
    head.quant_method = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"uno_draft_vocab: .*quantised"):
        draft_head._RowsOfHead(torch.arange(4)).adopt(head, None)


def test_rows_without_a_law_become_certain() -> None:
    from vllm_uno.draft_head import ReducedHead

    head = object.__new__(ReducedHead)
    head.first_id = 2
    z = torch.full((3, 5), float("-inf"))
    z[1, 3] = -7.0
    head.revive(z)
    assert torch.equal(z.softmax(-1).argmax(-1), torch.tensor([2, 3, 2]))
    assert z[0, 2] == 0 and z[1, 2] == float("-inf")
