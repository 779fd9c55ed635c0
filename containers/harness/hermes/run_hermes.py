"""Run Hermes's own command, after the MCP servers of its configuration have started: run_hermes:main ARGUMENTS

Its one-shot mode, the only one that waits for subagents, begins without servers that are slow to start.
"""

import logging

from hermes_cli.main import main as hermes
from hermes_cli.mcp_startup import start_background_mcp_discovery, wait_for_mcp_discovery


def main() -> None:
    """Ends the process with Hermes's exit code."""
    start_background_mcp_discovery(logger=logging.getLogger(__name__), thread_name="mcp")
    wait_for_mcp_discovery()
    hermes()
