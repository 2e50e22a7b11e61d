"""What stands in the place of vLLM's rejection sampler has what vLLM reads of one."""

import ast
from pathlib import Path

import vllm

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.tree.verification import TreeSampler  # noqa: E402


def read_of(name: str, folder: Path) -> dict[str, str]:
    """Attributes read of variables and attributes of this name: attribute -> a file."""
    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                called = owner.attr if isinstance(owner, ast.Attribute) else None
                called = owner.id if isinstance(owner, ast.Name) else called
                if called == name:
                    found[node.attr] = file.name
    return found


def test_attributes_that_vllm_reads() -> None:
    # The V2 runner and what it uses; gpu_worker.py calls it by functions in there.
    reads = read_of("rejection_sampler", Path(vllm.__file__).parent / "v1/worker/gpu")
    assert "enable_adaptive_verification" in reads  # or the search finds nothing
    missing = {name: file for name, file in reads.items() if not hasattr(TreeSampler, name)}
    assert not missing
