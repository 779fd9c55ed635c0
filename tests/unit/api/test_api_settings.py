"""Where an API is, what opens it, what it costs."""

from __future__ import annotations

import os

import pytest

from clawhpc.api.settings import Prices, check_url, read_key
from clawhpc.errors import UserError
from clawhpc.records import Usage

USAGE = Usage(input_tokens=1_000_000, output_tokens=100_000, cached_tokens=600_000)


@pytest.mark.parametrize(
    "url", ["http://h", "https://api.example.org/v1", "http://127.0.0.1:8000/v1/", "http://[::1]:80", "HTTP://H_1:1/~a"]
)
def test_plain_urls_are_taken(url: str) -> None:
    check_url("base_url", url.replace("_", "-"))


@pytest.mark.parametrize(
    "url",
    [
        *(
            "h/v1",
            "ftp://h",
            "http://",
            "http://h:port",
            "http://h:0",
            "http://h:99999",
            "http://a b/v1",
            "http://h/a b",
        ),
        *("http://h/a b", "https://h/v1?version=1", "https://h/v1#x", "http://h\n", "http://a..b@h", "https://-@h"),
    ],
)
def test_what_is_no_plain_url_is_refused_by_the_name_of_its_setting(url: str) -> None:
    with pytest.raises(ValueError, match=r"^base_url must be http://HOST:PORT/PATH"):
        check_url("base_url", url)


@pytest.mark.parametrize("url", ["https://me:secret@h/v1", "https://secret@h", "https://h/v1?key=secret"])
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="no user, key or query") as caught:
        check_url("base_url", url)
    assert "secret" not in str(caught.value)


def test_a_key_is_read_without_what_a_shell_has_left_around_it() -> None:
    assert read_key("a.key_env", "K", {"K": " sk-1\r\n"}) == "sk-1"


@pytest.mark.parametrize("value", [None, "", " \n", "sk-é", "sk-1\nsk-2", "sk-\x00"])
def test_what_cannot_be_a_key_is_refused_by_setting_and_host_without_repeating_it(value: str | None) -> None:
    with pytest.raises(
        UserError, match=rf"^a\.key_env=K: on {os.uname().nodename} this variable holds no key"
    ) as caught:
        read_key("a.key_env", "K", {} if value is None else {"K": value})
    assert "sk-" not in str(caught.value)


def test_what_is_cached_has_a_price_of_its_own_where_that_is_known() -> None:
    prices = Prices(input_price=3.0, cached_price=0.3, output_price=15.0)
    assert prices.cost_usd(USAGE) == pytest.approx(0.4 * 3.0 + 0.6 * 0.3 + 1.5)
    assert Prices(input_price=3.0, output_price=15.0).cost_usd(USAGE) == pytest.approx(3.0 + 1.5)
    assert Prices(input_price=3.0, cached_price=0.0, output_price=15.0).cost_usd(USAGE) == pytest.approx(1.2 + 1.5)


def test_an_endpoint_that_counts_more_cached_tokens_than_tokens_takes_nothing_off_the_cost() -> None:
    odd = Usage(input_tokens=10, output_tokens=0, cached_tokens=1_000_000)
    assert Prices(input_price=3.0, cached_price=1.0, output_price=1.0).cost_usd(odd) == pytest.approx(10 * 1.0 / 1e6)


def test_costs_are_known_only_with_the_prices_of_input_and_output() -> None:
    assert Prices(input_price=0.0, output_price=0.0).are_known
    assert not Prices(output_price=1.0).are_known
    assert not Prices(input_price=1.0, cached_price=1.0).are_known
    with pytest.raises(ValueError, match="cached_price=-1"):
        Prices(cached_price=-1.0)
