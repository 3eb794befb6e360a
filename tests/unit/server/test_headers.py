"""What a browser is told about every answer."""

import html
import re

import httpx
import pytest

from labkit.server.docs_page import shape


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/health", "/metrics", "/dashboard", "/docs"])
def test_every_answer_has_a_policy(server, path):
    for client in (server.http, httpx):
        headers = client.get(path if client is server.http else server.handle.url + path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_answers_of_the_api_allow_nothing(server):
    for reply in (server.complete(max_tokens=1), server.complete(max_tokens=1, stream=True), server.complete(n=1000)):
        assert reply.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_docs_say_it_all_without_a_script_or_another_host(server):
    reply, description = httpx.get(server.handle.url + "/docs"), server.http.get("/openapi.json").json()
    assert "script" not in reply.headers["content-security-policy"] and "unsafe" not in reply.text
    assert not re.search(r"<script|<style|\bon[a-z]+=|\bstyle=|//", reply.text.replace("<!doctype", ""))
    for link in re.findall(r'(?:href|src)="([^"]+)"', reply.text):
        assert httpx.get(f"{server.handle.url}/{link}").status_code == 200
    text = html.unescape(re.sub("<[^>]+>", "", reply.text))
    for path, item in description["paths"].items():
        for method, operation in item.items():
            assert f"{method.upper()} {path} " in text and operation["description"] in text
    wish = description["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert all(f"<code>{name}</code>" in reply.text for name in wish["properties"])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 1280}, "integer, ≥ 1, ≤ 1,280"),
        ({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}, "string, characters ≤ 9"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Message"}}, "list of Message"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object, each value number"),
        ({"type": "object"}, "object"),
        ({"enum": ["a", "b"], "type": "string"}, '"a" or "b"'),
        ({"const": "text", "type": "string"}, '"text"'),
        ({"type": ["string", "null"]}, "string or null"),
    ],
)
def test_a_type_in_words(schema, words):
    assert shape(schema) == words
