"""What a browser is told about every answer."""

import base64
import hashlib
import re

import httpx
import pytest


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/health", "/metrics", "/dashboard", "/docs"])
def test_every_answer_has_a_policy(server, path):
    for client in (server.http, httpx):
        headers = client.get(path if client is server.http else server.handle.url + path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_answers_of_the_api_allow_nothing(server):
    for reply in (server.complete(max_tokens=1), server.complete(max_tokens=1, stream=True), server.complete(n=1000)):
        assert reply.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_docs_run_only_the_scripts_that_are_in_them(server):
    reply = server.http.get("/docs")
    policy = reply.headers["content-security-policy"]
    scripts = re.findall(r"<script>(.*?)</script>", reply.text, re.DOTALL)
    assert scripts
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    sources = re.findall(r'(?:src|href)="(https://[^/"]+)', reply.text)
    assert sources and all(source in policy for source in sources)
    assert server.http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
