"""vLLM's server without a model: `serve` starts it and speaks to it as to the real one; what it draws is by rule.

tests/fakes/scripted_site puts it in the place of `clawhpc.serve.extension` in processes that have that folder on
PYTHONPATH. A task whose instruction holds a command between `COMMAND` marks is done by it: the first reply of a main
loop calls the shell, or, as the seed decides, does not; every later one ends the run. Every answer is a line of the
journal, written before the answer is.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from clawhpc.records import Tool
from clawhpc.tasks.families import ShellStep
from clawhpc.tasks.oracle import FINAL_TEXT, shell_call

JOURNAL_VARIABLE = "CLAWHPC_TEST_JOURNAL"
COMMAND = re.compile(r"RUN> (.*?) <RUN")
"""In an instruction."""
TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>"
WILLING = 0.6
"""Of first replies, those that do what was asked."""
DELAY_S = (0.05, 0.4)
"""What a reply takes."""


class Line(msgspec.Struct, frozen=True):
    """One whole answer, in the journal."""

    seed: int
    request_id: str
    received: str
    """Digest of the prompt's ids."""
    drawn: str


def digest(ids: Any) -> str:
    return blake2b(msgspec.json.encode(list(ids)), digest_size=8).hexdigest()


def read_journal(path: Path) -> list[Line]:
    """All lines; the last one of a process that was killed may be cut, and was no answer then."""
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            lines.append(msgspec.json.decode(text, type=Line))
        except msgspec.MsgspecError:
            continue
    return lines


def next_reply(prompt: str, chance: random.Random) -> str:
    """What the policy says to a prompt."""
    asked, tools = COMMAND.search(prompt), TOOLS.search(prompt)
    if asked is None or tools is None or prompt.count(ASSISTANT) > 1 or chance.random() > WILLING:
        return FINAL_TEXT
    functions = [json.loads(line)["function"] for line in tools[1].splitlines()]
    offered = tuple(Tool(name=one["name"], description="", parameters=one["parameters"]) for one in functions)
    call = shell_call(offered, ShellStep(command=asked[1]), call_id="")
    spelled = json.dumps({"name": call.name, "arguments": json.loads(call.arguments)})
    return f"<tool_call>\n{spelled}\n</tool_call>"


@dataclass
class ScriptedVllm:
    """The server's state."""

    tokenizer: Tokenizer
    policy: dict[str, Any]
    """Of the folder that was loaded last: its policy.json."""
    journal: int
    """File descriptor."""
    version: str = "none"
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while it is paused."""
    num_drawing: int = 0
    at_rest: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is being drawn."""

    async def answer(self, path: str, body: bytes) -> Any:
        """To a request; what is not listed needs no answer but that all is well."""
        request = msgspec.json.decode(body) if body else {}
        if path == "/inference/v1/generate":
            score = "prompt_logprobs" in request["sampling_params"]
            return self.score(request) if score else await self.generate(request)
        if path == "/update_weight_version":
            self.version = request["new_version"]
        elif path == "/pause":
            self.goes_on.clear()
            await self.at_rest.wait()
        elif path == "/collective_rpc":
            self.policy = read_policy_file(Path(request["kwargs"]["folder"]))
        elif path == "/resume":
            self.goes_on.set()
        return {"success": True}

    def score(self, request: Any) -> Any:
        """The log-probs that the learner has of the policy's probe: as if its weights were here."""
        probe = self.policy["probe"]
        assert request["token_ids"] == probe["token_ids"], "of other texts it knows nothing"
        pairs = zip(probe["token_ids"][1:], probe["logprobs"], strict=True)
        return reply([0], "length", self.version) | {
            "prompt_logprobs": [None, *({token: {"logprob": logprob}} for token, logprob in pairs)]
        }

    async def generate(self, request: Any) -> Any:
        sampling = request["sampling_params"]
        chance = random.Random(sampling["seed"])
        await self.goes_on.wait()
        self.num_drawing += 1
        self.at_rest.clear()
        try:
            await asyncio.sleep(chance.uniform(*DELAY_S))
        finally:
            self.num_drawing -= 1
            if not self.num_drawing:
                self.at_rest.set()
        assert self.version == str(self.policy["step"]), "it was told of other weights than it holds"
        text = next_reply(self.tokenizer.decode(request["token_ids"], skip_special_tokens=False), chance)
        whole = self.tokenizer.encode(text + END, add_special_tokens=False).ids
        ids = whole[: sampling["max_tokens"]]
        line = Line(
            seed=sampling["seed"],
            request_id=request["request_id"],
            received=digest(request["token_ids"]),
            drawn=digest(ids),
        )
        os.write(self.journal, msgspec.json.encode(line) + b"\n")
        return reply(ids, "stop" if ids == whole else "length", self.version)


def reply(ids: list[int], finish: str, version: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": finish,
        "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in ids]},
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
    }
    return {"choices": [choice], "usage": {"prompt_tokens_details": None}}


def read_policy_file(folder: Path) -> dict[str, Any]:
    return msgspec.json.decode((folder / "policy.json").read_bytes())


async def serve(folder: Path, socket: str, journal: int) -> None:
    vllm = ScriptedVllm(
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        policy=read_policy_file(folder),
        journal=journal,
    )
    vllm.goes_on.set()
    vllm.at_rest.set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                path = head.split(" ", 2)[1].partition("?")[0]
                writer.write(response(msgspec.json.encode(await vllm.answer(path, body))))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, socket)
    await server.serve_forever()


def response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def main() -> None:
    """In place of vLLM's, with its arguments."""
    options = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    journal = os.open(os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    asyncio.run(serve(Path(options["--model"]), options["--uds"], journal))
