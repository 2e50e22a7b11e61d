"""Tree attention against stock causal attention on the same rows.

    python benchmarks/tree_attention.py --out tree_attention.json

One attention call for each of 36 layers of the Qwen3-8B shape (32 heads, 8 KV heads, dimension 128,
bf16), each with a paged KV cache of its own, as one CUDA graph; V = 32 nodes, so 33 rows a request:

    stock     vLLM's FlashAttention, causal, scheduled ahead as in vLLM's FULL graphs
    context   the same call, non-causal over the context alone: what `flash` starts with
    flash     tree_attention_flash: context, then the nodes added in place
    triton    tree_attention_triton
    xformers  xformers.ops.tree_attention, if it imports: one tree for the whole batch, dense caches

Every figure is a ratio to `stock` in the same run; the repeats of each are interleaved and the
table shows medians. `error` is the largest difference to tree_attention_reference over the first
layer; trees are random, equal for all requests where xformers is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import capture, milliseconds
from vllm.v1.attention.backends.fa_utils import (
    flash_attn_varlen_func,
    get_flash_attn_version,
    get_scheduler_metadata,
)

from vllm_uno.tree.attention import (
    TreeBatch,
    tree_attention_flash,
    tree_attention_reference,
    tree_attention_triton,
    write_context_lens,
)
from vllm_uno.tree.state import pack_ancestors

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
MAX_SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 4600])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--kinds", nargs="+", default=["stock", "context", "flash", "triton", "xformers"]
    )
    parser.add_argument("--out", type=Path, default=Path("tree_attention.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"FlashAttention {get_flash_attn_version(head_size=DIM)}")
    shown = "".join(f"{k:>16}" for k in args.kinds[1:])
    print(f"{'requests':>8} {'context':>8} {'stock us':>9}{shown}   (ratio, error)")
    table = []
    for requests in args.requests:
        for context in args.contexts:
            table.append(compare(args, requests, context))
    args.out.write_text(json.dumps({"nodes": args.nodes, "table": table}, indent=1) + "\n")


def compare(args: argparse.Namespace, requests: int, context: int) -> dict[str, Any]:
    setting = Setting(requests, context, args.nodes, args.layers)
    reference = torch.zeros_like(setting.query)
    keys, values = setting.caches[0]
    tree_attention_reference(setting.query, keys, values, setting.batch, setting.scale, reference)
    graphs, errors = {}, {}
    for kind in args.kinds:
        try:
            work = getattr(setting, kind)
            errors[kind] = float((work(0).view_as(reference) - reference).abs().max())
            graphs[kind] = capture(functools.partial(over_layers, work, args.layers))
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {error}")
    times: dict[str, list[float]] = {kind: [] for kind in graphs}
    for _ in range(args.repeats):
        for kind, graph in graphs.items():
            times[kind].append(1e3 * milliseconds(graph) / args.layers)
    median = {kind: statistics.median(found) for kind, found in times.items()}
    shown = "".join(
        f"{median[k] / median['stock']:9.3f} {errors[k]:.0e}" if k in median else f"{'-':>16}"
        for k in args.kinds[1:]
    )
    print(f"{requests:8} {context:8} {median['stock']:9.2f}{shown}", flush=True)
    return {"requests": requests, "context": context, "us": times, "error": errors}


class Setting:
    """A batch of equal requests and the calls that are compared, by layer."""

    def __init__(self, requests: int, context: int, nodes: int, layers: int) -> None:
        rows, length = nodes + 1, context + nodes + 1
        blocks = -(-length // BLOCK)
        device = torch.device("cuda")
        visible = torch.eye(nodes, dtype=torch.bool)
        for j in range(1, nodes):
            visible[j] |= visible[int(torch.randint(0, j, (1,)))]
        tree = pack_ancestors(visible).to(device)
        # vLLM's layout: [blocks, slots, KV heads, key and value], heads within a block.
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(layers):
            cache = torch.randn(
                requests * blocks, KV_HEADS, BLOCK, 2 * DIM, device=device, dtype=torch.bfloat16
            )
            keys, values = cache.transpose(1, 2).split(DIM, dim=-1)
            self.caches.append((keys, values))
        table = torch.randperm(requests * blocks, device=device).view(requests, blocks).int()
        self.batch = TreeBatch(
            query_start_loc=torch.arange(requests + 1, device=device).int() * rows,
            seq_lens=torch.full((requests,), length, dtype=torch.int32, device=device),
            block_table=table,
            ancestors=tree.repeat(requests, 1, 1),
            slots=torch.arange(requests, device=device).int(),
            max_rows=rows,
        )
        self.query = torch.randn(requests * rows, HEADS, DIM, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)
        self.scale = DIM**-0.5
        self.visible, self.context_len = visible.to(device), context
        # Graphs are captured for the longest request there may be.
        self.max_length = max(8192, length)
        self.context_lens = torch.empty_like(self.batch.seq_lens)
        write_context_lens(self.batch.query_start_loc, self.batch.seq_lens, self.context_lens)
        self.version = get_flash_attn_version(head_size=DIM)
        self.stock_schedule = self._schedule(self.batch.seq_lens, True)
        self.context_schedule = self._schedule(self.context_lens, False)

    def _schedule(self, lengths: torch.Tensor, causal: bool) -> torch.Tensor | None:
        if self.version != 3:
            return None
        return get_scheduler_metadata(
            batch_size=lengths.shape[0],
            max_seqlen_q=self.batch.max_rows,
            max_seqlen_k=self.max_length,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=DIM,
            cache_seqlens=lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.batch.query_start_loc,
            page_size=BLOCK,
            causal=causal,
            num_splits=MAX_SPLITS,
        )

    def _flash(self, layer: int, lengths: torch.Tensor, causal: bool) -> torch.Tensor:
        keys, values = self.caches[layer]
        flash_attn_varlen_func(
            q=self.query,
            k=keys,
            v=values,
            out=self.out,
            cu_seqlens_q=self.batch.query_start_loc,
            max_seqlen_q=self.batch.max_rows,
            seqused_k=lengths,
            max_seqlen_k=self.max_length,
            softmax_scale=self.scale,
            causal=causal,
            block_table=self.batch.block_table,
            fa_version=self.version,
            scheduler_metadata=self.stock_schedule if causal else self.context_schedule,
            num_splits=MAX_SPLITS if self.version == 3 else 0,
            return_softmax_lse=not causal,
        )
        return self.out

    def stock(self, layer: int) -> torch.Tensor:
        return self._flash(layer, self.batch.seq_lens, True)

    def context(self, layer: int) -> torch.Tensor:
        return self._flash(layer, self.context_lens, False)

    def flash(self, layer: int) -> torch.Tensor:
        keys, values = self.caches[layer]
        tree_attention_flash(
            self.query,
            keys,
            values,
            self.batch,
            self.scale,
            self.out,
            context_lens=self.context_lens,
            max_context=self.max_length,
            fa_version=self.version,
            scheduler_metadata=self.context_schedule,
            num_splits=MAX_SPLITS if self.version == 3 else 0,
        )
        return self.out

    def triton(self, layer: int) -> torch.Tensor:
        keys, values = self.caches[layer]
        tree_attention_triton(self.query, keys, values, self.batch, self.scale, self.out)
        return self.out

    @functools.cached_property
    def _dense(self) -> list[tuple[torch.Tensor, ...]]:
        """Keys and values of context and rows by layer, [requests, tokens, KV heads, 1, dim]."""
        found = []
        for cache in self.caches:
            parts = []
            for pages in cache:
                tokens = pages[self.batch.block_table.long()].flatten(1, 2)[:, :, :, None]
                parts.append(tokens[:, : self.context_len].contiguous())
                rows = tokens[:, self.context_len : self.context_len + self.batch.max_rows]
                parts.append(rows.contiguous())
            found.append(tuple(parts))
        return found

    @functools.cached_property
    def _biases(self) -> tuple[Any, torch.Tensor]:
        from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask

        requests, rows = self.batch.seq_lens.shape[0], self.batch.max_rows
        prefix = BlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[rows] * requests,
            kv_seqlen=[self.context_len] * requests,
            kv_padding=self.context_len,
        ).to(self.query.device)
        # Its kernel wants rows of the bias to begin at multiples of eight elements.
        seen = torch.zeros(rows, -(-rows // 8) * 8, dtype=torch.bool, device=self.query.device)
        seen[:, 0] = True
        seen[1:, 1:rows] = self.visible
        bias = torch.where(seen, 0.0, float("-inf")).to(self.query.dtype)
        return prefix, bias[:, :rows]

    def xformers(self, layer: int) -> torch.Tensor:
        from xformers.ops.fmha import common
        from xformers.ops.fmha.triton_splitk import FwOp
        from xformers.ops.tree_attention import tree_attention

        context_keys, keys, context_values, values = self._dense[layer]
        prefix, bias = self._biases
        requests, group = self.batch.seq_lens.shape[0], HEADS // KV_HEADS
        shared = (
            t.expand(-1, -1, -1, group, -1) for t in (keys, values, context_keys, context_values)
        )
        query = self.query.view(requests, self.batch.max_rows, KV_HEADS, group, DIM)
        # Its CUDA extension is built for other versions of torch; its Triton kernels need none.
        common._built_with_cuda = True
        # Its own Triton kernel by name: the choice that 0.0.35 makes by itself (this kernel, up to
        # 64 requests) fails on Python 3.12, for an isinstance() with a frozenset.
        return tree_attention(query, *shared, bias, prefix, prefix_op=FwOp, suffix_op=FwOp)


def over_layers(work: Callable[[int], torch.Tensor], layers: int) -> None:
    for layer in range(layers):
        work(layer)


if __name__ == "__main__":
    main()
