"""Prompts on the command line. Token ids are used unchanged. VLLM's server converts texts and chats to token ids."""

from __future__ import annotations

import argparse
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cli.prompts import add_prompt, prompt_of
from kvpipe.errors import UsageError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


class Tokenizer:
    """Answers like vLLM's server at `/tokenize`. `asked` has each request, with the API key of the request."""

    def __init__(self) -> None:
        """Serve on a free port."""
        self.asked: list[tuple[str, Any, str | None]] = []
        self.answer: tuple[int, bytes] = (200, b'{"tokens": [7, 8, 9], "count": 3, "max_model_len": 10}')
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append((self.path, json.loads(body), self.headers["Authorization"]))
                self.send_response(outer.answer[0])
                self.end_headers()
                self.wfile.write(outer.answer[1])

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokenizer]:
    """Yield a server. No API key is set."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    one = Tokenizer()
    thread = threading.Thread(target=one.server.serve_forever, daemon=True)
    thread.start()
    yield one
    one.server.shutdown()
    one.server.server_close()
    thread.join()


def _prompt(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_prompt(parser)
    return prompt_of(parser.parse_args(words))


@pytest.mark.parametrize("text", ["1,2, 3", "[1, 2, 3]", " 1 2\n3 ", "[1,2,3]\n"])
def test_token_ids_are_taken_as_they_are(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids on the command line, in a file or on standard input need no server."""
    (tmp_path / "ids").write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    for given in (text, f"@{tmp_path}/ids", "-"):
        assert _prompt(given, "--server", "http://127.0.0.1:1") == {"tokens": [1, 2, 3]}


@pytest.mark.parametrize(
    ("words", "request_body"),
    [
        (["Hello, world"], {"prompt": "Hello, world"}),
        (["1 2 3", "--as-text"], {"prompt": "1 2 3"}),
        (["{not JSON"], {"prompt": "{not JSON"}),
        ([json.dumps(CHAT), "--as-text"], {"prompt": json.dumps(CHAT)}),
        ([json.dumps(CHAT)], {"messages": CHAT}),
        (
            [json.dumps({"model": "m", "messages": CHAT, "tools": [], "top_p": 1, "chat_template_kwargs": {"a": 1}})],
            {"messages": CHAT, "tools": [], "chat_template_kwargs": {"a": 1}},
        ),
        (['{"prompt": "Hello", "max_tokens": 1, "add_special_tokens": false}'],
         {"prompt": "Hello", "add_special_tokens": False}),
    ],
)  # fmt: skip
def test_server_makes_token_ids_of_texts_and_chats(
    words: list[str], request_body: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The request to the server has all fields that affect the token ids. The same prompt may also be in a file."""
    assert _prompt(*words, "--server", tokenizer.url) == {"tokens": [7, 8, 9]}
    (tmp_path / "prompt").write_text(words[0], encoding="utf-8")
    _prompt(f"@{tmp_path}/prompt", *words[1:], "--server", f"{tokenizer.url}/proxy/")
    assert tokenizer.asked == [("/tokenize", request_body, None), ("/proxy/tokenize", request_body, None)]


def test_request_has_salt_adapter_and_api_key(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gets vLLM's API key, and the engine gets salt and adapter."""
    monkeypatch.setenv("VLLM_API_KEY", "k1")
    found = _prompt("Hello", "--server", tokenizer.url, "--salt", "s", "--adapter", "n", "3", "/p")
    assert found == {"tokens": [7, 8, 9], "cache_salt": "s", "adapter": {"name": "n", "number": 3, "path": "/p"}}
    assert [key for _, _, key in tokenizer.asked] == ["Bearer k1"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["Hello", "--server", "http://127.0.0.1:1"], r"none answers at http://127\.0\.0\.1:1 \(.*\); give --server"),
        (["Hello", "--server", "ftp://user:secret@x"], r"^kvpipe: --server ftp://x: write a URL such as"),
        (["Hello", "--server", "http://u:secret@x"], r"^kvpipe: --server http://x: write a URL such as"),
        (["1,12345678901"], "a token id has at most 10 digits; for a text give --as-text"),
        ([""], "the prompt is empty"),
        (["@/nowhere"], r"/nowhere cannot be read \(No such file or directory\)"),
        (['{"messages": "Hello"}'], "the prompt is JSON, but not a chat; write"),
        (['{"a": 1}'], "the prompt is JSON, but not a chat; write"),
        (
            ['[{"role": "user", "content": [{"type": "image_url"}]}]'],
            "messages with image_url; kvpipe accepts prompts of",
        ),
    ],
)
def test_wrong_prompts_are_refused_with_a_remedy(words: list[str], why: str) -> None:
    """A wrong prompt is refused with a remedy, and the message does not show a secret in a URL."""
    with pytest.raises(UsageError, match=why) as caught:
        _prompt(*words)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (404, b'{"error": {"message": "The model x does not exist."}}', r"\(404: The model x does not exist\.\)"),
        (401, b'{"error": "Unauthorized"}', r"\(401: no token ids\)"),
        (200, b'{"tokens": []}', r"\(200: no token ids\)"),
        (200, b'{"tokens": ["a"]}', "is not vLLM's; give --server with the URL of vLLM's server"),
        (200, b"[1]", r"\(200: no token ids\)"),
        (200, b"<html>", "none answers at"),
    ],
)
def test_answers_without_token_ids_are_refused(status: int, body: bytes, why: str, tokenizer: Tokenizer) -> None:
    """If a server's answer has no token ids, the answer is refused with the reason."""
    tokenizer.answer = status, body
    with pytest.raises(UsageError, match=why):
        _prompt("Hello", "--server", tokenizer.url)
