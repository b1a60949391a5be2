"""The files in `deploy/` are valid: the programs that read them accept them. Kvpipe accepts their configurations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from kvpipe.config.settings import load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".cache" / "deploy"
"""The folder of the validators, which `tools/setup.sh programs` installs."""
FLAG = {"kv_connector": "KVPipeConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
MANIFESTS = ("engine.yaml", "valkey.yaml")
KUBERNETES = ("1.31", "1.37")
"""The oldest and the newest release whose schemas are used."""


def _table(**fields: Any) -> dict[str, Any]:
    """Return the schema of a table with exactly these fields. The schema of a field may be only its type."""
    parts = {name: {"type": one} if isinstance(one, str) else one for name, one in fields.items()}
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


_STRINGS = {"type": "array", "items": {"type": "string"}}
_MODEL = _table(
    name="string", repository="string", tag="string", modelURL="string", replicaCount="integer", requestCPU="integer",
    requestMemory="string", requestGPU="integer", env="array", extraVolumes="array", extraVolumeMounts="array",
    vllmConfig=_table(v0="string", enablePrefixCaching="boolean", extraArgs=_STRINGS),
)  # fmt: skip
CHART = _table(servingEngineSpec=_table(runtimeClassName="string", modelSpec={"type": "array", "items": _MODEL}))
"""The fields of vLLM's production stack, chart 0.1.12, that the values use.

With this schema the check needs no Helm.
"""


def _run(*command: str | Path, cwd: Path = DEPLOY, **variables: str) -> str:
    """Run a program, check that it succeeds, and return its output."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TOOLS), "HOME": str(cwd)} | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")))


def _validate(release: str, *files: Path) -> None:
    """Validate manifests with the schemas of a release of Kubernetes.

    A key that the release does not know is refused.
    """
    _run(sys.executable, "-m", "kubernetes_validate", "--strict", "-k", release, *files)


@pytest.fixture
def composed(tmp_path: Path) -> dict[str, Any]:
    """The whole Compose file, as Docker Compose reads it."""
    shutil.copy(DEPLOY / "compose.yaml", tmp_path)
    made = _run(TOOLS / "bin" / "docker-compose", "config", "--format", "json", cwd=tmp_path, MODEL="some/model")
    return dict(json.loads(made))


@pytest.mark.parametrize("release", KUBERNETES)
def test_manifests_are_valid(release: str) -> None:
    """Every field of a manifest is in the schema of the manifest's kind."""
    _validate(release, *(DEPLOY / "kubernetes" / name for name in MANIFESTS))


def test_a_wrong_manifest_is_refused(tmp_path: Path) -> None:
    """If the validator accepted every field, `test_manifests_are_valid` would prove nothing."""
    engine = next(one for one in _documents("engine.yaml") if one["kind"] == "Deployment")
    engine["spec"]["replica"] = 2
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(engine), encoding="utf-8")
    with pytest.raises(AssertionError, match="replica"):
        _validate(KUBERNETES[-1], tmp_path / "wrong.yaml")


def test_the_patched_deployment_is_valid(tmp_path: Path) -> None:
    """`kubectl patch` adds the containers and volumes of a strategic merge patch to those of the deployment."""
    engine = next(one for one in _documents("engine.yaml") if one["kind"] == "Deployment")
    (patch,) = _documents("management-tls.yaml")
    pod, added = engine["spec"]["template"]["spec"], patch["spec"]["template"]["spec"]
    assert set(added) == {"containers", "volumes"}
    for key, parts in added.items():
        pod[key] += parts
        names = [one["name"] for one in pod[key]]
        assert len(names) == len(set(names))
    (tmp_path / "patched.yaml").write_text(yaml.safe_dump(engine), encoding="utf-8")
    _validate(KUBERNETES[-1], tmp_path / "patched.yaml")


def test_compose_file_is_valid(composed: dict[str, Any]) -> None:
    """Docker Compose accepts the file. The engine and the server share a network that no other program reaches."""
    engine, valkey = composed["services"]["engine"], composed["services"]["valkey"]
    assert set(engine["networks"]) & set(valkey["networks"]) == {"cache"}
    assert composed["networks"]["cache"]["internal"]


def test_dockerfile_is_valid() -> None:
    """Hadolint reports no fault."""
    assert _run(TOOLS / "bin" / "hadolint", "Dockerfile") == ""


def test_dockerfile_copies_what_the_wheel_needs(tmp_path: Path) -> None:
    """A wheel that is built from the copied files has the folders behind the links."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = [words for line in re.findall(r"^COPY (?!--)(.+)$", text, re.MULTILINE) if (words := line.split())]
    for *sources, target in copied:
        for source in sources:
            made = tmp_path / target.lstrip("/")
            made = made / Path(source).name if target.endswith("/") else made
            made.parent.mkdir(parents=True, exist_ok=True)
            is_folder = (ROOT / source).is_dir()
            _ = shutil.copytree(ROOT / source, made, symlinks=True) if is_folder else shutil.copy(ROOT / source, made)
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tmp_path / "source")
    (wheel,) = tmp_path.glob("*.whl")
    assert {"kvpipe/statemachine/core.py", "kvpipe/connectors/vllm/plugin.py"} <= set(ZipFile(wheel).namelist())


def test_service_is_valid(tmp_path: Path) -> None:
    """`systemd-analyze verify` accepts the unit, after its programs are replaced by a program that this machine has."""
    unit = (DEPLOY / "kvpipe-vllm.service").read_text(encoding="utf-8")
    assert unit.count("/opt/vllm/bin/") == 2
    file = tmp_path / "kvpipe-vllm.service"
    file.write_text(re.sub(r"/opt/vllm/bin/\w+", "/bin/true", unit), encoding="utf-8")
    assert _run("systemd-analyze", "verify", "--man=no", file, cwd=tmp_path) == ""


def _helm() -> dict[str, Any]:
    values = yaml.safe_load((DEPLOY / "helm-values.yaml").read_text(encoding="utf-8"))
    (model,) = values["servingEngineSpec"]["modelSpec"]
    return dict(model)


def test_helm_values_have_the_fields_of_the_chart(tmp_path: Path) -> None:
    """Fields and types are those of `CHART`. The model's volumes and variables have Kubernetes' own schemas."""
    values = yaml.safe_load((DEPLOY / "helm-values.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(values, CHART)
    model = _helm()
    container = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "env": model["env"],
        "volumeMounts": model["extraVolumeMounts"],
    }
    pod = {"containers": [container], "volumes": model["extraVolumes"]}
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}))
    _validate(KUBERNETES[-1], file)


class _Started(NamedTuple):
    """An engine that a file starts: its arguments, and the seconds after which it is killed.

    `0` means that the file sets no limit.
    """

    words: list[str]
    grace_s: int

    @property
    def ends_s(self) -> int:
        """The seconds that the engine may take to end."""
        return int(self.words[self.words.index("--shutdown-timeout") + 1])


def _engines(composed: dict[str, Any]) -> Iterator[_Started]:
    """Yield the engine of each file, in this order: Compose, Helm, systemd, Kubernetes."""
    engine = composed["services"]["engine"]
    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", engine["stop_grace_period"]).groups("0")  # type: ignore[union-attr]
    yield _Started(engine["command"], 60 * int(minutes) + int(seconds))
    yield _Started(_helm()["vllmConfig"]["extraArgs"], 0)
    unit = (DEPLOY / "kvpipe-vllm.service").read_text(encoding="utf-8").replace("\\\n", "")
    started, grace = (re.search(rf"^{key}=(.+)$", unit, re.MULTILINE) for key in ("ExecStart", "TimeoutStopSec"))
    assert started
    assert grace
    yield _Started([word.strip("'") for word in started[1].split()], int(grace[1]))
    deployed = next(one for one in _documents("engine.yaml") if one["kind"] == "Deployment")
    pod = deployed["spec"]["template"]["spec"]
    yield _Started(pod["containers"][0]["args"], pod["terminationGracePeriodSeconds"])


def test_engines_are_started_as_the_readme_starts_them(composed: dict[str, Any]) -> None:
    """Each file starts its engine with the README's flag."""
    for words, _ in _engines(composed):
        assert json.loads(words[words.index("--kv-transfer-config") + 1]) == FLAG
        assert "--enable-prompt-tokens-details" in words


def _configurations(composed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the keys of kvpipe that each file sets, in the order of `_engines`."""
    unit = (DEPLOY / "kvpipe-vllm.service").read_text(encoding="utf-8")
    variables: list[dict[str, str]] = [
        composed["services"]["engine"]["environment"],
        {one["name"]: one.get("value", "") for one in _helm()["env"]},
        dict(re.findall(r"^Environment=(\w+)=(.+)$", unit, re.MULTILINE)),
    ]
    for given in variables:
        keys = {key.removeprefix("KVPIPE_").lower(): value for key, value in given.items() if "KVPIPE_" in key}
        assert len(keys) > 2
        yield keys
    config = next(one for one in _documents("engine.yaml") if one["kind"] == "ConfigMap")
    yield yaml.safe_load(config["data"]["config.yaml"])


def test_kvpipe_accepts_the_configurations(composed: dict[str, Any]) -> None:
    """All keys are known and all values are valid.

    Engines serve operators, and have enough time to end and store before they are killed.
    """
    for keys, engine in zip(_configurations(composed), _engines(composed), strict=True):
        settings = load_settings(keys)
        assert settings.manage
        assert settings.tiers
        assert settings.store_idle_s_max < engine.ends_s
        assert engine.ends_s < engine.grace_s or not engine.grace_s
