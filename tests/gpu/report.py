"""The table of one `session.sh`: parity, draft logits, row-0 acceptance, graph coverage."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from compare import compare, same_seeded


def load(work: Path, name: str) -> dict[str, Any]:
    path = work / f"{name}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return result


def late_compiles(work: Path, name: str) -> list[str]:
    """Triton kernels compiled after start-up, by vLLM's own monitor."""
    log = work / f"{name}.log"
    found = re.findall(r"JIT compilation during inference: (\w+)", log.read_text())
    return sorted(set(found))


def main() -> None:
    work = Path(sys.argv[1])
    for name in sorted(p.stem for p in work.glob("*.log")):
        result = load(work, name)
        log = (work / f"{name}.log").read_text()
        started = re.findall(r"started in ([\d.]+) s", log)
        hidden = ("tokens", "gaps", "seeded", "row0", "verify_kernels", "sleep")
        shown = {k: v for k, v in result.items() if k not in hidden}
        print(f"{name}: start {started} late {late_compiles(work, name)} {json.dumps(shown)}")
        for kind, row in result.get("row0", {}).items():
            print(f"  row 0 {kind}: {row[0]:.4f}  tau {row[-1]:.2f}  {[round(x, 3) for x in row]}")
    for reference, other in (
        ("plain", "plain2"),
        ("plain", "uno"),
        ("plain", "uno-off"),
        ("plain", "uno-coarse"),
        ("plain", "kv32"),
        ("plain", "lora"),
        ("plain", "ngram"),
        ("plain-invariant", "plain2-invariant"),
        ("plain-invariant", "uno-invariant"),
        ("plain-eager", "uno-eager"),
        ("plain", "tree"),
        ("plain", "tree-deep"),
        ("plain", "tree-default"),
        ("plain", "tree-ngram"),
        ("tree-plain-fp32", "tree-fp32"),
        ("tree-plain-fp32", "tree-default-fp32"),
    ):
        paths = (work / f"{reference}.json", work / f"{other}.json")
        if all(p.exists() for p in paths):
            print(f"{reference} against {other}: {compare(*paths)}")
        else:
            print(f"{reference} against {other}: no result")
    seeded = (work / "tree-plain-fp32.json", work / "tree-fp32.json")
    if all(p.exists() for p in seeded):
        print(f"seeded requests equal to plain's, of 64 a set: {same_seeded(*seeded)}")


if __name__ == "__main__":
    main()
