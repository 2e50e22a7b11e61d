"""Sampled law on the GPU: every setting at full size, and every sabotage must be seen."""

import pytest
from law_run import ALPHA, SETTINGS, STAND_IN_NAME, Report, campaign, faults
from sabotage import SABOTAGES

TOKENS = 250_000


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    done, failed = campaign(tmp_path_factory.mktemp("law"), tokens=TOKENS)
    assert not failed, "\n\n".join(failed)
    return done


@pytest.mark.gpu
def test_every_setting_was_run(reports: list[Report]) -> None:
    kinds = {(r.kind, r.setting) for r in reports}
    assert {("uno", name) for name in SETTINGS} <= kinds
    assert {name for kind, name in kinds if kind == "plain"} == {
        s.name for s in SETTINGS.values() if s.draft == "probabilistic"
    }
    assert {kind for kind, _ in kinds} == {"uno", "plain", STAND_IN_NAME, *SABOTAGES}
    assert all(r.tokens >= TOKENS for r in reports)


@pytest.mark.gpu
def test_law(reports: list[Report]) -> None:
    """UNO, and plain vLLM beside it, sample the processed law; acceptance is as it must be."""
    assert faults([r for r in reports if r.kind not in SABOTAGES]) == []
    # The statistic is no tamer on one than on the other: the floor.
    floor = [r.p_value for r in reports if r.kind == "plain"]
    assert min(floor) > ALPHA / len(floor)


@pytest.mark.gpu
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_sabotage_is_seen(reports: list[Report], sabotage: str) -> None:
    (report,) = [r for r in reports if r.kind == sabotage]
    assert faults([report]) == []
