"""How OpenAI words errors, in all its protocols: harnesses look for the code, or for the message of an overflow."""

from __future__ import annotations

from clawhpc.wire.base import ContextOverflow, ErrorKind, FieldRefused, FieldUnlisted, Json, WireError

ERRORS: dict[ErrorKind, tuple[int, str, str | None]] = {
    ErrorKind.INVALID: (400, "invalid_request_error", None),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    ErrorKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    ErrorKind.CONTEXT: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.LIMIT: (400, "invalid_request_error", "rollout_limit_reached"),
    ErrorKind.OVERLOADED: (503, "server_error", "overloaded"),
}
"""Kind -> status, type, code."""


def openai_error(error: WireError, prompt: str) -> tuple[int, Json]:
    """HTTP status and error object; `prompt` is the field that holds it."""
    status, error_type, code = ERRORS[error.kind]
    message, param = str(error), None
    if isinstance(error, ContextOverflow):
        message, param = _overflow_message(error), prompt
    elif isinstance(error, FieldUnlisted):
        message, param, code = f"Unknown parameter: '{error.path}'.", error.path, "unknown_parameter"
    elif isinstance(error, FieldRefused):
        param, code = error.path, "unsupported_parameter"
    return status, {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def _overflow_message(error: ContextOverflow) -> str:
    return (
        f"This model's maximum context length is {error.maximum} tokens. However, your messages resulted in "
        f"{error.num_tokens} tokens. Please reduce the length of the messages."
    )
