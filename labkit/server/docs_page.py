"""/docs: FastAPI's page, with a policy that lets it load what it needs and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response

CDN = (
    "https://cdn.jsdelivr.net"  # where FastAPI has Swagger UI from; without it the page is empty, /openapi.json is not
)


def docs_page() -> Response:
    page = bytes(get_swagger_ui_html(openapi_url="openapi.json", title="labkit: the API").body)
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
        for script in re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    ]
    policy = (
        f"default-src 'none'; script-src {CDN} {' '.join(hashes)}; style-src {CDN} 'unsafe-inline'; "
        "img-src 'self' data: https://fastapi.tiangolo.com; connect-src 'self'; frame-ancestors 'none'"
    )
    return Response(page, media_type="text/html", headers={"content-security-policy": policy})
