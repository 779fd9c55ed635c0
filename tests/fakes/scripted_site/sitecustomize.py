"""Imported by every Python process that has this folder on PYTHONPATH: where one of them would become vLLM, it becomes
`tests.fakes.scripted_vllm` instead. All else, and every other process, stays as it is.
"""

import sys
from importlib import import_module

ENGINE = "clawhpc.serve.extension"

if sys.orig_argv[1:2] == ["-c"] and f"from {ENGINE} import main" in sys.orig_argv[2]:
    sys.modules[ENGINE] = import_module("tests.fakes.scripted_vllm")
