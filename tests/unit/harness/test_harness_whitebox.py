"""How our own tool loop is started, and the program itself: its tools, and what it makes of a model's answers."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from clawhpc.harness.whitebox import Whitebox, WhiteboxSettings
from clawhpc.records import CallRole
from tests.fakes.launch import URL, asked, launch_request

WHITEBOX = Whitebox(WhiteboxSettings(max_retries=1, command_timeout_s=7), Path("/cache/harness"))
PROGRAM = WHITEBOX.install_dir / "whitebox.py"
LOOP = runpy.run_path(str(PROGRAM))
TOOLS = {"bash": partial(LOOP["bash"], timeout_s=5), **{name: LOOP[name] for name in ("read", "write", "edit")}}

Body = dict[str, Any]


def test_whitebox_is_told_all_in_one_line_of_json_and_the_instruction_after_it() -> None:
    *program, settings, instruction = WHITEBOX.launch_plan(launch_request("-x")).argv
    assert (program, instruction) == (["/usr/bin/python3", "-IS", "/harness/whitebox.py"], "-x")
    assert json.loads(settings) == {
        "base_url": f"{URL}/v1",
        "model": "policy",
        "max_tokens": 256,
        "max_retries": 1,
        "command_timeout_s": 7,
    }


def test_whitebox_is_always_there_for_the_python_of_the_sandbox_alone() -> None:
    WHITEBOX.check_install()
    assert PROGRAM.read_text().startswith("#!/usr/bin/python3 -IS\n")


def test_every_call_of_whitebox_is_its_main_loop() -> None:
    assert WHITEBOX.classify({}, asked("Do it.")) == (CallRole.MAIN, {})


# ---------------------------------------------------------------------------------------------------------------------
# Its tools
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def use(tool: str, **arguments: object) -> str:
    return LOOP["run"](TOOLS, tool, json.dumps(arguments))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("echo one; echo two >&2", "one\ntwo"),
        ("true", "(nothing was printed)"),
        ("echo no; exit 3", "no\n[exit code 3]"),
        ("kill -9 $$", "[exit code 137]"),
        ("printf '\\377'", "\ufffd"),
        ("sleep 30 & echo started", "started"),
        ('read line; echo "got $line"', "got"),
    ],
)
def test_bash_tells_what_a_command_printed_and_how_it_ended(workspace: Path, command: str, told: str) -> None:
    assert use("bash", command=command).rstrip() == told


def test_a_command_that_takes_too_long_is_stopped_with_what_it_started(workspace: Path) -> None:
    fifo = workspace / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    command = f"exec 3>{fifo}; echo some >&3; echo begun; sleep 30 | sleep 30"
    assert LOOP["bash"](command, timeout_s=0.3) == "begun\n[stopped after 0.3 s]"
    assert os.read(reader, 9) == b"some\n"
    assert os.read(reader, 9) == b"", "nobody has it open any more"
    os.close(reader)


def test_files_are_written_read_and_edited(workspace: Path) -> None:
    assert use("write", path="a/b.txt", content="one\r\ntwö\n") == "Wrote a/b.txt."
    assert use("read", path="a/b.txt") == "one\r\ntwö\n"
    assert use("edit", path="a/b.txt", old="two", new="2") == "Error: the old text stands 0 times in a/b.txt, not once"
    assert use("edit", path="a/b.txt", old="twö", new="2") == "Edited a/b.txt."
    assert (workspace / "a/b.txt").read_bytes() == b"one\r\n2\n"


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("Teleport", "{}", "Error: there is no tool Teleport; there are bash, read, write, edit."),
        ("bash", '{"wrong": 1.0}', "Error: bash takes command"),
        ("bash", '{"command": 1}', "Error: command is a text"),
        ("bash", '["ls"]', "Error: bash takes command"),
        ("bash", '{"command": "a\\u0000"}', "Error: embedded null byte"),
        ("read", '{"path": "nowhere"}', "Error: [Errno 2] No such file or directory: 'nowhere'"),
        ("read", '{"path": "."}', "Error: [Errno 21] Is a directory: '.'"),
        ("edit", '{"path": "empty", "old": "", "new": "x"}', "Error: the old text stands 0 times in empty, not once"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(workspace: Path, tool: str, arguments: str, told: str) -> None:
    (workspace / "empty").touch()
    assert LOOP["run"](TOOLS, tool, arguments) == told


@pytest.mark.parametrize("arguments", ["", "{", "[" * 100_000, '{"command": "\\ud800"}', "null", '{"command": ["x"]}'])
def test_no_arguments_end_the_loop(workspace: Path, arguments: str) -> None:
    assert LOOP["run"](TOOLS, "bash", arguments).startswith("Error: ")


def test_of_a_long_result_the_middle_is_left_out(workspace: Path) -> None:
    told = use("bash", command="seq 100000")
    assert told.startswith("1\n2\n")
    assert told.endswith("\n99999\n100000")
    assert " characters left out]" in told
    assert len(told) < LOOP["MAX_RESULT_CHARS"] + 100


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def model(*answers: Body | int) -> Iterator[tuple[str, list[Body]]]:
    """Says one of `answers` after the other; a number is an HTTP status. Its address, and what it was asked."""
    bodies: list[Body] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            answer = answers[len(bodies) - 1]
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": answer}]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/s/token", bodies
        finally:
            server.shutdown()
            thread.join()


def work(url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = WHITEBOX.launch_plan(launch_request("Count.", url=url, python=sys.executable)).argv
    return subprocess.run(
        [*argv[:2], PROGRAM, *argv[3:]], cwd=folder, env={}, capture_output=True, text=True, timeout=20
    )


def says(text: str | None, *commands: str) -> Body:
    functions = [{"name": "bash", "arguments": json.dumps({"command": command})} for command in commands]
    calls = [{"id": f"c{index}", "type": "function", "function": one} for index, one in enumerate(functions)]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def test_the_loop_repeats_what_was_said_adds_the_results_in_order_and_ends_with_a_reply_without_calls(
    tmp_path: Path,
) -> None:
    calls = says(None, "echo 1 | tee one", "cat one") | {"reasoning_content": "Two."}
    with model(calls, says("Done.")) as (url, bodies):
        done = work(url, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Done.\n", "")
    first, second = bodies
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"] == "Count."
    assert (first["model"], first["max_tokens"]) == ("policy", 256)
    assert [tool["function"]["name"] for tool in first["tools"]] == list(TOOLS)
    results = [{"role": "tool", "tool_call_id": f"c{index}", "content": "1"} for index in range(2)]
    assert second == first | {"messages": [*first["messages"], calls, *results]}


def test_an_overload_is_asked_again_and_a_refusal_is_not(tmp_path: Path) -> None:
    with model(503, says("Done.")) as (url, bodies):
        assert work(url, tmp_path).returncode == 0
    assert bodies[0] == bodies[1]
    with model(503, 503) as (url, bodies):
        assert work(url, tmp_path).returncode == 1
    with model(400) as (url, bodies):
        done = work(url, tmp_path)
    assert (done.returncode, len(bodies)) == (1, 1)
    assert done.stderr.startswith("whitebox: HTTP 400: ")


def test_where_there_is_no_model_it_says_so(tmp_path: Path) -> None:
    done = work("http://127.0.0.1:9/s/token", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("whitebox: ConnectionRefusedError: ")
