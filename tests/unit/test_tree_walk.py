"""The walk against a walk by hand, outputs poisoned.

On the CPU the kernel runs in Triton's interpreter, with a GPU it is compiled.
"""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.tree.builder import TreeBuffers, ancestors_reference  # noqa: E402
from vllm_uno.tree.walk import walk_reference, walk_trees  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -77


def random_tree(g: torch.Generator, num_nodes: int, deep: float) -> tuple[list[int], list[int]]:
    """Parents and tokens; tokens are distinct under a parent and equal elsewhere."""
    parents, tokens, used = [-1], [int(torch.randint(0, 3, (), generator=g))], {-1: {0, 1, 2}}
    for node in range(1, num_nodes):
        parent = node - 1
        if torch.rand((), generator=g) > deep:
            parent = int(torch.randint(0, node, (), generator=g))
        taken = used.setdefault(parent, set())
        token = next(t for t in range(num_nodes + 3) if t not in taken)
        taken.add(token)
        parents.append(parent)
        tokens.append(token)
    return parents, tokens


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def check(seed: int, num_reqs: int, num_nodes: int, deep: float) -> int:
    """One random batch; returns the longest path."""
    g = torch.Generator().manual_seed(seed)
    max_reqs = num_reqs + 2
    trees = TreeBuffers.allocate(max_reqs, num_nodes, DEVICE)
    parents, tokens = zip(*(random_tree(g, num_nodes, deep) for _ in range(max_reqs)), strict=True)
    trees.tokens.copy_(torch.tensor(tokens))
    trees.parents.copy_(torch.tensor(parents))
    trees.depths.copy_(torch.tensor([depths_of(p) for p in parents]))
    trees.ancestors.copy_(ancestors_reference(torch.tensor(parents)))

    idx = torch.randperm(max_reqs, generator=g)[:num_reqs]
    idx[torch.rand(num_reqs, generator=g) < 0.1] = -1
    targets: list[list[int]] = []
    rows: list[list[int]] = []
    for slot in idx.tolist():
        kind = int(torch.randint(0, 6, (), generator=g))
        length = num_nodes + 1
        if kind == 0:
            length = 1  # a prefill
        elif kind == 1:
            length = int(torch.randint(0, num_nodes + 2, (), generator=g))  # cut short
        # The seed's own token says nothing, least of all to the request before.
        row = [int(torch.randint(0, 3, (), generator=g)), *tokens[slot]][:length]
        if kind == 2:
            row = row[:1] + [-1] * (length - 1)  # placeholders
        target = torch.randint(0, 3, (length,), generator=g).tolist()
        for node in range(length - 1):  # most rows go on to some child, the last one written
            if torch.rand((), generator=g) < 0.7:
                target[parents[slot][node] + 1] = tokens[slot][node]
        rows.append(row)
        targets.append(target)
    cu = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).int()

    path = torch.full((max_reqs, num_nodes + 1), POISON, dtype=torch.int32, device=DEVICE)
    num_sampled = torch.full((num_reqs + 1,), POISON, dtype=torch.int32, device=DEVICE)
    sampled = torch.full((num_reqs + 1, num_nodes + 1), POISON, device=DEVICE)
    walk_trees(
        path,
        num_sampled[:num_reqs],
        sampled[:num_reqs],
        target_tokens=torch.tensor([*chain(*targets)], dtype=torch.int64, device=DEVICE),
        row_tokens=torch.tensor([*chain(*rows)], dtype=torch.int32, device=DEVICE),
        cu_num_logits=cu.to(DEVICE),
        idx_mapping=idx.to(DEVICE),
        trees=trees,
    )
    idle = torch.ones(max_reqs, dtype=torch.bool)
    longest = 0
    for request, slot in enumerate(idx.tolist()):
        if slot < 0 or not rows[request]:
            want_path, want = [], []
        else:
            want_path, want = walk_reference(targets[request], rows[request], list(parents[slot]))
        fill = [0] * (num_nodes + 1 - len(want))
        assert int(num_sampled[request]) == len(want)
        assert sampled[request].tolist() == want + fill
        if slot >= 0:
            idle[slot] = False
            assert path[slot].tolist() == want_path + fill
        longest = max(longest, len(want))
    assert (path.cpu()[idle] == POISON).all()
    assert num_sampled[num_reqs] == POISON and (sampled[num_reqs] == POISON).all()
    return longest


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 4),
    num_nodes=st.sampled_from([1, 2, 7, 16, 32, 64, 65, 128]),
    deep=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_walk_equals_oracle(seed: int, num_reqs: int, num_nodes: int, deep: float) -> None:
    check(seed, num_reqs, num_nodes, deep)


def test_the_batches_above_have_long_paths() -> None:
    assert max(check(seed, 4, 32, 0.9) for seed in range(8)) > 5


def test_a_chain_accepted_whole() -> None:
    num_nodes = 70
    trees = TreeBuffers.allocate(1, num_nodes, DEVICE)
    row_tokens = torch.arange(num_nodes + 1, device=DEVICE)
    path = torch.full((1, num_nodes + 1), POISON, dtype=torch.int32, device=DEVICE)
    num_sampled = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sampled = torch.zeros(1, num_nodes + 1, dtype=torch.int64, device=DEVICE)
    walk_trees(
        path,
        num_sampled,
        sampled,
        target_tokens=row_tokens + 1,
        row_tokens=row_tokens,
        cu_num_logits=torch.tensor([0, num_nodes + 1], dtype=torch.int32, device=DEVICE),
        idx_mapping=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        trees=trees,
    )
    assert int(num_sampled) == num_nodes + 1
    assert path[0].tolist() == list(range(num_nodes + 1))
    assert sampled[0].tolist() == list(range(1, num_nodes + 2))


def test_cyclic_or_wild_buffers_neither_hang_nor_write_elsewhere() -> None:
    g = torch.Generator().manual_seed(0)
    num_nodes = 9
    trees = TreeBuffers.allocate(3, num_nodes, DEVICE)
    for buffer in (trees.tokens, trees.parents, trees.depths, trees.ancestors):
        buffer.copy_(torch.randint(-(2**30), 2**30, buffer.shape, generator=g))
    path = torch.full((3, num_nodes + 1), POISON, dtype=torch.int32, device=DEVICE)
    num_sampled = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sampled = torch.zeros(1, num_nodes + 1, dtype=torch.int64, device=DEVICE)
    walk_trees(
        path,
        num_sampled,
        sampled,
        target_tokens=torch.ones(num_nodes + 1, dtype=torch.int64, device=DEVICE),
        row_tokens=torch.ones(num_nodes + 1, dtype=torch.int64, device=DEVICE),
        cu_num_logits=torch.tensor([0, num_nodes + 1], dtype=torch.int32, device=DEVICE),
        idx_mapping=torch.ones(1, dtype=torch.int64, device=DEVICE),
        trees=trees,
    )
    assert 1 <= int(num_sampled) <= num_nodes + 1
    assert (path[0] == POISON).all() and (path[2] == POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [4, 32, 64, 128])
def test_many_requests(num_nodes: int) -> None:
    for seed in range(3):
        check(seed, 150, num_nodes, 0.7)
