"""Chat templates: transformers' text and ids, and bounds that a hostile template cannot leave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from labkit.errors import RequestError
from labkit.models import chat_template
from labkit.models.chat_template import ChatTemplate
from labkit.models.tokenizer import load_tokenizer
from tests.checkpoints import CHAT_TEMPLATE, byte_tokenizer, edit_json, write_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Hi, 漢字!"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "bos": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "blocks": (
        "{% for m in messages %}\n    {% if m.role != 'system' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    ),
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "loops": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}"
        "{% endif %}{{ m['content'] ~ loop.index }}{% endfor %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": (
        "{% macro say(m) %}<{{ m.role ~ '|' ~ m.content }}>{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "methods": (
        "{% for m in messages %}{{ m.content.replace('i', 'ii').split(' ') | join('-') | upper }}"
        "{{ '%s: %5d' % (m.role, loop.index) }}{{ '{:>4}'.format(1) }}{{ m.content[1:] | indent(2) }}{% endfor %}"
    ),
    "tools": "{% if tools is not none %}tools{% else %}none{% endif %}{% if documents %}d{% endif %}{{ unk_token }}",
    "slices": "{% for m in messages[1:] %}{{ m.content[:2] * 2 }}{{ '%s' % m.role }}{% endfor %}{{ 2 ** 3 }}",
    "year": "{{ strftime_now('%Y-%m') }}",
}


def render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT if messages is None else messages)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_same_as_transformers(name: str, generation_prompt: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(tmp_path, byte_tokenizer(), add_bos_token=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    want = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generation_prompt)
    assert ours.render_chat(CHAT, generation_prompt) == want
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=generation_prompt, return_dict=False)
    assert ours.apply_chat_template(CHAT, generation_prompt) == ids


def test_a_bos_is_written_by_the_template_or_not_at_all(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(), add_bos_token=True)
    for source, count in ((TEMPLATES["bos"], 1), (CHAT_TEMPLATE, 0)):
        (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
        ids = load_tokenizer(tmp_path).apply_chat_template(CHAT)
        assert ids.count(1) == count and (ids[0] == 1) == bool(count)


def test_where_templates_are_looked_for(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(), chat_template="from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).render_chat(CHAT) == "from the file"
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(tmp_path).render_chat(CHAT) == "from the config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=named)
    assert load_tokenizer(tmp_path).render_chat(CHAT) == "plain"
    edit_json(tmp_path / "tokenizer_config.json", chat_template=...)
    with pytest.raises(RequestError, match="no chat template") as caught:
        load_tokenizer(tmp_path).apply_chat_template(CHAT)
    assert caught.value.param == "messages"


def test_parts_are_joined_by_newlines_and_nulls_dropped() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    source = "{% for m in messages %}{{ m.content }}{{ 'name' in m }}{% endfor %}"
    assert render(source, [{"role": "user", "content": parts, "name": None}]) == "one\ntwoFalse"
    with pytest.raises(RequestError, match="text parts"):
        render(source, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages + 1 }}", "concatenate"),
        # out of the sandbox
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ tick.__globals__ }}", "undefined"),
        # too much
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10000000000 }}", "more than"),
        ("{{ [1] * 10000000000 }}", "more than"),
        ("{{ 10 ** 10000000 }}", "out of bounds"),
        ("{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "more than"),
        ("{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "more than"),
        ("{% for i in range(90000) %}{{ 'abcdefghij' * 1000 }}{% endfor %}", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a'.center(10000000000) }}", "more than"),
        ("{{ 'a' | center(10000000000) }}", "more than"),
        ("{{ ['a'] | map('center', 10000000000) | first }}", "more than"),
        ("{{ '%10000000000d' % 1 }}", "more than"),
        ("{{ '%*d' % (10000000000, 1) }}", "more than"),
        ("{{ '%10000000000d' | format(1) }}", "more than"),
        ("{{ '{:>10000000000}'.format(1) }}", "more than"),
        ("{{ '{:{w}}'.format(1, w=10000000000) }}", "more than"),
        ("{{ ('{0}' * 100000).format('a' * 30000) }}", "more than"),
        ("{{ ('b' * 30000000).replace('', 'a' * 30000000) }}", "more than"),
        ("{{ ('b' * 30000000) | replace('b', 'a' * 30000000) }}", "more than"),
        ("{{ ('a' * 30000000).join('b' * 30000000) }}", "more than"),
        ("{{ range(90000) | map('string') | join('a' * 30000000) }}", "more than"),
        ("{{ ('\n' * 1000000) | indent(1000000) }}", "more than"),
        ("{{ ('\t' * 1000000).expandtabs(1000000) }}", "more than"),
        ("{{ messages | tojson(indent=10000000000) }}", "more than"),
        ("{{ lipsum(n=100000, min=10000, max=10001) }}", "undefined"),
        ("{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}", "out of bounds"),
        # many that are each allowed
        (
            "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + ['a' * 30000000] %}{% endfor %}",
            "MiB",
        ),
        ("{% set a = 'a' * 30000000 %}{% set x %}{% for i in range(999) %}{{ a }}{% endfor %}{% endset %}", "MiB"),
        ("{% set x %}{% for i in range(99999) %}" + "a" * 20000 + "{% endfor %}{% endset %}", "MiB"),
        (
            "{% set a = 'a' * 30000000 %}{% set n = namespace(x=[]) %}"
            "{% for i in range(999) %}{% set n.x = n.x + [a[1:]] %}{% endfor %}",
            "MiB",
        ),
    ],
)
def test_what_a_template_may_not_do(source: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert says in str(caught.value) and caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(900) %}{% for j in range(900) %}{% for k in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_never_ends_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(RequestError, match="runs for more than"):
        render(source)
    assert time.monotonic() - start < 5
