"""Every Triton kernel of ours compiles for the H200, on a machine without a GPU.

The interpreter runs Python; the compiler does not accept all of it (a type
annotation on a device function, for one, passes the interpreter only).
"""

import os
import subprocess
import sys

CODE = """
from types import SimpleNamespace
import triton, triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

class Driver:
    is_active = staticmethod(lambda: True)

backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
import vllm.triton_utils
del backends["cpu"]
import vllm_uno.draft_inputs as draft_inputs, vllm_uno.draft_law as draft_law
import vllm_uno.draft_context as draft_context

def compile_for_h200(kernel, types, **constants):
    names = [p.name for p in kernel.params]
    given = dict(types)
    signature = {n: "constexpr" if n in constants else given.get(n, "i32") for n in names}
    assert set(given) <= set(names), set(given) - set(names)
    source = ASTSource(kernel, signature, constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "cubin" in binary.asm
    print("COMPILED", kernel.fn.__name__)

pointers = {
    "input_ids_ptr": "*i32", "positions_ptr": "*i64", "is_padding_ptr": "*i1",
    "query_start_loc_ptr": "*i32", "seq_lens_ptr": "*i32", "slots_ptr": "*i64",
    "row_request_ptr": "*i64", "drafting_ptr": "*i1", "drafted_ptr": "*i1",
    "pending_ptr": "*i32", "cycles_ptr": "*i64", "emitted_ptr": "*i64", "proposed_at_ptr": "*i64",
    "accepted_at_ptr": "*i64", "idx_mapping_ptr": "*i64", "num_sampled_ptr": "*i32",
    "num_rejected_ptr": "*i32", "num_computed_ptr": "*i32", "prefill_len_ptr": "*i32",
    "last_sampled_ptr": "*i64", "seeds_ptr": "*i64", "block_table_ptrs": "*u64",
    "block_table_strides": "*i64", "kv_block_sizes_ptr": "*i32", "num_blocks_ptr": "*i32",
}
pointers["depths_ptr"] = "*i32"
for groups, block, nodes in ((1, 8, 0), (3, 3, 20)):
    compile_for_h200(
        draft_inputs._draft_inputs_kernel, pointers, NUM_GROUPS=groups, BLOCK_SIZE=block,
        ROWS=triton.next_power_of_2(block), NODES=nodes, NODES_PADDED=32, PAD_CHUNK=1024,
    )

compile_for_h200(
    draft_context._shorten_kernel,
    {"out_ptr": "*i32", "seq_lens_ptr": "*i32", "table_ptr": "*i32"},
    LAST=65, KV_BLOCK=16, SINK=1, COLUMNS=128,
)

rows = {
    "request_ptr": "*i64", "positions_ptr": "*i64", "drafting_ptr": "*i1",
    "one_hot_ptr": "*i1", "temperature_ptr": "*fp32", "min_p_ptr": "*fp32", "seeds_ptr": "*i64",
    "top_k_ptr": "*i32", "top_p_ptr": "*fp32",
}
others = {
    "logits_ptr": "*bf16", "block_max_ptr": "*fp32", "x_ptr": "*fp32", "cache_ptr": "*fp32",
    "local_token_ptr": "*i32", "out_ptr": "*i64", "idx_mapping_ptr": "*i64",
    "one_hot_out_ptr": "*i1", "temperature_out_ptr": "*fp32", "min_p_out_ptr": "*fp32",
    "seeds_out_ptr": "*i64", "top_k_out_ptr": "*i32", "top_p_out_ptr": "*fp32",
}

def compile_law(kernel, local_max="*fp32", **constants):
    names = {p.name for p in kernel.params}
    types = rows | others | {"local_max_ptr": local_max}
    compile_for_h200(
        kernel,
        {n: t for n, t in types.items() if n in names and n not in constants},
        **{n: v for n, v in (sizes | constants).items() if n in names},
    )

sizes = {"B": 8, "BLOCKS": 128, "WIDTH": 2048, "ROWS": 8}
for kernel in (
    draft_law._gather_kernel, draft_law._block_max_kernel, draft_law._filter_input_kernel,
):
    compile_law(kernel)
compile_law(draft_law._pick_kernel, HAS_CACHE=True)
compile_law(draft_law._pick_kernel, HAS_CACHE=False, cache_ptr=None)
none = {"x_ptr": None, "block_max_ptr": None}
compile_law(draft_law._law_kernel, HAS_CACHE=True, FILTERS=True, USE_FP64=False)
compile_law(draft_law._law_kernel, "*fp64", HAS_CACHE=True, FILTERS=True, USE_FP64=True)
compile_law(draft_law._law_kernel, HAS_CACHE=True, FILTERS=False, USE_FP64=False, **none)
compile_law(
    draft_law._law_kernel, HAS_CACHE=False, FILTERS=False, USE_FP64=False, cache_ptr=None, **none
)
"""


def test_kernels_compile_for_sm_90() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET",)}
    env["UNO_CPU_INTERPRETER"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=env, check=False
    )
    assert done.stdout.count("COMPILED") == 12, done.stdout[-500:] + done.stderr[-3000:]
