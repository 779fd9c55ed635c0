"""A proxy session without a proxy: histories in, the `CallRecord`s that the proxy would have written out."""

from __future__ import annotations

from clawhpc.records import CallRecord, CallRole, CallTokens, Graft, Message, Reply, Sampling, Usage, VersionSpan

Ids = tuple[int, ...]


class Session:
    """Records calls. A history is a sequence of pieces: a tuple is context ids, an int repeats that call's reply."""

    def __init__(self) -> None:
        self.calls: list[CallRecord] = []
        self.token_ids: dict[int, Ids] = {}
        """call_id -> prompt and completion."""
        self.prompt_ids: dict[int, Ids] = {}

    def call(
        self,
        *history: Ids | int,
        reply: Ids,
        role: CallRole = CallRole.MAIN,
        continues: int | None = None,
        reencoded: int = 0,
        headers: dict[str, str] | None = None,
        version: int = 0,
        new_messages: tuple[Message, ...] = (),
    ) -> int:
        """Draw `reply` after `history`; `continues` names a call that the history repeats only in other ids."""
        call_id, prompt_ids, grafts = len(self.calls), *self._write_out(history)
        continues_id = grafts[-1].call_id if grafts and continues is None else continues
        parent_id, shared = self._parent(prompt_ids, continues_id)
        tokens = CallTokens(
            prefix_length=shared,
            suffix_ids=prompt_ids[shared:],
            completion_ids=reply,
            sampling_logprobs=tuple(-0.01 * (call_id + 1) - 0.1 * at for at in range(len(reply))),
            weight_versions=(VersionSpan(version=version, start=0, end=len(reply)),),
            grafts=grafts,
            reencoded_replies=reencoded,
        )
        self.prompt_ids[call_id], self.token_ids[call_id] = prompt_ids, prompt_ids + reply
        return self._record(call_id, parent_id, continues_id, role, tokens, headers or {}, new_messages)

    def fail(self, *history: Ids | int) -> int:
        """A call that hears `history` and draws nothing."""
        grafts = self._write_out(history)[1]
        continues_id = grafts[-1].call_id if grafts else None
        return self._record(len(self.calls), None, continues_id, CallRole.MAIN, None, {})

    def _write_out(self, history: tuple[Ids | int, ...]) -> tuple[Ids, tuple[Graft, ...]]:
        ids: Ids = ()
        grafts: list[Graft] = []
        for piece in history:
            if isinstance(piece, int):
                tokens = self.calls[piece].tokens
                assert tokens is not None
                grafts.append(Graft(call_id=piece, start=len(ids), length=len(tokens.completion_ids)))
                piece = tokens.completion_ids
            ids += piece
        return ids, tuple(grafts)

    def _parent(self, prompt_ids: Ids, continues_id: int | None) -> tuple[int | None, int]:
        """The call that shares the most tokens with the prompt; of equals, the continued one, else the latest."""
        best = max(
            self.token_ids,
            key=lambda call_id: (_shared(self.token_ids[call_id], prompt_ids), call_id == continues_id, call_id),
            default=None,
        )
        shared = 0 if best is None else _shared(self.token_ids[best], prompt_ids)
        return (best, shared) if shared else (None, 0)

    def _record(
        self,
        call_id: int,
        parent_id: int | None,
        continues_id: int | None,
        role: CallRole,
        tokens: CallTokens | None,
        headers: dict[str, str],
        new_messages: tuple[Message, ...] = (),
    ) -> int:
        self.calls.append(
            CallRecord(
                call_id=call_id,
                parent_id=parent_id,
                conversation_id=call_id if continues_id is None else self.calls[continues_id].conversation_id,
                continues_id=continues_id,
                role=role,
                protocol="anthropic",
                headers=headers,
                new_messages=new_messages,
                tools=(),
                tools_same=continues_id is not None,
                requested=Sampling(),
                reply=Reply(text="…") if tokens else None,
                tokens=tokens,
                usage=Usage(input_tokens=0, output_tokens=0),
                received_at=float(call_id),
                duration_s=0.1,
                engine_s=0.05,
                delivered=tokens is not None,
                failure="" if tokens else "cancelled",
            )
        )
        return call_id


def _shared(left: Ids, right: Ids) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
