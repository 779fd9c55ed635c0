"""A process that speaks vLLM's `/inference/v1/generate` on a unix socket, draws at random, and misbehaves on purpose.

    python -m tests.fakes.engine_server SOCKET JOURNAL VOCABULARY STOP

VOCABULARY: ids, by commas, of which completions consist; STOP: the id that ends them. Every answer that is whole is one
line of the journal, with the digests of what was received and drawn, written before the answer is.
"""

from __future__ import annotations

import asyncio
import random
import sys
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import msgspec

FAULT_SHARE = 0.03
"""Of first draws; a later one of the same reply is lost only if the process is killed."""
DELAY_S = (0.02, 0.12)


class Line(msgspec.Struct, frozen=True):
    """One whole answer, in the journal."""

    request_id: str
    received: str
    drawn: str


def digest(ids: Any) -> str:
    return blake2b(msgspec.json.encode(list(ids)), digest_size=8).hexdigest()


async def serve(socket: str, journal: Path, vocabulary: list[int], stop: int) -> None:
    with journal.open("ab", buffering=0) as lines:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await answer_one(reader, writer, lines, vocabulary, stop):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            writer.close()

        server = await asyncio.start_unix_server(answer, socket)
        await server.serve_forever()


async def answer_one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lines: IO[bytes], vocabulary: list[int], stop: int
) -> bool:
    """Whether the connection goes on."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if head.startswith("get /health"):
        writer.write(response(200, b""))
        return True
    length = int(head.split("content-length:")[1].split("\r\n")[0])
    request = msgspec.json.decode(await reader.readexactly(length))
    sampling, request_id = request["sampling_params"], request["request_id"]
    num_draw = int(request_id.rpartition("-")[2])
    chance = random.Random(f"{sampling['seed']}/{num_draw}")
    await asyncio.sleep(chance.uniform(*DELAY_S))
    ids = draw(random.Random(sampling["seed"]), vocabulary, stop, sampling["max_tokens"])
    finish = "stop" if ids[-1] == stop else "length"
    if num_draw == 1 and chance.random() < FAULT_SHARE:
        fault = chance.choice(["drop", "cut", "error", "abort"])
        if fault == "error":
            writer.write(response(500, b'{"error":{"message":"EngineCore encountered an issue"}}'))
        elif fault == "abort":
            writer.write(response(200, answer_body(ids[: len(ids) // 2], "abort")))
        elif fault == "cut":
            writer.write(response(200, answer_body(ids, finish))[:-5])
        return fault not in ("drop", "cut")
    line = Line(request_id=request_id, received=digest(request["token_ids"]), drawn=digest(ids))
    lines.write(msgspec.json.encode(line) + b"\n")
    writer.write(response(200, answer_body(ids, finish)))
    return True


def draw(chance: random.Random, vocabulary: list[int], stop: int, max_tokens: int) -> list[int]:
    """Some words, seldom none, and the end."""
    ids = [chance.choice(vocabulary) for _ in range(chance.randrange(40))]
    return [*ids, stop][:max_tokens]


def answer_body(ids: list[int], finish: str) -> bytes:
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": finish,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.001 * (1 + token)} for token in ids]},
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return msgspec.json.encode({"choices": [choice], "usage": {"prompt_tokens_details": None}})


def response(status: int, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )


if __name__ == "__main__":
    _, socket_path, journal_path, ids_text, stop_text = sys.argv
    asyncio.run(serve(socket_path, Path(journal_path), [int(one) for one in ids_text.split(",")], int(stop_text)))
