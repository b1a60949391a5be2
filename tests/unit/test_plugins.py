"""Tests of packages that add tiers, policies and transfer engines.

Such packages are found, or refused by name, and do not affect engines that do not use them. Every package in these
tests is real metadata and a real module in its own folder on `sys.path`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import Lru, make_policy
from kvpipe.config.settings import load_settings
from kvpipe.errors import ConfigError, UnsupportedError
from kvpipe.inputs import plugins
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.registry import make_tier, parse_tier
from kvpipe.trace.log import Counters
from kvpipe.transfer.guard import GuardedEngine
from kvpipe.worker.engines import EngineOptions, make_engine

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
    """Return a function that installs a package with the given source of its module and the given entry points."""

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
    """Return the single line with which the configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        load_settings(given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_installed_tier_is_used_like_a_built_in_tier(add: Add) -> None:
    """A package's tier is configured by a table or by a URL.

    Its keys are checked, and a misspelt key gets a suggestion.
    """
    add("sheds", TIER, tiers="shed = sheds:ShedSpec", tier_urls="shed = sheds:ShedSpec")
    spec = parse_tier("shed://green?lanes=2")
    assert spec.model_dump()["colour"] == "green"
    assert spec == parse_tier({"kind": "shed", "colour": "green", "lanes": 2})
    assert make_tier("shed", spec).name == "shed"
    assert "tier 1 (shed): unknown key 'color'; did you mean 'colour'?" in refusal({"tiers": "shed://x?color=1"})
    assert "lanes='many' is not valid (Input should be a valid integer" in refusal({"tiers": "shed://x?lanes=many"})
    assert "did you mean 'shed'?" in refusal({"tiers": [{"kind": "shet"}]})
    assert "did you mean 'shed://'?" in refusal({"tiers": "shet://x"})
    assert "tier 2 (shed) is the same store as tier 1" in refusal({"tiers": "shed://x shed://x"})


def test_only_requested_plug_ins_are_imported(add: Add) -> None:
    """A package ends the process when it is imported. Engines that do not use it are not affected."""
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
        (TIER + '\n        place = ("path")', "names 'p' in `place`, which is not one of its keys; update the package"),
    ],
)
def test_a_broken_tier_is_refused_by_name(add: Add, source: str, why: str) -> None:
    """The message has the kind of the tier, the package, its version, the fault and the remedy."""
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
    """The message names the package, but shows no values, because the package's error may contain a secret."""
    add("sheds", f"{TIER}\n        {BUGS[bug]}\n", tiers="shed = sheds:ShedSpec", tier_urls="shed = sheds:ShedSpec")
    message = refusal({"tiers": "shed://secret"})
    assert message.startswith(
        "kvpipe: the kind of tier 'shed' of package sheds 1.2 cannot parse its own configuration: "
    )
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
    """The tier is refused at start-up, before its first call."""
    half = "\n    class Half(DictTier):\n        delete = None\n"
    add("sheds", TIER.replace("DictTier(name)", made) + half, tiers="shed = sheds:ShedSpec")
    with pytest.raises(ConfigError) as caught:
        make_tier("shed", parse_tier({"kind": "shed"}))
    assert str(caught.value).startswith("kvpipe: the kind of tier 'shed' of package sheds 1.2 ")
    assert why in str(caught.value)


def test_two_packages_with_one_name_are_refused(add: Add) -> None:
    """If two packages register one name, neither is used, and the message names both. One of the two may be kvpipe."""
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
    """A fake chunk."""

    identity = b""
    before = b""
    place = 0


def test_installed_policy_is_used_like_a_built_in_policy(add: Add) -> None:
    """A package's policy chooses the victims. A misspelt name is refused, and the message has all known names."""
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
    """A policy that is a class is refused when the configuration is read.

    A policy that a function makes is refused when the function is called.
    """
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
def test_policy_that_names_wrong_victims_is_replaced_by_lru(add: Add, method: str, body: str) -> None:
    """The policy names wrong victims, but only evictable chunks are evicted, each chunk once.

    After the first wrong victim, LRU chooses the victims.
    """
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


def test_policy_is_notified_of_dropped_chunks(add: Add) -> None:
    """The policy's `dropped` is called, as for a built-in policy. If `dropped` raises, this is a `policy_failed`."""
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
    """The device's package makes the engine from the options.

    An engine without a method, and a device without an engine, are refused.
    """
    add("engines", ENGINE, transfer_engines="npu = engines:make\nxpu = engines:half")
    options = EngineOptions(load_settings({"copy_threads": 1}))
    made = make_engine("npu", options)
    made.shutdown()
    assert isinstance(made, GuardedEngine)
    with pytest.raises(ConfigError, match=r"the transfer engine 'xpu' of package engines 1.2 has no attach\(\), claim"):
        make_engine("xpu", options)
    with pytest.raises(UnsupportedError, match="device 'tpu'"):
        make_engine("tpu", options)


def test_package_without_a_name_fails_only_its_users(add: Add, tmp_path: Path) -> None:
    """After an interrupted installation, entry points have no package name.

    Only engines that use such entry points fail.
    """
    add("rests", "", policies="rest = rests:anything")
    (tmp_path / "rests" / "rests-1.2.dist-info" / "METADATA").unlink()
    assert load_settings({"policy": "lru"}).policy == "lru"
    assert "the eviction policy 'rest' of package without a name cannot be imported" in refusal({"policy": "rest"})


def test_built_in_plug_ins_are_found_without_installation() -> None:
    """Entry points of kvpipe are found in a source tree that is not installed.

    The metadata of this tree may be old or missing.
    """
    code = "from kvpipe.inputs import plugins; print(plugins.own('kvpipe.tiers'), plugins.own('kvpipe.policies'))"
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


def test_every_built_in_plug_in_can_be_loaded() -> None:
    """Every entry point of kvpipe names an object that exists."""
    for group in (plugins.TIERS, plugins.TIER_URLS, plugins.POLICIES, plugins.TRANSFER_ENGINES):
        assert plugins.own(group)
        assert all(plugins.load(group, name).made_of for name in plugins.own(group))
    assert isinstance(make_policy("lru", 4), Lru)
