"""The builder against two oracles, outputs poisoned: enumeration of every node, and a heap.

On the CPU the kernel runs in Triton's interpreter, with a GPU it is compiled.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.tree.builder import (  # noqa: E402
    TreeBuffers,
    ancestors_reference,
    build_trees,
    tree_reference,
)
from vllm_uno.tree.candidates import Candidates  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -77


def random_candidates(
    g: np.random.Generator, num_reqs: int, block_size: int, top_k: int, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities [n, B - 1, K], sorted; with ties, and rows cut short by NaN."""
    shape = (num_reqs, block_size - 1, top_k)
    tokens = np.empty(shape, dtype=np.int32)
    for row in itertools.product(*map(range, shape[:2])):
        tokens[row] = g.choice(vocab, top_k, replace=False)
    # Few levels: totals tie across depths and parents.
    levels = g.choice([1, 2, 4, 1000], p=[0.15, 0.3, 0.3, 0.25])
    log_probs = -(g.integers(0, levels + 1, shape) / levels * 3).astype(np.float32)
    log_probs = -np.sort(-log_probs, axis=-1)
    cut = g.integers(0, 4 * top_k, shape[:2])[..., None]
    missing = g.choice([np.nan, -np.inf], shape[:2])[..., None]
    log_probs = np.where(np.arange(top_k) < cut, log_probs, missing).astype(np.float32)
    order = np.argsort(tokens, axis=-1, kind="stable")
    tokens = np.take_along_axis(tokens, order, axis=-1)
    # By rank, equal log-probabilities have ascending tokens: as select_candidates writes them,
    # or in any other order, which the builder must not mind.
    return (tokens if g.random() < 0.5 else tokens[..., ::-1].copy()), log_probs


def run(
    tokens: np.ndarray, log_probs: np.ndarray, num_nodes: int, g: np.random.Generator, chains: bool
) -> dict[str, Any]:
    """The kernel on [n, B - 1, K] candidates, some of the requests inactive or chains."""
    num_reqs, rows, top_k = tokens.shape
    max_reqs = num_reqs + 2
    idx = torch.from_numpy(g.permutation(max_reqs)[:num_reqs].copy())
    idx[torch.from_numpy(g.random(num_reqs) < 0.15)] = -1
    roots = torch.from_numpy(g.integers(0, 9, (num_reqs, 2)))
    out = TreeBuffers.allocate(max_reqs, num_nodes, DEVICE)
    for buffer in (out.tokens, out.parents, out.depths, out.ancestors):
        buffer.fill_(POISON)
    draft = torch.full((num_reqs, num_nodes + 1), POISON, dtype=torch.int64, device=DEVICE)
    candidates = Candidates.allocate(num_reqs + 1, rows + 1, top_k, 10**6, DEVICE, 1)
    candidates.tokens[:num_reqs] = torch.from_numpy(tokens)
    candidates.log_probs[:num_reqs] = torch.from_numpy(log_probs)
    is_chain = torch.from_numpy(g.random(num_reqs) < 0.5) if chains else None
    width = int(g.integers(1, num_nodes + 3))
    chain_tokens = torch.from_numpy(g.integers(0, 10**6, (num_reqs, width))) if chains else None
    build_trees(
        out,
        draft[:, :num_nodes],
        candidates,
        idx_mapping=idx.to(DEVICE),
        roots=roots.to(DEVICE)[:, 0],
        is_chain=None if is_chain is None else is_chain.to(DEVICE),
        chain_tokens=None if chain_tokens is None else chain_tokens.to(DEVICE),
    )
    return {
        "idx": idx,
        "roots": roots[:, 0],
        "trees": TreeBuffers(
            *(b.cpu() for b in (out.tokens, out.parents, out.depths, out.ancestors))
        ),
        "draft": draft.cpu(),
        "is_chain": is_chain if is_chain is not None else torch.zeros(num_reqs, dtype=torch.bool),
        "chain_tokens": chain_tokens,
    }


def check(tokens: np.ndarray, log_probs: np.ndarray, num_nodes: int, got: dict[str, Any]) -> None:
    trees, draft = got["trees"], got["draft"]
    assert (draft[:, num_nodes:] == POISON).all()
    idle = torch.ones(trees.tokens.shape[0], dtype=torch.bool)
    for request, slot in enumerate(got["idx"].tolist()):
        if slot < 0:
            assert (draft[request, :num_nodes] == 0).all()
            continue
        idle[slot] = False
        if got["is_chain"][request]:
            chain = got["chain_tokens"][request, :num_nodes].tolist()
            want = (
                chain + [0] * (num_nodes - len(chain)),
                list(range(-1, num_nodes - 1)),
                list(range(num_nodes)),
            )
        else:
            root = int(got["roots"][request])
            want = tree_reference(root, tokens[request], log_probs[request], num_nodes)
        assert trees.tokens[slot].tolist() == want[0]
        assert trees.parents[slot].tolist() == want[1]
        assert trees.depths[slot].tolist() == want[2]
        masks = ancestors_reference(torch.tensor([want[1]]))
        assert torch.equal(trees.ancestors[slot], masks[0])
        assert draft[request, :num_nodes].tolist() == want[0]
    for buffer in (trees.tokens, trees.parents, trees.depths, trees.ancestors):
        assert (buffer[idle] == POISON).all()


def enumerated_tree(
    root: int, tokens: np.ndarray, log_probs: np.ndarray, num_nodes: int
) -> tuple[list[int], list[int], list[int]]:
    """By the definition: of all nodes whose parent is taken, the first in the order, V - 1 times.

    Shares nothing with the kernel or the heap; K ** (B - 1) nodes.
    """
    rows, top_k = tokens.shape
    totals = {(): np.float32(0)}  # by path of ranks
    for depth in range(1, rows + 1):
        for path in itertools.product(range(top_k), repeat=depth):
            log_prob = np.float32(log_probs[depth - 1, path[-1]])
            log_prob = np.float32(-np.inf) if np.isnan(log_prob) else log_prob
            totals[path] = totals[path[:-1]] + log_prob
    taken: list[tuple[int, ...]] = [()]
    while len(taken) < num_nodes:
        open_nodes = [p for p in totals if p and p not in taken and p[:-1] in taken]
        if not open_nodes:
            break

        def order(p: tuple[int, ...]) -> tuple[float, int, int, int, int]:
            token = int(tokens[len(p) - 1, p[-1]])
            return (-float(totals[p]), len(p), p[-1], token, taken.index(p[:-1]))

        taken.append(min(open_nodes, key=order))
    nodes = [root] + [int(tokens[len(p) - 1, p[-1]]) for p in taken[1:]]
    parents = [-1] + [taken.index(p[:-1]) for p in taken[1:]]
    depths = [len(p) for p in taken]
    while len(nodes) < num_nodes:
        nodes, parents = [*nodes, 0], [*parents, len(nodes) - 1]
        depths.append(depths[-1] + 1)
    return nodes, parents, depths


@pytest.mark.parametrize("part", range(8))
def test_heap_equals_enumeration(part: int) -> None:
    g = np.random.default_rng(part)
    for _ in range(60):
        block_size, top_k = int(g.integers(1, 5)), int(g.integers(1, 4))
        num_nodes = int(g.integers(1, 14))
        tokens, log_probs = random_candidates(g, 1, block_size, top_k, top_k + 1)
        arguments = (5, tokens[0], log_probs[0], num_nodes)
        assert tree_reference(*arguments) == enumerated_tree(*arguments)


@pytest.mark.parametrize("part", range(4))
def test_small_trees_equal_oracle(part: int) -> None:
    """2,080 random trees; 520 a part, in 13 launches of 40."""
    g = np.random.default_rng(100 + part)
    for _ in range(13):
        block_size, top_k = int(g.integers(1, 6)), int(g.integers(1, 5))
        num_nodes = int(g.integers(1, 18))
        tokens, log_probs = random_candidates(g, 40, block_size, top_k, top_k + 1)
        got = run(tokens, log_probs, num_nodes, g, chains=False)
        check(tokens, log_probs, num_nodes, got)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 3),
    block_size=st.integers(1, 17),
    top_k=st.sampled_from([1, 2, 5, 32]),
    num_nodes=st.sampled_from([1, 2, 31, 32, 63, 64, 65, 128]),
    chains=st.booleans(),
)
def test_trees_and_chains_equal_oracle(
    seed: int, num_reqs: int, block_size: int, top_k: int, num_nodes: int, chains: bool
) -> None:
    g = np.random.default_rng(seed)
    tokens, log_probs = random_candidates(g, num_reqs, block_size, top_k, 160_000)
    check(tokens, log_probs, num_nodes, run(tokens, log_probs, num_nodes, g, chains))


def test_slots_never_drafted_are_chains_and_limits() -> None:
    trees = TreeBuffers.allocate(2, 70, torch.device("cpu"))
    assert torch.equal(trees.parents[1], torch.arange(70).int() - 1)
    assert torch.equal(trees.ancestors, ancestors_reference(trees.parents))
    for num_nodes in (0, 129):
        with pytest.raises(ValueError, match="nodes"):
            TreeBuffers.allocate(1, num_nodes, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [4, 32, 60, 64, 100, 128])
def test_many_large_trees(num_nodes: int) -> None:
    for seed in range(2):
        g = np.random.default_rng(seed)
        tokens, log_probs = random_candidates(g, 200, 16, 32, 152_000)
        check(tokens, log_probs, num_nodes, run(tokens, log_probs, num_nodes, g, chains=seed > 0))
