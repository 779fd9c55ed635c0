"""The proxy: every model call of a rollout crosses it, is answered in the harness's own protocol, and is recorded.

harness ──▶ app ──▶ session ──▶ responder ──▶ engine
            stream ◀──┘  └──▶ record
"""
