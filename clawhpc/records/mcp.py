"""What a task's MCP server on the host was asked, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class McpCall:
    """One use of a server on the host, as it crossed its socket (mcp -> store).

    A tool that was called, a resource that was read, a prompt that was fetched. Whoever lives in the sandbox made it:
    the harness for the policy, or a program of the policy's own. Texts are JSON as they came, and say where they were
    shortened.
    """

    server: str
    connection: int
    """Which of the server's processes answered, from 0: each connection has its own."""
    method: str
    name: str
    """Of the tool or the prompt; the resource's URI."""
    arguments: str
    result: str = ""
    """Empty where there is none."""
    error: str = ""
    """The server's own, or why there is no answer."""
    started_at: float
    """Seconds since the epoch."""
    duration_s: float
