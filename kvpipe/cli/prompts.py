"""A prompt on the command line: token ids, or a text or chat that vLLM's server turns into token ids."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from kvpipe.errors import UsageError
from kvpipe.inputs import config_errors, files
from kvpipe.manage.client import ANSWER_BYTES_MAX, ANSWER_S_MAX

PROMPT_BYTES_MAX: Final = 16 << 20
SERVER: Final = "http://127.0.0.1:8000"
"""The default address of vLLM's server."""
API_KEY: Final = "VLLM_API_KEY"
"""The environment variable with the API key of vLLM's server. The server reads the same variable."""
_IDS: Final = re.compile(r"[\s,\[\]]*[0-9][0-9\s,\[\]]*")
_ID_DIGITS_MAX: Final = 10
_CHAT_KEYS: Final = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
"""The keys of a chat request that affect its token ids."""
_TEXT_KEYS: Final = ("prompt", "add_special_tokens")


def add_prompt(one: argparse.ArgumentParser) -> None:
    """Add the arguments that `prompt_of` reads."""
    one.add_argument(
        "prompt",
        help="token ids, separated by commas or blanks; or a text; or chat messages or a request's whole body, "
        "as JSON; @FILE: a file with one of these; -: standard input",
    )
    one.add_argument(
        "--as-text", action="store_true", help="treat the prompt as a text, even if it looks like token ids or JSON"
    )
    one.add_argument(
        "--server", metavar="URL", default=SERVER,
        help=f"vLLM's server, which makes token ids of texts and chats (default {SERVER}; key: {API_KEY})",
    )  # fmt: skip
    one.add_argument("--salt", help="the requests' cache_salt")
    one.add_argument(
        "--adapter", nargs=3, metavar=("NAME", "NUMBER", "PATH"), help="vLLM's lora_name, lora_int_id, lora_path"
    )


def prompt_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the prompt in the form that the management interface accepts.

    Raises:
        UsageError: the prompt cannot be read or is not valid, or vLLM's server does not return token ids.

    """
    text = _read(args.prompt)
    prompt: dict[str, Any] = {"tokens": _tokens(text, args.server, as_text=args.as_text)}
    if args.salt is not None:
        prompt["cache_salt"] = args.salt
    if args.adapter is not None:
        name, number, path = args.adapter
        if not re.fullmatch("[0-9]{1,9}", number):
            raise UsageError("kvpipe: --adapter: the adapter's number must be a whole number, vLLM's lora_int_id")
        prompt["adapter"] = {"name": name, "number": int(number), "path": path}
    return prompt


def _read(given: str) -> str:
    """Return the content of the file or pipe `given`. If there is no such file or pipe, return `given` itself."""
    if given != "-" and not given.startswith("@"):
        return given
    where = "standard input" if given == "-" else given[1:]
    try:
        if given == "-":
            data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
            if len(data) > PROMPT_BYTES_MAX:
                raise UsageError(f"kvpipe: {where} has more than {PROMPT_BYTES_MAX} bytes; give a shorter prompt")
        else:
            data = files.read_small(Path(where), PROMPT_BYTES_MAX)
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"kvpipe: {where} is not text; give a file of token ids, text or JSON") from None
    except OSError as error:
        raise UsageError(f"kvpipe: {where} cannot be read ({files.why(error)}); name another file") from None


def _tokens(text: str, server: str, *, as_text: bool) -> list[int]:
    if not as_text and _IDS.fullmatch(text):
        words = re.findall("[0-9]+", text)
        if max(map(len, words)) > _ID_DIGITS_MAX:
            raise UsageError(f"kvpipe: a token id has at most {_ID_DIGITS_MAX} digits; for a text give --as-text")
        return [int(word) for word in words]
    request = None if as_text else _request(text)
    if request is None:
        request = {"prompt": text}
    if not request.get("prompt", True):
        raise UsageError("kvpipe: the prompt is empty; give token ids, a text, or chat messages as JSON")
    return _ask(server, request)


def _request(text: str) -> dict[str, Any] | None:
    """Return the request with which vLLM's server tokenizes the JSON `text`. Returns None if `text` is not JSON."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(body, list):
        body = {"messages": body}
    if isinstance(body.get("prompt"), str):
        return {key: body[key] for key in _TEXT_KEYS if key in body}
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise UsageError(
            'kvpipe: the prompt is JSON, but not a chat; write [{"role": "user", "content": "…"}], {"messages": […]} '
            'or {"prompt": "…"}, or give --as-text'
        )
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    kinds = {str(part.get("type")) for part in parts if isinstance(part, dict)} - {"text"}
    if kinds:
        raise UsageError(
            f"kvpipe: messages with {config_errors.safe_name(min(kinds))}; kvpipe accepts prompts of text only"
        )
    return {key: body[key] for key in _CHAT_KEYS if key in body}


def _ask(server: str, request: dict[str, Any]) -> list[int]:
    """Return vLLM's token ids of a text or a chat. Raises UsageError if vLLM's server does not return them."""
    at = _server(server)
    kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(API_KEY):
        headers["Authorization"] = f"Bearer {key}"
    shown = f"{at.scheme}://{at.hostname}{f':{at.port}' if at.port else ''}"
    connection = kind(at.hostname or "", at.port, timeout=ANSWER_S_MAX)
    try:
        connection.request("POST", f"{at.path.rstrip('/')}/tokenize", json.dumps(request).encode(), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read(ANSWER_BYTES_MAX))
        tokens = found.get("tokens") if isinstance(found, dict) else None
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        why = config_errors.pydantic_reason(files.why(error))
        raise UsageError(
            f"kvpipe: a text needs vLLM's server to make token ids of it, and none answers at {shown} ({why}); give "
            "--server with its URL, or token ids"
        ) from None
    finally:
        connection.close()
    if answer.status != http.client.OK or not isinstance(tokens, list) or not tokens:
        stated = found.get("error") if isinstance(found, dict) else None
        why = config_errors.pydantic_reason(str(stated.get("message"))) if isinstance(stated, dict) else "no token ids"
        raise UsageError(
            f"kvpipe: vLLM's server at {shown} returns no token ids ({answer.status}: {why}); give token ids"
        )
    if not all(isinstance(one, int) and 0 <= one < 10**_ID_DIGITS_MAX for one in tokens):
        raise UsageError(f"kvpipe: the server at {shown} is not vLLM's; give --server with the URL of vLLM's server")
    return tokens


def _server(text: str) -> SplitResult:
    try:
        at = urlsplit(text)
        good = at.scheme in {"http", "https"} and bool(at.hostname) and at.port != 0 and not at.username
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"kvpipe: --server {config_errors.safe_name(text)}: write a URL such as {SERVER}")
    return at
