"""Keys and rates."""

import pytest

from labkit.errors import LabkitError
from labkit.server.errors import ApiError
from labkit.server.security import Keys, RateLimiter, check_environment, check_production, is_loopback


def test_a_key_of_ones_own():
    keys = Keys(["one", "two"])
    assert keys.check(b"Bearer two", "203.0.113.9") == b"two"
    assert keys.check(b"bearer  one ", "203.0.113.9") == b"one"


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Bearer on", b"Basic one", b"one", b"Bearer \xe4"]
)
def test_no_key_or_a_wrong_one(header):
    with pytest.raises(ApiError) as error:
        Keys(["one"]).check(header, "127.0.0.1")
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")


def test_the_development_key_is_for_this_machine():
    keys = Keys([])
    assert keys.check(b"Bearer dev-key", "127.0.0.1") == b"dev-key"
    for client in ("192.168.1.5", "::ffff:10.0.0.1", "testclient", None):
        with pytest.raises(ApiError):
            keys.check(b"Bearer dev-key", client)


def test_the_development_key_ends_with_a_key_of_ones_own():
    with pytest.raises(ApiError):
        Keys(["one"]).check(b"Bearer dev-key", "127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_loopback(address):
    assert is_loopback(address)


def test_production_needs_keys_of_ones_own():
    for keys in ([], ["dev-key"], ["mine", "dev-key"]):
        with pytest.raises(LabkitError, match="LABKIT_ENVIRONMENT"):
            check_production(keys)
    check_production(["key-of-these-tests", "5d41402abc4b2a76b9719d911017c592"])


@pytest.mark.parametrize("weak", ["mine", "a" * 64, "0123456789abcde", "passwordpassword"])
def test_production_refuses_weak_keys_and_does_not_say_them(weak):
    with pytest.raises(LabkitError, match="key 2 of 2 is weak") as error:
        check_production(["key-of-these-tests", weak])
    assert weak not in str(error.value)


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Every key by hmac.compare_digest, and all of them, also after one that fits."""
    compared = []
    monkeypatch.setattr("labkit.server.security.hmac.compare_digest", lambda a, b: compared.append(a) or a == b)
    Keys(["one", "two", "three"]).check(b"Bearer one", None)
    assert compared == [b"one", b"two", b"three"]


def test_environments():
    for fine in ("", "development"):
        check_environment(fine, [])
    for wrong in ("prod", "PRODUCTION", "production "):
        with pytest.raises(LabkitError, match="it can be production, or development"):
            check_environment(wrong, ["5d41402abc4b2a76b9719d911017c592"])
    check_environment("production", ["5d41402abc4b2a76b9719d911017c592"])
    with pytest.raises(LabkitError, match="needs a key of your own"):
        check_environment("production", [])


def test_a_burst_then_the_rate():
    limiter = RateLimiter(2.0, 3)
    for _ in range(3):
        limiter.take(b"k", now=10.0)
    with pytest.raises(ApiError) as error:
        limiter.take(b"k", now=10.0)
    assert error.value.status == 429 and error.value.headers["retry-after"] == "1"
    limiter.take(b"other", now=10.0)
    limiter.take(b"k", now=10.5)
    with pytest.raises(ApiError):
        limiter.take(b"k", now=10.6)


def test_what_was_not_used_is_saved_up_to_the_burst():
    limiter = RateLimiter(1.0, 2)
    limiter.take(b"k", now=0.0)
    for _ in range(2):
        limiter.take(b"k", now=100.0)
    with pytest.raises(ApiError):
        limiter.take(b"k", now=100.0)


def test_no_limit():
    limiter = RateLimiter(None, None)
    assert not any(limiter.take(b"k", now=0.0) for _ in range(1000))  # none is refused
