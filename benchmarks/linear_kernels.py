"""Our kernels alone, against their roofline and against what one would have without them.

    python benchmarks/linear_kernels.py --out linear_kernels.json

The four linear layers of each of 36 layers of the Qwen3-8B shape (random weights, LoRA r128 on all
projections), as one CUDA graph, by number of rows:

    base     cuBLAS alone: what plain vLLM's layers cost
    torch    the same plus the LoRA in plain PyTorch, as the draft view runs without the extension
    side     torch.ops.vllm_uno.uno_linear, as the draft view runs: A and B on a side stream beside
             the base product (their sum is left to what follows, and not in these figures)
    sum      torch.ops.vllm_uno.uno_linear_sum, as the view's q, k and v run: the sum, too
    expand   the base product, then B alone
    punica   base plus vLLM's own LoRA kernels (shrink and expand), one adapter on every row

Every figure is a ratio to `base` in the same run; `roof` is the bytes of weights and adapter at the
copy bandwidth measured here, or the operations at the bf16 matrix rate measured here: the
longer. The three repeats of each are interleaved; the table shows medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_timing import capture, milliseconds

from vllm_uno.adapter import LinearLora
from vllm_uno.lora_kernels import KernelLora, kernel_lora
from vllm_uno.lora_linear import add_lora

LAYERS = 36
RANK = 128
# Input and the widths of the packed output: qkv, o, gate and up, down.
SITES = (
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (4096, (12288, 12288)),
    (12288, (4096,)),
)
BLOCK = 8
KINDS = (
    "base",
    "torch",
    "side",
    "sum",
    "expand",
    "punica",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 8, 9, 16, 24, 32, 40, 64, 128, 256, 512],
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path("linear_kernels.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [[Site(columns, widths) for columns, widths in SITES] for _ in range(args.layers)]
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 products {rate / 1e12:.0f} TFLOP/s")
    weights = sum(s.bytes for layer in layers for s in layer)
    adapter = sum(s.adapter_bytes for layer in layers for s in layer)
    table = []
    print(f"{'rows':>5} {'base ms':>8}" + "".join(f"{k:>9}" for k in args.kinds[1:]) + "     roof")
    for rows in args.rows:
        inputs = {c: torch.randn(rows, c, device="cuda", dtype=torch.bfloat16) for c, _ in SITES}
        graphs = {}
        for kind in args.kinds:
            try:
                graphs[kind] = capture(functools.partial(run, layers, inputs, kind))
            except Exception as error:
                print(f"{kind}: {type(error).__name__}: {error}")
        times: dict[str, list[float]] = {kind: [] for kind in graphs}
        for _ in range(args.repeats):
            for kind, graph in graphs.items():
                times[kind].append(milliseconds(graph))
        median = {kind: statistics.median(found) for kind, found in times.items()}
        roof = 1e3 * max((weights + adapter) / bandwidth, rows * (weights + adapter) / rate)
        table.append({"rows": rows, "ms": times, "median_ms": median, "roof_ms": roof})
        shown = "".join(
            f"{median[k] / median['base']:9.3f}" if k in median else f"{'-':>9}"
            for k in args.kinds[1:]
        )
        print(f"{rows:5} {median['base']:8.3f}{shown} {roof / median['base']:8.3f}", flush=True)
        del graphs
    result = {"layers": args.layers, "bandwidth": bandwidth, "flops": rate, "table": table}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


class Site:
    """One linear layer with its LoRA, in every form that is compared."""

    def __init__(self, columns: int, widths: tuple[int, ...]) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

        self.columns, self.widths = columns, widths
        self.weight = random(sum(widths), columns)
        ends = torch.tensor(widths).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        self.lora = LinearLora(
            random(RANK * len(widths), columns),
            tuple(random(width, RANK) for width in widths),
            tuple(zip(starts, ends, strict=True)),
            tuple((RANK * i, RANK * (i + 1)) for i in range(len(widths))),
            sum(widths),
        )
        kernel = kernel_lora(self.lora)
        assert kernel is not None
        self.kernel: KernelLora = kernel
        # Punica: [adapters, rank, in] and [adapters, out, rank] for each slice.
        self.punica_a = [self.lora.a[RANK * i : RANK * (i + 1)][None] for i in range(len(widths))]
        self.punica_b = [b[None] for b in self.lora.b]

    @property
    def bytes(self) -> int:
        return 2 * self.weight.numel()

    @property
    def adapter_bytes(self) -> int:
        return 2 * (self.lora.a.numel() + sum(b.numel() for b in self.lora.b))


def run(layers: list[list[Site]], inputs: dict[int, torch.Tensor], kind: str) -> None:
    for layer in layers:
        for site in layer:
            x = inputs[site.columns]
            k, lora = site.kernel, site.lora
            if kind in ("side", "sum"):
                rest = (k.a, k.b, k.end0, k.end1, BLOCK)
                name = "uno_linear" if kind == "side" else "uno_linear_sum"
                getattr(torch.ops.vllm_uno, name)(x, site.weight, None, *rest)
                continue
            out = F.linear(x, site.weight)
            if kind == "expand":
                h = x[:, : k.a.shape[0]]  # any numbers do
                torch.ops.vllm_uno.lora_expand_(
                    torch.empty_like(out), h, k.b, k.end0, k.end1, BLOCK
                )
            elif kind == "torch":
                add_lora(out, x, lora.a, list(lora.b), lora.out_slices, lora.rank_slices, BLOCK)
            elif kind == "punica":
                punica(site, x, out)


_PUNICA: dict[int, tuple[torch.Tensor, ...]] = {}


def punica(site: Site, x: torch.Tensor, out: torch.Tensor) -> None:
    """vLLM's own LoRA kernels, every row on adapter 0."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

    rows = x.shape[0]
    if rows not in _PUNICA:
        meta = LoRAKernelMeta.make(1, rows, device=x.device)
        meta.prepare_tensors(torch.zeros(rows, dtype=torch.int32, device=x.device))
        _PUNICA[rows] = meta.meta_args(rows, False)
    meta_args = _PUNICA[rows]
    h = torch.zeros(len(site.widths), rows, RANK, dtype=torch.float32, device=x.device)
    lora_shrink(x, site.punica_a, h, *meta_args, 1.0)
    lora_expand(h, site.punica_b, out, *meta_args, offset_start=0, add_inputs=True)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    graph = capture(work)
    return 2 * 4 * source.numel() / (milliseconds(graph) / 1e3)


def matrix_rate() -> float:
    """bf16 operations a second of a large product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def work() -> None:
        torch.mm(a, a, out=out)

    return 2 * 8192**3 / (milliseconds(capture(work)) / 1e3)


if __name__ == "__main__":
    main()
