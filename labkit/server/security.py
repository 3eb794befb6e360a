"""Who may come in: keys, and how often each may ask."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Sequence

from labkit.errors import LabkitError
from labkit.server.errors import invalid_key, rate_limited

DEV_KEY = "dev-key"
MIN_CHARACTERS = 16
MIN_DIFFERENT = 8


class Keys:
    """The keys of this server. Without any the development key counts, for clients on this machine only."""

    def __init__(self, keys: Sequence[str]):
        self._keys = [key.encode() for key in keys or (DEV_KEY,)]
        self._local_only = not keys

    def check(self, authorization: bytes | None, client: str | None) -> bytes:
        """The key of an Authorization header. Raises ApiError (401), the same for a wrong and a missing one."""
        scheme, _, given = (authorization or b"").partition(b" ")
        given = given.strip()
        # All are compared, each in constant time: how long it takes says nothing about the keys.
        matches = [hmac.compare_digest(key, given) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise invalid_key("a valid key is needed, as a header: Authorization: Bearer KEY")
        if self._local_only and not is_loopback(client):
            raise invalid_key(f"{DEV_KEY} is taken from this machine only; start the server with --api-key KEY")
        return given


def is_loopback(client: str | None) -> bool:
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1 on a socket for both protocols
    return (mapped or address).is_loopback


def check_environment(name: str, keys: Sequence[str]) -> None:
    """Raises LabkitError for a LABKIT_ENVIRONMENT that is unknown, or whose keys are not good enough."""
    if name not in ("", "development", "production"):
        raise LabkitError(f"LABKIT_ENVIRONMENT is {name!r}; it can be production, or development, as without it")
    if name == "production":
        check_production(keys)


def check_production(keys: Sequence[str]) -> None:
    """Raises LabkitError unless every key is the owner's own, and not to be guessed."""
    if not keys or DEV_KEY in keys:
        raise LabkitError(
            "LABKIT_ENVIRONMENT is production, which needs a key of your own: --api-key KEY or LABKIT_API_KEY, "
            f"other than {DEV_KEY}"
        )
    for number, key in enumerate(keys, start=1):
        if len(key) < MIN_CHARACTERS or len(set(key)) < MIN_DIFFERENT:
            raise LabkitError(
                f"LABKIT_ENVIRONMENT is production, and key {number} of {len(keys)} is weak: it needs {MIN_CHARACTERS} "
                f"characters or more, {MIN_DIFFERENT} of them different, such as `openssl rand -hex 24` gives"
            )


class RateLimiter:
    """A token bucket for each key: `burst` requests at once, then `rate` a second. A rate of None has no limit."""

    def __init__(self, rate: float | None, burst: int | None):
        self._rate = rate
        self._burst = float(burst or max(1, rate or 1))
        self._buckets: dict[bytes, tuple[float, float]] = {}  # key → (what was left, when)

    def take(self, key: bytes, now: float | None = None) -> None:
        """Count one request. Raises ApiError (429) that says how long to wait."""
        if self._rate is None:
            return
        now = time.monotonic() if now is None else now
        left, then = self._buckets.get(key, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._rate)
        if left < 1:
            raise rate_limited((1 - left) / self._rate)
        self._buckets[key] = (left - 1, now)
