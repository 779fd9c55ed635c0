"""Run nanobot once in the current directory, through its Python interface: run_nanobot:main INSTRUCTION

Its command would first make an assistant's home of the workspace, with a git repository and seven files of persona,
memory and prompts, which the verifier would see. What the interface makes there is taken away again.
"""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from loguru import logger
from nanobot import Nanobot

SESSION = "cli:direct"
"""As its command names it."""
OWN_FILES = (Path(".nanobot/workspace-id"), Path("memory/history.jsonl"), Path("memory/.cursor"))
"""The last two of a compaction."""
OWN_FOLDERS = (Path(".nanobot"), Path("memory"))


def main() -> str | None:
    """None when the model has had the last word, else why not."""
    logger.remove()
    made = [path for path in (*OWN_FILES, *OWN_FOLDERS) if not path.exists()]
    try:
        return asyncio.run(follow(sys.argv[1]))
    finally:
        for path in made:
            with suppress(OSError):  # the model may have put something of its own there
                path.rmdir() if path in OWN_FOLDERS else path.unlink()


async def follow(instruction: str) -> str | None:
    """Do what `instruction` says, to the end."""
    async with Nanobot.from_config(workspace=".") as bot:
        run = await bot.run_streamed(instruction, session_key=SESSION)
        result = await run.wait()
    sys.stdout.write(f"{result.content}\n")
    return None if result.stop_reason == "completed" else f"{result.stop_reason}: {result.error or result.content}"
