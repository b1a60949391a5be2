"""Every variable and every configuration field of vLLM is reviewed: part of the key, or irrelevant for a reason."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm

from kvpipe.connectors.vllm.identity import reviewed_fields as fields
from kvpipe.connectors.vllm.identity import reviewed_variables as variables
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, other_releases

INSTALLED = Path(vllm.__file__).parent


def variables_of(package: Path) -> set[str]:
    """Return the names of vLLM's environment variables."""
    for node in ast.parse((package / "envs.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    pytest.fail("vllm/envs.py has no environment_variables")


def fields_of(package: Path) -> set[str]:
    """Return CLASS.FIELD of every class of vLLM's configuration."""
    return {
        f"{cls.name}.{name}"
        for path in (package / "config").rglob("*.py")
        for cls in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(cls, ast.ClassDef)
        for name in _fields(cls)
    }


def _fields(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if ast.unparse(node.annotation).partition("[")[0] not in {"ClassVar", "InitVar"}:
            yield node.target.id


def not_reviewed(package: Path) -> set[str]:
    """Return the names that are in neither list."""
    whole = set().union(*fields.IRRELEVANT.values())
    listed = {*whole, *fields.PART, *fields.OF_RANKS}
    named = set(itertools.chain.from_iterable(names.split() for names in variables.IRRELEVANT.values()))
    unknown = {name for name in fields_of(package) if not {name, name.partition(".")[0]} & listed}
    return unknown | (variables_of(package) - named - variables.PART - variables.OF_RANKS)


def test_all_settings_of_the_installed_release_are_reviewed() -> None:
    """A name of vLLM that is in no list makes this test fail. At run time such a name is part of the key."""
    assert not_reviewed(INSTALLED) == set()


@pytest.mark.timeout(FETCH_SECONDS_MAX)
def test_all_settings_of_other_supported_releases_are_reviewed() -> None:
    """This test checks the sources of each recorded release that is not installed."""
    for version, sources in other_releases():
        assert not_reviewed(sources / "vllm") == set(), version


@pytest.mark.timeout(FETCH_SECONDS_MAX)
def test_every_reviewed_name_exists_and_is_in_one_list() -> None:
    """A listed name that no supported release has is a mistake. So is a name in two lists."""
    packages = [INSTALLED, *(sources / "vllm" for _, sources in other_releases())]
    there = set[str]().union(*map(variables_of, packages), *map(fields_of, packages))
    classes = {name.partition(".")[0] for name in there if "." in name}
    lists = [
        *(set(names.split()) for names in variables.IRRELEVANT.values()), set(variables.PART), set(variables.OF_RANKS),
        *map(set, fields.IRRELEVANT.values()), set(fields.PART), set(fields.OF_RANKS),
    ]  # fmt: skip
    listed = list(itertools.chain.from_iterable(lists))
    assert sorted({name for name in listed if listed.count(name) > 1}) == []
    assert {*listed} - there - classes == set()


def test_a_new_setting_is_not_reviewed(tmp_path: Path) -> None:
    """A new variable and a new field of vLLM are reported."""
    (tmp_path / "config").mkdir()
    (tmp_path / "envs.py").write_text("environment_variables: dict = {'VLLM_NEW': 1, 'VLLM_PORT': 2}\n")
    (tmp_path / "config" / "a.py").write_text("class CacheConfig:\n    new: int = 1\n    block_size: int = 2\n")
    assert not_reviewed(tmp_path) == {"VLLM_NEW", "CacheConfig.new"}
