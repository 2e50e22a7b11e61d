"""Greedy parity, draft logits, row-0 acceptance and graph coverage on one GPU.

`session.sh` runs the engines, several at a time; each test reads its results.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compare import compare
from gpu.report import late_compiles

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("session")
    subprocess.run([str(Path(__file__).with_name("session.sh")), str(folder)], check=True)
    yield folder


def result(work: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    return loaded


def test_batch_invariant_greedy_is_identical(work: Path) -> None:
    floor = compare(work / "plain-invariant.json", work / "plain2-invariant.json")
    assert floor.equal == floor.requests == 64, "plain itself varies"
    parity = compare(work / "plain-invariant.json", work / "uno-invariant.json")
    assert parity.equal == parity.requests == 64
    assert parity.distinct >= 0.6
    assert result(work, "uno-invariant")["async"]


@pytest.mark.parametrize(
    ("reference", "other"),
    [("plain", "uno"), ("plain", "kv32"), ("plain", "lora"), ("plain-eager", "uno-eager")],
)
def test_default_mode_parts_only_at_near_ties(work: Path, reference: str, other: str) -> None:
    parity = compare(work / f"{reference}.json", work / f"{other}.json")
    assert parity.widest_gap <= 0.05
    assert parity.distinct >= 0.6


@pytest.mark.parametrize("name", ["oracle", "oracle-b4", "oracle-other", "oracle-warm"])
def test_replayed_graphs_draft_what_peft_does(work: Path, name: str) -> None:
    run = result(work, name)
    assert run["oracle_blocks"] >= 9 and run["adapter_moves"] >= 1.0
    assert run["oracle_error"] <= 1e-3 and run["oracle_row0"] <= 1e-3
    assert run["graphs"]["draft FULL"] > 0


def test_row_zero_acceptance_in_bf16(work: Path) -> None:
    for kind, row in result(work, "sampled")["row0"].items():
        assert row[0] >= 0.97, (kind, row)


def test_every_decode_step_of_1_to_64_requests_runs_in_a_graph(work: Path) -> None:
    graphs = result(work, "uno")["graphs"]
    assert set(graphs) <= {"draft FULL", "verify FULL"}, graphs


def test_no_kernel_of_ours_compiles_after_start_up(work: Path) -> None:
    plain = set(late_compiles(work, "plain")) | set(late_compiles(work, "ngram"))
    for name in ("uno", "sampled"):
        assert set(late_compiles(work, name)) <= plain


def test_verification_runs_the_kernels_of_stock_ngram(work: Path) -> None:
    kernels, stock = (result(work, name)["verify_kernels"] for name in ("uno", "ngram"))
    assert len(kernels) > 20
    assert kernels == stock  # no adapter, no copy, no kernel of ours
