"""A host-local vLLM server with the current policy: start it, watch it, load new weights into it, stop it.

`server.serve_policy` is the way in, `settings.EngineSettings` what it is told. vLLM is a process; only `extension`,
which runs inside that process, imports it.
"""
