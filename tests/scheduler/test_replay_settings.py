"""Settings of `make bench-traces`: capacities, bandwidths and compute rates, by their names in the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay import __main__ as command
from benchmarks.replay import announced, hints, page, report
from benchmarks.replay.model import Host, Model, disk, network
from benchmarks.replay.setting import Setting
from benchmarks.replay.workload import Workload, coding_agents


@pytest.fixture(scope="module")
def load() -> Iterator[Workload]:
    """Replace the load by a few sessions, and replay in this process, without pictures."""
    few = coding_agents(4, sessions=3, hours=0.1, chunk_tokens=512)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(report, "load_of", lambda *_: few)
        patches.setattr(report, "measure", lambda todo, _: (one.row() for one in todo))
        patches.setattr(page, "write", lambda *_: None)
        yield few


@pytest.fixture(scope="module")
def usual(load: Workload, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a replay with the defaults."""
    assert load.prompts
    file = tmp_path_factory.mktemp("usual") / "usual.json"
    _rows(file)
    return file


def test_defaults_are_those_of_the_model(load: Workload) -> None:
    """A parameter that is not set has the default of `model.py`. The repository's file was made with these defaults."""
    setting = Setting()
    assert (setting.model, setting.host(load)) == (Model(), Host(load.slots(0.10)))
    assert setting.stores("disk, network", load) == (disk(load.slots(0.25)), network(load.chunks))
    assert setting.stores("", load) == ()
    report.check_file(report.RESULTS, setting)


def test_every_parameter_can_be_set(load: Workload) -> None:
    """Capacities, bandwidths in both directions, latencies, the device and the model can be set."""
    setting = (
        Setting()
        .with_set("model", ["flop_per_s=4e14", "layers=80"])
        .with_set("memory", ["share=0.5", "bytes_per_s=2e10"])
        .with_set("disk", ["share=1", "read_bytes_per_s=1e9", "write_bytes_per_s=5e8", "latency_s=0"])
    )
    assert setting.model == Model(flop_per_s=4e14, layers=80)
    assert setting.host(load) == Host(load.slots(0.5), 2e10)
    (store,) = setting.stores("disk", load)
    assert (store.slots, store.read_bytes_per_s, store.write_bytes_per_s) == (load.chunks, 1e9, 5e8)
    assert (store.latency_s, setting.network) == (0, Setting().network)


@pytest.mark.parametrize(
    ("part", "given", "wording"),
    [
        ("model", "flops=1", "there is no flops; there are parameters, layers"),
        ("model", "flop_per_s", "could not convert"),
        ("disk", "read_bytes_per_s=0", "a number above 0"),
        ("disk", "latency_s=-1", "a number above 0"),
        ("network", "share=2", "1 at most"),
        ("memory", "bytes_per_s=inf", "a number above 0"),
    ],
)
def test_impossible_value_is_refused(part: str, given: str, wording: str) -> None:
    """An impossible value is refused by its parameter's name before the replay begins."""
    with pytest.raises(ValueError, match=wording):
        Setting().with_set(part, [given])


def _rows(file: Path, *more: str) -> dict[str, Any]:
    options = ["--policy", "lru", "--workload", report.AGENTS, "--seeds", "1", "--json", str(file)]
    assert command.main([*options, *more]) == 0
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_replay_follows_its_settings(load: Workload, usual: Path, tmp_path: Path) -> None:
    """A quarter of the compute rate delays the first tokens. The capacities are those that the test has set."""
    fast = json.loads(usual.read_text(encoding="utf-8"))
    slow = _rows(tmp_path / "slow.json", "--share", "0.005", "0.3", "--model", "flop_per_s=4e14", "--disk", "share=0.5")
    assert [row["share"] for row in fast["yardstick"]] == [0.01, 0.02, 0.05, 0.1]
    assert [(row["share"], row["slots"]) for row in slow["yardstick"]] == [
        (share, load.slots(share)) for share in (0.005, 0.3)
    ]
    assert (slow["model"]["flop_per_s"], slow["places"]["disk"]["share"]) == (4e14, 0.5)
    by_tiers = [{(row["policy"], row["behind"]): row["ttft_s"]["0.5"] for row in one["tiers"]} for one in (fast, slow)]
    assert by_tiers[0].keys() == by_tiers[1].keys()
    assert len(by_tiers[0]) == 5
    assert all(by_tiers[1][key] > 2 * by_tiers[0][key] for key in by_tiers[0])
    assert "0.5%" in page.html(slow)
    assert "disk: share" in page.html(slow)


def test_a_file_has_one_set_of_parameters(usual: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of results, in particular the repository's file, accepts no rows of another set of parameters."""
    for file in (usual, report.RESULTS):
        with pytest.raises(SystemExit):
            command.main(["--memory", "share=0.2", "--json", str(file)])
        assert f"{file} is of other parameters: name another file with --json" in capsys.readouterr().err


def test_report_has_rows_for_announced_resumes(usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced resumes have rows beside the rows of the same replay without hints. Prefetched chunks are used.

    Device memory holds all three sessions of the fixture `load`. So this test replays 20 sessions.
    """
    more = coding_agents(5, sessions=20, hours=0.3, chunk_tokens=4096)
    monkeypatch.setattr(announced, "load_of", lambda *_: more)
    file = Path(shutil.copy(usual, tmp_path))
    found = _rows(file, "--announce", hints.RESUME, "--sigma", "0", "--share", "0.2")
    assert found["tiers"]
    rows = {(row["announced"], row["behind"]): row for row in found["prefetch"]}
    assert rows.keys() == {(how, behind) for how in (hints.NONE, hints.RESUME) for behind in announced.BEHIND}
    for behind in announced.BEHIND:
        without, with_ = rows[hints.NONE, behind], rows[hints.RESUME, behind]
        assert (without["prefetched"], without["used"]) == (0, 0)
        assert with_["prefetched"] >= with_["used"] > 0
        assert with_["ttft_s_mean"] < without["ttft_s_mean"]
    lines = list(announced.table(found))
    assert len(lines) == len(announced.BEHIND)
    assert all(len(line) == len(announced.HEADS) for line in lines)
    assert lines[0][:2] == ("20%, disk, lru", "resume, sigma 0")
    assert float(lines[0][4]) < 1
    assert "Resumes that are announced" in page.html(found)
