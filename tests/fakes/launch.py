"""What a rollout asks of a harness."""

from __future__ import annotations

from clawhpc.harness.base import Harness
from clawhpc.records import WORKSPACE_MOUNT, Conversation, LaunchPlan, LaunchRequest, McpServer, Message, Tool

URL = "http://127.0.0.1:8377/s/token"
LAB = McpServer(name="lab", argv=("python3", "/mcp/server.py"), env={"ROUNDS": "3"})


def launch_request(
    instruction: str = "Do it.",
    url: str = URL,
    servers: tuple[McpServer, ...] = (),
    context_window: int = 2048,
    python: str = "/usr/bin/python3",
) -> LaunchRequest:
    return LaunchRequest(
        instruction=instruction,
        base_url=url,
        workspace_mount=WORKSPACE_MOUNT,
        model="policy",
        context_window=context_window,
        max_output_tokens=256,
        python=python,
        mcp_servers=servers,
    )


def launch(harness: Harness, instruction: str = "Do it.", servers: tuple[McpServer, ...] = ()) -> LaunchPlan:
    return harness.launch_plan(launch_request(instruction, servers=servers))


def asked(*texts: str, tools: tuple[str, ...] = ()) -> Conversation:
    """User messages, and the tools by name."""
    return Conversation(
        model="policy",
        messages=tuple(Message(role="user", text=text) for text in texts),
        tools=tuple(Tool(name=name, description="", parameters={}) for name in tools),
    )
