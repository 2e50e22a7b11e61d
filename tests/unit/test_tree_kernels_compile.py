"""Tree mode's kernels compile for the H200, on a machine without a GPU.

`test_kernels_compile.py` says why. Here also: the pass over the logits loads 16 bytes at a time
and reduces in registers, which the layout that Triton chooses decides.
"""

import os
import subprocess
import sys

CODE = """
from types import SimpleNamespace
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

class Driver:
    is_active = staticmethod(lambda: True)

backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
import vllm.triton_utils
del backends["cpu"]
from vllm_uno.tree import builder, candidates, compaction, rows, synthetic, walk

def compile_for_h200(kernel, types, warps, aligned=(), **constants):
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    assert set(types) <= set(names), set(types) - set(names)
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names) if n in aligned or signature[n].startswith("*")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    target = GPUTarget("cuda", 90, 32)
    binary = triton.compile(source, target=target, options={"num_warps": warps})
    assert "cubin" in binary.asm
    print("COMPILED", kernel.fn.__name__)
    return binary.asm["ptx"]

first = {
    "group_best_ptr": "*i64", "split_max_ptr": "*fp32", "split_sum_ptr": "*fp32",
    "idx_mapping_ptr": "*i64", "temperature_ptr": "*fp32",
}
shape = dict(B=16, STEPS=32, LANES=64, VEC=8)
for dtype, shuffles in (("*bf16", 14), ("*fp32", 60)):
    types = {**first, "logits_ptr": dtype}
    aligned = ("logits_stride", "vocab_size")
    ptx = compile_for_h200(
        candidates._group_best_kernel, types, 2, aligned, TILE=8, **shape
    )
    # 16 bytes a load; no shuffle but for a program's own sums.
    assert ptx.count("ld.global.v4.b32") == (16 if dtype == "*fp32" else 8)
    assert ptx.count("shfl.sync") <= shuffles, ptx.count("shfl.sync")
for top_k in (32, 128):
    types = {**first, "logits_ptr": "*bf16", "tokens_ptr": "*i32", "log_probs_ptr": "*fp32"}
    compile_for_h200(
        candidates._top_k_kernel, types, 4 if top_k <= 32 else 16, aligned,
        K=top_k, K_PADDED=top_k, GROUPS=1024, SPLITS=16, ROWS=1, **shape,
    )
tree = {"parents_ptr": "*i32", "depths_ptr": "*i32", "ancestors_ptr": "*i64"}
for nodes in (32, 128):
    words = (nodes + 63) // 64
    types = {
        **tree, "tokens_ptr": "*i32", "draft_tokens_ptr": "*i64", "idx_mapping_ptr": "*i64",
        "roots_ptr": "*i64", "is_chain_ptr": "*i1", "chain_tokens_ptr": "*i64",
        "candidate_tokens_ptr": "*i32", "log_probs_ptr": "*fp32",
    }
    compile_for_h200(
        builder._build_kernel, types, 1,
        B=16, K=32, V=nodes, WORDS=words, NODES=nodes, HAS_CHAINS=True, REQS=1,
    )
    types = {
        **tree, "path_ptr": "*i32", "num_sampled_ptr": "*i32", "sampled_ptr": "*i64",
        "target_ptr": "*i64", "row_tokens_ptr": "*i32", "cu_num_logits_ptr": "*i32",
        "idx_mapping_ptr": "*i64",
    }
    compile_for_h200(
        walk._walk_kernel, types, 1, V=nodes, NUM_WORDS=words, NODES=nodes, ROWS=2 * nodes
    )
types = {
    "table_ptr": "*i64", "path_ptr": "*i32", "num_sampled_ptr": "*i32",
    "idx_mapping_ptr": "*i64", "positions_ptr": "*i64", "cu_num_logits_ptr": "*i32",
    "block_table_ptrs": "*u64", "block_table_strides": "*i64", "block_sizes_ptr": "*i32",
}
compile_for_h200(
    compaction._compact_kernel, types, 4, UNIT=8, STEPS=8, HEADS=8, CONTENT=64
)
batch = {
    "positions_ptr": "*i64", "cu_num_logits_ptr": "*i32", "idx_mapping_ptr": "*i64",
}
types = {**batch, "query_start_loc_ptr": "*i32", "depths_ptr": "*i32"}
compile_for_h200(rows._depth_positions_kernel, types, 1, V=33, NODES=64)
types = {
    "tokens_ptr": "*i32", "pos_ptr": "*i64", "input_ids_ptr": "*i32", "positions_ptr": "*i64",
    "logits_indices_ptr": "*i64", "slots_ptr": "*i64", "local_pos_ptr": "*i32",
    "prefill_len_ptr": "*i32",
}
compile_for_h200(rows._gather_rows_kernel, types, 4, N=1024)
types = {
    **batch, "path_ptr": "*i32", "num_sampled_ptr": "*i32", "sampled_ptr": "*i64",
    "target_ptr": "*i64", "row_tokens_ptr": "*i32", "seeds_ptr": "*i64", "rates_ptr": "*fp32",
}
compile_for_h200(synthetic._impose_kernel, types, 1, V=32, ROWS=64)
"""


def test_kernels_compile_for_sm_90() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET",)}
    env["UNO_CPU_INTERPRETER"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=env, check=False
    )
    assert done.stdout.count("COMPILED") == 12, done.stdout[-800:] + done.stderr[-3000:]
