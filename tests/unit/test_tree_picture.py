"""`draw_tree`: the demo's picture."""

from vllm_uno.tree.picture import draw_tree


def test_branches_and_path():
    lines = draw_tree(["a", "b", "c", "d", "e"], [-1, 0, 0, 1, 1], {0, 1, 4})
    assert lines == [
        "* a",
        "* ├─ b",
        "  │  ├─ d",
        "* │  └─ e",
        "  └─ c",
    ]


def test_chain():
    assert draw_tree(["a", "b", "c"], [-1, 0, 1], set()) == ["  a", "  └─ b", "     └─ c"]
