"""KV compaction in vLLM's CPU caches: what its own kernel writes for the moved tokens."""

import types

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_uno.tree.cpu_layout import compact_kv_cpu

BLOCKS, BLOCK, HEADS, DIM = 6, 32, 2, 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's CPU build")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paths_move_as_if_written_there(dtype: torch.dtype) -> None:
    isa = _get_attn_isa(dtype, BLOCK, DIM)
    g = torch.Generator().manual_seed(0)
    tables = torch.tensor([[4, 2], [0, 5]], dtype=torch.int32)
    contexts = [27, 3]  # the first request's path crosses a block
    paths = torch.tensor([[0, 1, 3, 7, 0], [0, 2, 3, 0, 0], [9, 9, 9, 9, 9]], dtype=torch.int32)
    slots = [1, 0]  # request-state slots of the two batch rows
    num_sampled = torch.tensor([3, 4], dtype=torch.int32)

    def position_slot(request: int, position: int) -> int:
        return int(tables[request, position // BLOCK]) * BLOCK + position % BLOCK

    def write(cache: torch.Tensor, where: list[int], rows: torch.Tensor) -> None:
        view = cache.view(BLOCKS, HEADS, 2 * BLOCK, DIM)
        keys, values = view.chunk(2, dim=2)
        key, value = rows.split(DIM, dim=-1)
        ops.cpu_attn_reshape_and_cache(
            key.contiguous(), value.contiguous(), keys, values, torch.tensor(where), isa
        )

    everything = torch.randn(BLOCKS * BLOCK, HEADS, 2 * DIM, generator=g).to(dtype)
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=dtype)
    write(cache, list(range(BLOCKS * BLOCK)), everything)
    want = cache.clone()
    for request, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        accepted = int(num_sampled[request]) - 1
        for i, row in enumerate(paths[slot, 1 : accepted + 1].tolist(), 1):
            source = position_slot(request, context + row)
            write(want, [position_slot(request, context + i)], everything[source : source + 1])
    assert not torch.equal(want, cache)

    layer = types.SimpleNamespace(kv_cache=cache, isa=isa)
    compact_kv_cpu(
        [layer],
        [0],
        path=paths,
        num_sampled=num_sampled,
        idx_mapping=torch.tensor(slots),
        positions=torch.tensor([contexts[0], 0, contexts[1]]),
        cu_num_logits=torch.tensor([0, 2, 3], dtype=torch.int32),
        block_tables=types.SimpleNamespace(input_block_tables=[tables]),
    )
    assert torch.equal(cache, want)
