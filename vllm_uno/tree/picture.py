"""A tree as text: one node a line, the accepted path marked."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def draw_tree(
    labels: Sequence[str], parents: Sequence[int], accepted: Collection[int]
) -> list[str]:
    """Lines of a tree, children below their parents in node order, the nodes of `accepted` with *.

    Args:
        labels: what to print for each node.
        parents: of each node; -1 for the root, below the node's own index for the others.
        accepted: nodes.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)

    lines = []

    def add(node: int, first: str, rest: str) -> None:
        lines.append(f"{'*' if node in accepted else ' '} {first}{labels[node]}")
        for child in children[node]:
            last = child == children[node][-1]
            add(child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))

    add(0, "", "")
    return lines
