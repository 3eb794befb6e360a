"""/docs: what /openapi.json says, as a page to read. It has no script and loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment
from starlette.responses import Response

TEMPLATE = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
POLICY = "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; frame-ancestors 'none'"
BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minLength": "characters ≥",
    "maxLength": "characters ≤",
}


def docs_page(description: dict[str, Any]) -> Response:
    """The page for an OpenAPI description."""
    page = Environment(autoescape=True).from_string(TEMPLATE).render(api=description, shape=shape)
    return Response(page, media_type="text/html", headers={"content-security-policy": POLICY})


def shape(schema: dict[str, Any]) -> str:
    """A JSON schema in words, such as "integer, ≥ 1, ≤ 128" or "string or list of string", without its null."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(shape(one) for one in schema["anyOf"] if one != {"type": "null"})
    if "enum" in schema or "const" in schema:
        return " or ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return f"list of {shape(schema['items'])}"
    if schema["type"] == "object":
        values = schema.get("additionalProperties")
        return f"object, each value {shape(values)}" if values else "object"
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    bounds = [f"{sign} {schema[name]:,}" for name, sign in BOUNDS.items() if name in schema]
    return ", ".join([" or ".join(kinds), *bounds])
