"""A host-local vLLM server with the current policy: start it, load new weights into it, stop it, say why it ended.

`server.serve_policy` is the way in, `settings.EngineSettings` what it is told. vLLM is a process; only `extension`,
which runs inside that process, imports it.
"""
