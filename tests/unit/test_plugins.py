"""Packages that add tiers, policies and transfer engines: found by name, refused by name, never in each other's way.

Every package here is real metadata and a real module in a folder of its own on `sys.path`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from kvpipe import plugins
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import Lru, make_policy
from kvpipe.config import load_settings
from kvpipe.errors import ConfigError, UnsupportedError
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.registry import make_tier, parse_tier
from kvpipe.trace.log import Counters
from kvpipe.transfer.engines import EngineOptions, make_engine
from kvpipe.transfer.guard import GuardedEngine

Add = Callable[..., None]

TIER = """
    from typing import Literal
    from kvpipe.testing.dict_tier import DictTier
    from kvpipe.tiers.spec import TierSpec
    from pydantic import Field

    class ShedSpec(TierSpec):
        kind: Literal["shed"] = "shed"
        colour: str = Field("red", description="Of the shed.")

        @classmethod
        def from_url(cls, url):
            return {"colour": url.netloc}

        def make(self, name, *, writes=True):
            return DictTier(name)
"""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Return what installs a package: its module's source, and a line "NAME = OBJECT" per entry point, by group."""

    def install(package: str, source: str, **groups: str) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}.py").write_text(dedent(source), encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n", encoding="utf-8")
        text = "".join(f"[kvpipe.{group}]\n{line}\n" for group, line in groups.items())
        (info / "entry_points.txt").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        plugins._registered.cache_clear()

    yield install
    plugins._registered.cache_clear()
    for path in tmp_path.iterdir():
        sys.modules.pop(path.name, None)


def refusal(given: dict[str, object]) -> str:
    """Return why the configuration is refused: one line."""
    with pytest.raises(ConfigError) as caught:
        load_settings(given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tier_is_used_like_one_of_ours(add: Add) -> None:
    """By table and by URL; its keys are checked, and a misspelt one, or kind, gets its suggestion."""
    add("sheds", TIER, tiers="shed = sheds:ShedSpec", tier_urls="shed = sheds:ShedSpec")
    spec = parse_tier("shed://green?lanes=2")
    assert spec.model_dump()["colour"] == "green"
    assert spec == parse_tier({"kind": "shed", "colour": "green", "lanes": 2})
    assert make_tier("shed", spec).name == "shed"
    assert "tier 1 (shed): unknown key 'color'; did you mean 'colour'?" in refusal({"tiers": "shed://x?color=1"})
    assert "lanes='many' is not valid (Input should be a valid integer" in refusal({"tiers": "shed://x?lanes=many"})
    assert "did you mean 'shed'?" in refusal({"tiers": [{"kind": "shet"}]})
    assert "did you mean 'shed://'?" in refusal({"tiers": "shet://x"})
    assert "tier 2 (shed) is the same place as tier 1" in refusal({"tiers": "shed://x shed://x"})


def test_only_what_is_asked_for_is_imported(add: Add) -> None:
    """A package that ends the process when it is imported stops nobody who does not use it."""
    line = "{0} = bombs:anything".format
    add("bombs", "raise SystemExit('boom')", tiers=line("bomb"), policies=line("bomb"), transfer_engines=line("bomb"))
    assert load_settings({"tiers": "redis://h", "policy": "s3fifo"}).policy == "s3fifo"
    assert make_policy("lru", 4).victim() is None
    make_engine("cpu", EngineOptions(load_settings())).shutdown()
    assert "did you mean 'redis'?" in refusal({"tiers": [{"kind": "reddis"}]})
    assert "bombs" not in sys.modules


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise SystemExit('boom')", "cannot be imported (SystemExit: boom); update the package, or uninstall it"),
        ("import no_such_module", "cannot be imported (ModuleNotFoundError: No module named 'no_such_module')"),
        ("x = 1", "cannot be imported (AttributeError: "),
        ("def ShedSpec(): ...", "is no subclass of kvpipe.tiers.spec.TierSpec"),
        ("class ShedSpec: ...", "is no subclass of kvpipe.tiers.spec.TierSpec"),
        (TIER.replace("def make", "def maker"), "has no make(); kvpipe.tiers.spec.TierSpec lists what is needed"),
        (TIER.replace('"shed"', '"hut"'), "declares the kind 'hut'; register it under that name"),
        (TIER + '\n        place = ("path")', "has no key 'p', which its place names; update the package"),
    ],
)
def test_a_broken_tier_is_refused_by_name(add: Add, source: str, why: str) -> None:
    """Who uses it reads the kind, the package, its version, what is wrong and what to do."""
    add("sheds", source, tiers="shed = sheds:ShedSpec")
    message = refusal({"tiers": [{"kind": "shed"}]})
    assert message.startswith("kvpipe: the kind of tier 'shed' of package sheds 1.2 ")
    assert why in message


BUGS = {
    "from_url raises": "@classmethod\n        def from_url(cls, url): return {}[url.netloc]",
    "from_url returns nothing": "@classmethod\n        def from_url(cls, url): ...",
    "a validator raises": "def model_post_init(self, context): raise RuntimeError(self.colour)",
    "a key has another name": 'hue: int = Field(alias="tint")',
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_tier_that_fails_over_its_configuration_is_refused(add: Add, bug: str) -> None:
    """By name; what was set is not shown, for the package's error may hold a secret."""
    add("sheds", f"{TIER}\n        {BUGS[bug]}\n", tiers="shed = sheds:ShedSpec", tier_urls="shed = sheds:ShedSpec")
    message = refusal({"tiers": "shed://secret"})
    assert message.startswith("kvpipe: the kind of tier 'shed' of package sheds 1.2 cannot read what is set for it: ")
    assert "secret" not in message


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            "object()",
            "has no open(), exists(), read(), write(), delete(), capacity(), health(), scan(), close(), name",
        ),
        ("Half(name)", "has no delete(); kvpipe.tiers.base.Tier lists what is needed"),
        ("1 / 0", "cannot be made (ZeroDivisionError: division by zero)"),
        ("exit('boom')", "cannot be made (SystemExit: boom)"),
    ],
)
def test_a_tier_that_lacks_a_method_is_refused(add: Add, made: str, why: str) -> None:
    """At start-up, before anything is asked of it."""
    half = "\n    class Half(DictTier):\n        delete = None\n"
    add("sheds", TIER.replace("DictTier(name)", made) + half, tiers="shed = sheds:ShedSpec")
    with pytest.raises(ConfigError) as caught:
        make_tier("shed", parse_tier({"kind": "shed"}))
    assert str(caught.value).startswith("kvpipe: the kind of tier 'shed' of package sheds 1.2 ")
    assert why in str(caught.value)


def test_two_packages_with_one_name_are_refused(add: Add) -> None:
    """Neither is taken, and both are named; also where one of them is kvpipe."""
    add("sheds", TIER, tiers="shed = sheds:ShedSpec")
    add("huts", TIER, tiers="shed = huts:ShedSpec", policies="sessions = huts:x")
    assert "several packages register the kind of tier 'shed' (huts 1.2, sheds 1.2)" in refusal(
        {"tiers": [{"kind": "shed"}]}
    )
    assert "several packages register the eviction policy 'sessions' (huts 1.2, kvpipe" in refusal({})


POLICY = """
    from kvpipe.cache.policy import Lru

    class Newest(Lru):
        def victim(self):
            return self._order.popitem()[0] if self._order else None

    class Half:
        def insert(self, chunk, *, hit): ...

    def half(slots):
        return Half()
"""


class Item:
    """A chunk."""

    identity = b""
    before = b""
    place = 0


def test_a_policy_is_used_like_one_of_ours(add: Add) -> None:
    """What it names is evicted; a misspelt name is refused with all that there are."""
    add("policies", POLICY, policies="newest = policies:Newest")
    assert load_settings({"policy": "newest"}).policy == "newest"
    policy, items = make_policy("newest", 4), [Item() for _ in range(4)]
    for item in items:
        policy.insert(item, hit=False)
    policy.remove(items[3])
    assert [policy.victim() for _ in range(4)] == [items[2], items[1], items[0], None]
    assert "policy='newst' is not valid (Input should be 'lru', 's3fifo', 'sessions' or 'newest')" in refusal(
        {"policy": "newst"}
    )


def test_a_policy_that_lacks_a_method_is_refused(add: Add) -> None:
    """A class when the configuration is read, what a function makes when it is made."""
    lacks = "has no remove(), refresh(), victim(), __len__(); kvpipe.cache.policy.base.Policy lists what is needed"
    add("policies", POLICY, policies="half = policies:Half\nmade = policies:half")
    message = refusal({"policy": "half"})
    assert message == f"kvpipe: the eviction policy 'half' of package policies 1.2 {lacks}"
    with pytest.raises(ConfigError) as caught:
        make_policy(load_settings({"policy": "made"}).policy, 4)
    assert str(caught.value) == f"kvpipe: the eviction policy 'made' of package policies 1.2 {lacks}"


LYING = """
    from kvpipe.cache.policy import Lru

    class Lying(Lru):
        def {method}(self, *chunk, **hit):
            {body}
"""


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("insert", "raise KeyError(chunk)"),
        ("remove", "raise KeyError(chunk)"),
        ("refresh", "raise KeyError(chunk)"),
        ("victim", "raise KeyError(chunk)"),
        ("victim", "return None"),
        ("victim", "raise SystemExit"),
        ("victim", "return object()"),
        ("victim", "return [*self._order]"),
        ("victim", "return self.held"),
        ("remove", "self.held = chunk[0]\n\n        def victim(self):\n            return self.held"),
    ],
)
def test_a_policy_that_lies_is_left_alone(add: Add, method: str, body: str) -> None:
    """Only chunks that may go are evicted, each once, whatever the policy names; from then on by their last use."""
    add("policies", LYING.format(method=method, body=body), policies="lying = policies:Lying")
    faults: list[str] = []
    policy = make_policy("lying", 8, lambda event, **_: faults.append(event))
    items = [Item() for _ in range(6)]
    for item in items:
        policy.insert(item, hit=False)
    policy.remove(items[1])
    policy.refresh(items[0])
    assert len(policy) == 5
    assert [policy.victim() for _ in range(6)] == [*items[2:], items[0], None]
    assert faults == ["policy_failed"]


def test_a_policy_that_remembers_is_notified_of_what_is_gone(add: Add) -> None:
    """As one of ours is. What it raises then is as any."""
    body = "super().remove(chunk[0])\n\n        def dropped(self, chunk):\n            raise KeyError(chunk)"
    add("policies", LYING.format(method="remove", body=body), policies="lying = policies:Lying")
    faults: list[str] = []
    catalog = Catalog(4, 1, make_policy("lying", 4, lambda event, **_: faults.append(event)), Counters())
    chunk = catalog.reserve(0)
    assert chunk is not None
    catalog.landed(catalog.write(chunk, 16, b"key", keep=False))
    assert faults == []
    catalog.reset()
    assert faults == ["policy_failed"]


ENGINE = """
    from kvpipe.transfer.cpu import CpuEngine

    def make(options):
        return CpuEngine(options.settings.copy_threads or 0)

    def half(options):
        return object()
"""


def test_a_transfer_engine_is_found_by_its_device(add: Add) -> None:
    """It is made of the options; one that lacks a method, and a device that has none, are refused."""
    add("engines", ENGINE, transfer_engines="npu = engines:make\nxpu = engines:half")
    options = EngineOptions(load_settings({"copy_threads": 1}))
    made = make_engine("npu", options)
    made.shutdown()
    assert isinstance(made, GuardedEngine)
    with pytest.raises(ConfigError, match=r"the transfer engine 'xpu' of package engines 1.2 has no attach\(\), claim"):
        make_engine("xpu", options)
    with pytest.raises(UnsupportedError, match="device 'tpu'"):
        make_engine("tpu", options)


def test_a_package_without_a_name_stops_nobody(add: Add, tmp_path: Path) -> None:
    """What an installation that was broken off has left: entry points, and nothing that shows whose they are."""
    add("rests", "", policies="rest = rests:anything")
    (tmp_path / "rests" / "rests-1.2.dist-info" / "METADATA").unlink()
    assert load_settings({"policy": "lru"}).policy == "lru"
    assert "the eviction policy 'rest' of package without a name cannot be imported" in refusal({"policy": "rest"})


def test_ours_are_found_without_being_installed() -> None:
    """A tree of sources that nobody has installed has all that kvpipe brings: its own metadata may be old, or none."""
    code = "from kvpipe import plugins; print(plugins.own('kvpipe.tiers'), plugins.own('kvpipe.policies'))"
    root = Path(plugins.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert done.stdout == "['disk', 'redis', 's3', 'mooncake'] ['lru', 's3fifo', 'sessions']\n"


def test_all_of_ours_can_be_loaded() -> None:
    """Every entry point of kvpipe's own names something that is there."""
    for group in (plugins.TIERS, plugins.TIER_URLS, plugins.POLICIES, plugins.TRANSFER_ENGINES):
        assert plugins.own(group)
        assert all(plugins.load(group, name).made_of for name in plugins.own(group))
    assert isinstance(make_policy("lru", 4), Lru)
