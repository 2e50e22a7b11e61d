"""vLLM's attention backends with tree verification: FlashAttention, Triton and CPU.

Each is the stock backend under its own name; only batches prepared inside `TreeState.verifying`
differ. Their metadata is a `TreeMetadata`: leading requests of at most V + 1 rows, which tree
attention serves, and the stock metadata of the others. A decode batch belongs to the first part as
a whole: a request without a tree attends causally there, by device data, so that a FULL graph
captured for n requests of V + 1 rows is right for any batch vLLM replays it for, a prefill of
exactly V + 1 tokens included. KV is written by the stock code.

The draft pass runs the same attention objects: its metadata is built outside `verifying`, is stock
metadata, and takes the stock path, in a graph as well as out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from vllm_uno.tree import state as tree_state
from vllm_uno.tree.attention import (
    TreeBatch,
    attend,
    tree_attention_flash,
    tree_attention_triton,
    visible_positions,
    write_context_lens,
)
from vllm_uno.tree.cpu_layout import slot_elements
from vllm_uno.vllm_hooks.attention_api import (
    AttentionBackendEnum,
    AttentionCGSupport,
    AttentionLayerBase,
    AttentionType,
    CommonAttentionMetadata,
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
    canonicalize_singleton_dim_strides,
    forget_chosen_backends,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
    is_quantized_kv_cache,
    register_backend,
)

_BACKENDS = {
    AttentionBackendEnum.FLASH_ATTN: "vllm_uno.tree.backends.TreeFlashAttentionBackend",
    AttentionBackendEnum.TRITON_ATTN: "vllm_uno.tree.backends.TreeTritonAttentionBackend",
    AttentionBackendEnum.CPU_ATTN: "vllm_uno.tree.backends.TreeCPUAttentionBackend",
}


def register_tree_backends() -> None:
    """Put ours in the place of vLLM's backends, however they are chosen. Before the model is built.

    Raises:
        ValueError: another plugin has replaced one of them.
    """
    for backend, path in _BACKENDS.items():
        if backend.is_overridden() and backend.get_path() != path:
            raise ValueError(
                f"UNO's tree mode replaces attention backend {backend.name}, and so does "
                f"{backend.get_path()}. Leave one of the two out, or use linear mode "
                "(uno_mode 'linear')."
            )
        register_backend(backend, path)
    forget_chosen_backends()


def unregister_tree_backends() -> None:
    """Undo `register_tree_backends`, for the next engine of this process."""
    for backend, path in _BACKENDS.items():
        if backend.is_overridden() and backend.get_path() == path:
            backend.clear_override()
    forget_chosen_backends()


def check_tree_backends(vllm_config: Any) -> None:
    """Raise unless every attention layer of the built model runs one of our backends.

    Raises:
        ValueError: names a layer and its backend.
    """
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        backend = layer.get_attn_backend()
        if not issubclass(backend, _TreeBackend):
            raise ValueError(
                f"UNO's tree mode does not support attention backend {backend.get_name()} (layer "
                f"{name}). Supported: {', '.join(b.name for b in _BACKENDS)}; choose one with "
                "--attention-backend, or use linear mode (uno_mode 'linear')."
            )


@dataclass
class FlashContext:
    """FlashAttention's call over the context.

    Attributes:
        lens: int32 [n], positions every row sees.
        scheduler_metadata: of a non-causal call over `lens`; None: made by each call.
        num_splits: upper bound; 0 leaves it to FlashAttention.
    """

    lens: torch.Tensor
    scheduler_metadata: torch.Tensor | None
    num_splits: int


@dataclass
class TreeMetadata:
    """A verify batch.

    Attributes:
        batch: the requests tree attention serves.
        num_tree_tokens: their tokens, the first of the batch.
        rest: stock metadata of the other requests, if any.
        max_seq_len: no request is longer.
        slot_mapping: int64 [tokens], as in stock metadata.
        num_actual_tokens: tokens of the whole batch.
        flash: for the FlashAttention backend.
        visible: for the CPU backend: bool [rows, seq_len] of each request.
    """

    batch: TreeBatch
    num_tree_tokens: int
    rest: Any | None
    max_seq_len: int
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    flash: FlashContext | None = None
    visible: list[torch.Tensor] | None = None

    @property
    def seq_lens(self) -> torch.Tensor:
        """The Triton builder shortens them for its capture."""
        return self.batch.seq_lens


class _TreeBackend:
    """What our backend classes have in common."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Splits and their merge depend on the number of requests."""
        return False


class _TreeBuilder:
    """Mix-in of a metadata builder: splits verify batches."""

    supports_update_block_table = False
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        unsupported = {
            "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
            "prefix-LM attention": config.model_config.is_mm_prefix_lm,
            "reference sliding window attention": config.model_config.rswa_window is not None,
        }
        _refuse(config, unsupported)
        # This engine's: another one of the same process may install its own later.
        self._tree = tree_state.installed()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """At most uniform batches: a graph of mixed ones could not be split on the host."""
        stock = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return min(stock, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        common = common_attn_metadata
        tree = self._tree
        if tree is None or not tree.active:
            return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        if common.causal is not True:
            raise NotImplementedError("UNO's tree mode verifies causal models only")
        max_rows = tree.num_nodes + 1
        if common.max_query_len <= max_rows:
            n, max_rows = common.num_reqs, common.max_query_len
        else:
            n = tree.num_drafted
        if n == 0:
            return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        starts = common.query_start_loc_cpu
        if n < common.num_reqs:
            longest = int((starts[1 : n + 1] - starts[:n]).max())
            if longest > max_rows:
                raise RuntimeError(f"a request of {longest} rows was said to be a tree")
        alone = n == common.num_reqs
        rest = None if alone else super().build(0, _requests_from(common, n), fast_build)  # type: ignore[misc]
        metadata = TreeMetadata(
            batch=TreeBatch(
                query_start_loc=common.query_start_loc[: n + 1],
                seq_lens=common.seq_lens[:n],
                block_table=common.block_table_tensor[:n],
                ancestors=tree.ancestors,
                slots=tree.slots,
                max_rows=max_rows,
            ),
            num_tree_tokens=common.num_actual_tokens if alone else int(starts[n]),
            rest=rest,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
        )
        self._prepare(metadata)
        return metadata

    def _prepare(self, metadata: TreeMetadata) -> None:
        """What the backend adds."""


def _requests_from(common: CommonAttentionMetadata, first: int) -> CommonAttentionMetadata:
    """The batch without its first requests."""
    start = int(common.query_start_loc_cpu[first])
    per_request = {
        name: value[first:]
        for name in (
            "seq_lens",
            "block_table_tensor",
            "is_prefilling",
            "seq_lens_cpu_upper_bound",
            "req_idx",
            "rswa_prefix_lens",
        )
        if (value := getattr(common, name)) is not None
    }
    per_token = {
        name: value[start:]
        for name in ("slot_mapping", "positions")
        if (value := getattr(common, name)) is not None
    }
    caches = {f.name: None for f in fields(common) if f.name.startswith("_") and f.init}
    return replace(
        common,
        query_start_loc=common.query_start_loc[first:] - start,
        query_start_loc_cpu=common.query_start_loc_cpu[first:] - start,
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - start,
        **per_request,
        **per_token,
        **caches,
    )


class _TreeImpl:
    """Mix-in of an attention implementation: tree attention first, stock attention for the rest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "sliding windows": getattr(self, "sliding_window", None) not in (None, -1, (-1, -1)),
            "attention sinks": getattr(self, "sinks", None) is not None,
            "ALiBi": getattr(self, "alibi_slopes", None) is not None
            or getattr(self, "use_alibi_sqrt", False),
            "a soft cap on attention logits": bool(getattr(self, "logits_soft_cap", None)),
            "chunked attention": getattr(self, "chunk_lookback", -1) != -1,
            "an fp8 or otherwise quantised KV cache": is_quantized_kv_cache(
                getattr(self, "kv_cache_dtype", "auto")
            ),
            "decode context parallelism": getattr(self, "dcp_world_size", 1) > 1,
            "encoder or cross attention": getattr(self, "attn_type", AttentionType.DECODER)
            != AttentionType.DECODER,
            "FlashAttention 4's kernel for heads of 256": getattr(self, "fa4_hd256", False),
        }
        _refuse(get_current_vllm_config_or_none(), unsupported)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(attn_metadata, TreeMetadata):
            return super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=output_scale, output_block_scale=output_block_scale,
            )  # fmt: skip
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tree attention does not quantise its output")
        n = attn_metadata.num_tree_tokens
        self._attend_tree(layer, query[:n], kv_cache, attn_metadata, output[:n])
        if attn_metadata.rest is not None:
            super().forward(  # type: ignore[misc]
                layer,
                query[n:],
                None if key is None else key[n:],
                None if value is None else value[n:],
                kv_cache,
                attn_metadata.rest,
                output[n:],
            )
        return output

    def _attend_tree(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeMetadata,
        output: torch.Tensor,
    ) -> None:
        raise NotImplementedError


def _has_trees(config: Any) -> bool:
    """Whether the engine of this config has trees.

    The backends of one that failed to start stay registered while anything holds its proposer (a
    traceback does): to whatever else this process starts they must be the stock ones.
    """
    return getattr(getattr(config, "speculative_config", None), "uno_mode", None) == "tree"


def _refuse(config: Any, unsupported: dict[str, bool]) -> None:
    found = [what for what, is_there in unsupported.items() if is_there]
    if found and _has_trees(config):
        raise ValueError(
            f"UNO's tree mode does not support {' or '.join(found)}, which this model or its "
            "settings need. Linear mode does: uno_mode 'linear'."
        )


class TreeFlashAttentionBuilder(_TreeBuilder, FlashAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _has_trees(self.vllm_config):
            # Sliding windows are refused: what the stock builder looks up on its first build.
            self.aot_sliding_window = (-1, -1)
        max_reqs = max(self.vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self._context_lens = torch.zeros(max_reqs, dtype=torch.int32, device=self.device)

    def _prepare(self, metadata: TreeMetadata) -> None:
        """Context lengths and schedule, in buffers that a captured graph reads."""
        batch = metadata.batch
        n = batch.seq_lens.shape[0]
        write_context_lens(batch.query_start_loc, batch.seq_lens, self._context_lens)
        context = FlashContext(self._context_lens[:n], None, 0)
        # The builder has one schedule buffer: in a mixed batch it holds the rest's.
        if metadata.rest is None:
            if (
                self.use_full_cuda_graph
                and self.max_cudagraph_size is not None
                and metadata.num_tree_tokens <= self.max_cudagraph_size
            ):
                context.num_splits = self.max_num_splits
            context.scheduler_metadata = self._store_scheduler_metadata(
                self._get_scheduler_metadata(
                    aot_schedule=self.aot_schedule,
                    batch_size=n,
                    cu_query_lens=batch.query_start_loc,
                    max_query_len=batch.max_rows,
                    seqlens=context.lens,
                    max_seq_len=metadata.max_seq_len,
                    causal=False,
                    max_num_splits=context.num_splits,
                )
            )
        metadata.flash = context


class TreeFlashAttentionImpl(_TreeImpl, FlashAttentionImpl):
    def _attend_tree(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeMetadata,
        output: torch.Tensor,
    ) -> None:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        flash = metadata.flash
        assert flash is not None
        tree_attention_flash(
            query,
            # As the stock path: TMA wants the strides of a single KV head in order.
            canonicalize_singleton_dim_strides(keys),
            canonicalize_singleton_dim_strides(values),
            metadata.batch,
            self.scale,
            output,
            context_lens=flash.lens,
            max_context=metadata.max_seq_len,
            fa_version=self.vllm_flash_attn_version,
            scheduler_metadata=flash.scheduler_metadata,
            num_splits=flash.num_splits,
        )


class TreeFlashAttentionBackend(_TreeBackend, FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionBuilder]:
        return TreeFlashAttentionBuilder


class TreeTritonAttentionBuilder(_TreeBuilder, TritonAttentionMetadataBuilder):
    pass


class TreeTritonAttentionImpl(_TreeImpl, TritonAttentionImpl):
    def _attend_tree(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeMetadata,
        output: torch.Tensor,
    ) -> None:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        tree_attention_triton(query, keys, values, metadata.batch, self.scale, output)


class TreeTritonAttentionBackend(_TreeBackend, TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonAttentionBuilder]:
        return TreeTritonAttentionBuilder


class TreeCPUAttentionBuilder(_TreeBuilder, CPUAttentionMetadataBuilder):
    def _prepare(self, metadata: TreeMetadata) -> None:
        """Masks once a step, not once a layer."""
        rows = metadata.batch.query_start_loc.diff().tolist()
        lengths = metadata.batch.seq_lens.tolist()
        metadata.visible = [
            visible_positions(metadata.batch, r, rows[r], lengths[r]) if rows[r] else torch.empty(0)
            for r in range(len(rows))
        ]


class TreeCPUAttentionImpl(_TreeImpl, CPUAttentionBackendImpl):
    def _attend_tree(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeMetadata,
        output: torch.Tensor,
    ) -> None:
        blocks, kv_heads, block_size, _ = kv_cache.shape
        elements = slot_elements(
            str(layer.isa),
            kv_cache.dtype,
            block_size,
            self.head_size,
        )
        flat = kv_cache.view(blocks, kv_heads, -1)
        starts = metadata.batch.query_start_loc.tolist()
        assert metadata.visible is not None
        for r, visible in enumerate(metadata.visible):
            rows = slice(starts[r], starts[r + 1])
            if rows.start == rows.stop:
                continue
            length = visible.shape[1]
            used = flat[metadata.batch.block_table[r, : -(-length // block_size)].long()]
            keys, values = (
                used[..., where].transpose(1, 2).flatten(0, 1)[:length] for where in elements
            )
            output[rows] = attend(query[rows], keys, values, visible, self.scale).to(output.dtype)


class TreeCPUAttentionBackend(_TreeBackend, CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionBuilder]:
        return TreeCPUAttentionBuilder
