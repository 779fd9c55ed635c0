#!/usr/bin/python3 -IS
"""A tool loop that hides nothing: ask the model, run the tools that it calls, say what they gave; until it calls none.

    whitebox.py SETTINGS INSTRUCTION

SETTINGS is JSON: base_url, model, max_tokens, max_retries, command_timeout_s. The current directory is the workspace.
All that a model is told stands in this file, and is the same in every run but for the instruction: no date, no path.
It needs Python 3.9 and nothing else. It has no subagents, no MCP, no streaming, and does not compact: what an open
loop for training does, the least of it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

SYSTEM = """\
You are an agent that works on the files of its current directory. Use the tools to do what the user asks. When all is
done, say so in a few words, without a tool call: that ends your work."""
PARAMETERS = {
    "bash": ("Run a command with bash, and see what it prints.", {"command": "The command."}),
    "read": ("Read a text file.", {"path": "The file."}),
    "write": ("Write a text file, over the one that may be there.", {"path": "The file.", "content": "Its text."}),
    "edit": (
        "Replace a piece of a text file that stands there once.",
        {"path": "The file.", "old": "The piece.", "new": "What takes its place."},
    ),
}
"""Of each tool: what it does, and its arguments, all of which are texts that it needs."""
MAX_RESULT_CHARS = 20_000
"""Of what a tool gives; of more than that, the model sees the beginning and the end."""
FIRST_WAIT_S = 0.5
"""Before a failed call is made again; then twice as long, and so on."""
PASSING_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Of answers that may be others a little later."""
API_KEY = "sk-whitebox"


def main() -> None:
    """Work on the instruction, and print the model's last word."""
    settings, instruction = json.loads(sys.argv[1]), sys.argv[2]
    tools = {"bash": partial(bash, timeout_s=settings["command_timeout_s"]), "read": read, "write": write, "edit": edit}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    while True:
        reply = ask(settings, messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            print(reply.get("content") or "")  # noqa: T201
            return
        for call in reply["tool_calls"]:
            result = run(tools, call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


def ask(settings: dict, messages: list[dict]) -> dict:
    """The model's next message, just as it came. Ends the program when there is none, whatever it is asked again."""
    request = {"model": settings["model"], "messages": messages, "tools": TOOLS, "max_tokens": settings["max_tokens"]}
    body = json.dumps(request).encode()
    for attempt in range(1 + settings["max_retries"]):
        if attempt:
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
        try:
            status, answer = post(f"{settings['base_url']}/chat/completions", body)
        except (OSError, http.client.HTTPException) as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        if status == http.client.OK:
            return json.loads(answer)["choices"][0]["message"]
        failure = f"HTTP {status}: {answer.decode(errors='replace')}"
        if status not in PASSING_STATUSES:
            break
    sys.exit(f"whitebox: {failure}")


def post(url: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the whole answer, over its own connection, however long it takes: others keep the time."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        connection.request("POST", f"/{path}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def schema(name: str) -> dict:
    """A tool as the protocol describes it."""
    description, arguments = PARAMETERS[name]
    properties = {argument: {"type": "string", "description": told} for argument, told in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [schema(name) for name in PARAMETERS]


# ---------------------------------------------------------------------------------------------------------------------
# The tools
# ---------------------------------------------------------------------------------------------------------------------


def run(tools: dict, name: str, arguments: str) -> str:
    """What a call gives, or what was wrong with it: whatever the model asks for, the loop goes on."""
    if name not in tools:
        return f"Error: there is no tool {name}; there are {', '.join(tools)}."
    try:
        return shorten(tools[name](**texts(name, json.loads(arguments))))
    except (OSError, ValueError, RecursionError) as error:
        return f"Error: {error}"


def texts(name: str, arguments: object) -> dict[str, str]:
    """The arguments of tool `name`. Raises `ValueError` when they are not those that it takes."""
    wanted = PARAMETERS[name][1]
    if not isinstance(arguments, dict) or arguments.keys() != wanted.keys():
        raise ValueError(f"{name} takes {', '.join(wanted)}")
    for argument, value in arguments.items():
        if not isinstance(value, str):
            raise ValueError(f"{argument} is a text")
    return arguments


def bash(command: str, *, timeout_s: float) -> str:
    """What it printed, and how it ended, where that was not well. What the command left running is not waited for."""
    output = os.memfd_create("output")
    try:
        shell = subprocess.Popen(
            ["/bin/bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        ended = wait(shell, timeout_s)
        printed = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace").rstrip("\n")
    finally:
        os.close(output)
    return "\n".join(part for part in (printed, ended) if part) or "(nothing was printed)"


def wait(shell: subprocess.Popen, timeout_s: float) -> str:
    """How it ended: empty if well. Out of time, it ends with all that it has started."""
    try:
        code = shell.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        return f"[stopped after {timeout_s:g} s]"
    return f"[exit code {code if code >= 0 else 128 - code}]" if code else ""


def read(path: str) -> str:
    """The text of a file."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return file.read()


def write(path: str, content: str) -> str:
    """A file of this text, in folders that are made for it."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(content)
    return f"Wrote {path}."


def edit(path: str, old: str, new: str) -> str:
    """The file with `new` in the place of `old`. Raises `ValueError` where that is not one place."""
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    count = text.count(old) if old else 0
    if count != 1:
        raise ValueError(f"the old text stands {count} times in {path}, not once")
    write(path, text.replace(old, new))
    return f"Edited {path}."


def shorten(text: str) -> str:
    """`text`; if it is too long, without its middle."""
    if len(text) <= MAX_RESULT_CHARS:
        return text
    half = MAX_RESULT_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


if __name__ == "__main__":
    main()
