"""A server of the Model Context Protocol over stdin and stdout, with one tool: `add` gives the sum of `a` and `b`.

Standard library only: /usr/bin/python3 of a sandbox runs it as it is. What a task may say of a server shows in it: the
tool's description ends with the variable NOTE, and DELAY_S holds back the first answer, as a slow start does.
"""

import json
import os
import sys
import time

TOOL = {
    "name": "add",
    "description": f"Add two numbers.{os.environ.get('NOTE', '')}",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}


def main() -> None:
    time.sleep(float(os.environ.get("DELAY_S", "0")))
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:  # notifications have none, and get no answer
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer(request)}), flush=True)


def answer(request: dict) -> dict:
    """The result or the error of one request."""
    parameters = request.get("params", {})
    if request["method"] == "initialize":
        return {
            "result": {
                "protocolVersion": parameters["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "adder", "version": "1"},
            }
        }
    if request["method"] == "ping":
        return {"result": {}}
    if request["method"] == "tools/list":
        return {"result": {"tools": [TOOL]}}
    if request["method"] == "tools/call" and parameters["name"] == "add":
        total = parameters["arguments"]["a"] + parameters["arguments"]["b"]
        return {"result": {"content": [{"type": "text", "text": f"the sum is {total}"}], "isError": False}}
    return {"error": {"code": -32601, "message": f"no such method: {request['method']}"}}


if __name__ == "__main__":
    main()
