"""What is kept of the bytes that pass, whatever they are and wherever they are cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.mcp import traffic
from clawhpc.mcp.traffic import Connection, Traffic, shortened


def opened(clock: list[float] | None = None) -> Connection:
    """The first connection to a server; the clock goes on by the seconds that it is given."""
    times = iter(clock or [])
    return Connection(Traffic(lambda: next(times, 0.0)), "lab", 0)


def line(**message: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


def call(number: object, name: str = "add", **arguments: object) -> bytes:
    return line(id=number, method="tools/call", params={"name": name, "arguments": arguments})


HANDSHAKE = (
    line(id=0, method="initialize", params={}) + line(method="notifications/initialized") + line(id=1, method="ping")
)
SAID = line(id=0, result={"capabilities": {}}) + line(id=1, result={})


def test_a_call_is_kept_with_its_answer_and_a_handshake_is_counted() -> None:
    connection = opened([10.0, 12.5])
    connection.hear_sandbox(HANDSHAKE + call(2, a=1))
    connection.hear_server(SAID + line(id=2, result={"content": ["done"]}))
    (kept,) = connection.traffic.calls()
    assert (kept.server, kept.connection, kept.method, kept.name) == ("lab", 0, "tools/call", "add")
    assert (json.loads(kept.arguments), json.loads(kept.result), kept.error) == ({"a": 1}, {"content": ["done"]}, "")
    assert (kept.started_at, kept.duration_s) == (10.0, 2.5)
    assert connection.traffic.counts == {"lab initialize": 1, "lab notifications/initialized": 1, "lab ping": 1}
    assert connection.answered


@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_where_the_bytes_are_cut_does_not_matter(cuts: list[int]) -> None:
    asked, said = HANDSHAKE + call(2, word="größe"), SAID + line(id=2, result={})
    connection, whole = opened(), opened()
    for hear, text in ((connection.hear_sandbox, asked), (connection.hear_server, said)):
        places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        for start, end in itertools.pairwise(places):
            hear(text[start:end])
    whole.hear_sandbox(asked)
    whole.hear_server(said)
    assert connection.traffic.calls() == whole.traffic.calls()
    assert connection.traffic.counts == whole.traffic.counts
    assert len(whole.traffic.calls()) == 1


@given(asked=st.lists(st.binary(max_size=60)), said=st.lists(st.binary(max_size=60)))
def test_no_bytes_raise_anything(asked: list[bytes], said: list[bytes]) -> None:
    connection = opened()
    for piece in asked:
        connection.hear_sandbox(piece + b"\n")
    for piece in said:
        connection.hear_server(piece + b"\n")
    connection.end("over")
    connection.traffic.calls()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "uri", "arguments"]), inner),
    max_leaves=6,
)


@given(params=json_values, number=json_values, method=st.sampled_from(["tools/call", "resources/read", "x" * 99]))
def test_no_parameters_raise_anything(params: object, number: object, method: str) -> None:
    connection = opened()
    connection.hear_sandbox(line(id=number, method=method, params=params))
    connection.hear_server(line(id=number, result=params, error=params))
    connection.end("over")
    assert len(connection.traffic.calls()) == (method != "x" * 99)


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("resources/read", {"uri": "file:///a"}, "file:///a"),
        ("prompts/get", {"name": "greet", "arguments": {"who": "you"}}, "greet"),
    ],
)
def test_resources_and_prompts_are_kept_as_tools_are(method: str, params: dict[str, object], name: str) -> None:
    connection = opened()
    connection.hear_sandbox(line(id="a", method=method, params=params))
    connection.hear_server(line(id="a", error={"code": -1, "message": "no"}))
    (kept,) = connection.traffic.calls()
    assert (kept.method, kept.name, kept.result) == (method, name, "")
    assert json.loads(kept.error) == {"code": -1, "message": "no"}


def test_answers_find_their_calls_by_id_and_1_is_not_the_text_1() -> None:
    connection = opened()
    connection.hear_sandbox(call(1, "first") + call("1", "second"))
    connection.hear_server(line(id="1", result={"n": 2}) + line(id=1, result={"n": 1}) + line(id=3, result={}))
    assert [(kept.name, json.loads(kept.result)["n"]) for kept in connection.traffic.calls()] == [
        ("first", 1),
        ("second", 2),
    ]


def test_messages_in_an_array_are_read_one_by_one() -> None:
    connection = opened()
    connection.hear_sandbox(b"[" + call(1, "first").strip() + b"," + call(2, "second").strip() + b"]\n")
    assert [kept.name for kept in connection.traffic.calls()] == ["first", "second"]


def test_each_message_of_an_array_counts_and_a_long_array_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = opened()
    connection.hear_sandbox(b"[{}, {}, {}]\n\n{}\n")
    assert connection.num_messages == 5
    monkeypatch.setattr(traffic, "MAX_BATCH_BYTES", 20)
    connection.hear_sandbox(b"[" + b"{}," * 20 + b"{}]\n" + call(1))
    assert connection.num_messages == 7
    assert connection.traffic.counts == {"lab unreadable messages": 1}
    assert len(connection.traffic.calls()) == 1


def test_several_messages_on_a_line_are_none_without_an_array() -> None:
    connection = opened()
    connection.hear_sandbox(call(1).strip() + b"," + call(2))
    assert connection.traffic.counts == {"lab unreadable messages": 1}
    assert connection.num_messages == 1


def test_a_call_without_an_answer_says_why() -> None:
    connection = opened([10.0, 13.0])
    connection.hear_sandbox(call(1))
    connection.end("the server ended with exit code 1")
    (kept,) = connection.traffic.calls()
    assert (kept.result, kept.error, kept.duration_s) == ("", "the server ended with exit code 1", 3.0)


def test_what_a_server_asks_of_its_client_is_counted_and_answers_no_call() -> None:
    connection = opened()
    connection.hear_sandbox(call(1))
    connection.hear_server(line(id=1, method="roots/list"))
    assert connection.traffic.counts == {"lab roots/list": 1}
    connection.hear_server(line(id=1, result={}))
    assert connection.traffic.calls()[0].result == "{}"


def test_a_server_can_be_used_once_it_has_answered_something_with_no_error() -> None:
    connection = opened()
    connection.hear_sandbox(line(method="notifications/initialized"))
    assert not connection.asked
    connection.hear_sandbox(line(id=0, method="server/discover"))
    assert connection.asked
    connection.hear_server(line(id=0, error={"code": 1}) + line(method="notifications/message"))
    assert not connection.answered
    connection.hear_server(line(id=1, result={}))
    assert connection.answered


def test_long_texts_are_shortened_and_say_so() -> None:
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("a" * 5 + "b" * 5 + "c" * 5, 10) == "aaaaa … 5 characters left out … ccccc"
    assert shortened("abc", 0) == " … 3 characters left out … "
    connection = opened()
    connection.hear_sandbox(call(1, text="x" * 50_000))
    (kept,) = connection.traffic.calls()
    assert len(kept.arguments) < 20_100
    assert "30,012 characters left out" in kept.arguments


def test_texts_calls_methods_and_lines_beyond_the_bounds_are_counted_or_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, bound in (("MAX_CALLS", 2), ("MAX_TEXTS", 30), ("MAX_METHODS", 3), ("MAX_LINE_BYTES", 300)):
        monkeypatch.setattr(traffic, name, bound)
    connection = opened()
    for number in range(4):
        connection.hear_sandbox(call(number, text="x" * 40))
    first, second = connection.traffic.calls()
    assert "characters left out" in first.arguments
    assert second.arguments == " … 52 characters left out … "
    for number in range(5):
        connection.hear_sandbox(line(method=f"method{'abcde'[number]}"))
    connection.hear_sandbox(call(9, text="x" * 400) + line(method="methoda"))
    assert connection.traffic.counts == {
        "lab tools/call": 2,
        "lab methoda": 2,
        "lab methodb": 1,
        "lab other messages": 4,
    }
    assert connection.num_messages == 11


def test_what_is_no_json_is_counted() -> None:
    connection = opened()
    connection.hear_sandbox(b"hello\n{\n[1]\n" + b"[" * 5000 + b"\n\n" + b'{"id": 1, "method": "\\ud800"}\n')
    assert connection.traffic.counts == {"lab unreadable messages": 5}
