"""MCP servers that a task, or a run, declares outside the sandbox.

    sandbox                             │ host
    harness ── stdio ── bridge.py ── unix socket ── host.py ── stdio ── the server, one process per connection
                                        │              └── traffic.py: what was asked and answered

The harness starts bridge.py as if it were the server. There is no network, and a rollout sees the sockets of its own
servers only (law 7). Servers inside the sandbox need nothing of this: the harness starts them itself.
"""
