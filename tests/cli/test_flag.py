"""`kvpipe flag` prints the flag in the form that vLLM and its deployments accept."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from kvpipe.cli.main import main

EXTRA: dict[str, Any] = {"tiers": ["/mnt/it's 100% \u00fc/kv: {x} #1"], "chunk_tokens": 512}
WHOLE = {
    "kv_connector": "KVPipeConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": EXTRA,
}


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["flag", *words]) == 0
    return capsys.readouterr().out


def test_flag_survives_a_shell_and_a_yaml_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Quotes, blanks and special characters in values are preserved."""
    shell = _printed(capsys, json.dumps(EXTRA))
    assert shell.count("\n") == 1
    words = subprocess.run(["/bin/sh", "-c", f"printf '%s\\0' {shell}"], capture_output=True, check=True).stdout
    assert words.decode().split("\0")[:-1] == shlex.split(shell)
    name, value = shlex.split(shell)
    assert (name, json.loads(value)) == ("--kv-transfer-config", WHOLE)
    assert yaml.safe_load(_printed(capsys, json.dumps(EXTRA), "--as", "yaml")) == [name, value]
    assert _printed(capsys, json.dumps(EXTRA), "--as", "json") == value + "\n"


def test_flag_without_a_configuration_has_no_extra_config(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a configuration the flag has no extra config. The role can be chosen."""
    assert _printed(capsys, "--role", "kv_producer", "--as", "yaml").splitlines() == [
        "- --kv-transfer-config",
        '- \'{"kv_connector":"KVPipeConnector","kv_role":"kv_producer","kv_load_failure_policy":"recompute"}\'',
    ]


def test_flag_refuses_a_wrong_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvpipe flag` refuses a wrong configuration like `kvpipe check`, and prints no flag."""
    assert main(["flag", '{"chunk_sizee": 256}']) == 2
    printed = capsys.readouterr()
    assert (printed.out, "did you mean 'chunk_tokens'?" in printed.err) == ("", True)
