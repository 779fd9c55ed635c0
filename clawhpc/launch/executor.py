"""Make a submitit executor from settings: `local` on this machine, `slurm` on a cluster."""

from __future__ import annotations

from pathlib import Path

import submitit

from clawhpc.errors import UserError
from clawhpc.launch.settings import LaunchSettings


def make_executor(settings: LaunchSettings, folder: Path) -> submitit.AutoExecutor:
    """An executor that keeps its job files in `folder`. UserError names an unknown parameter."""
    try:
        executor = submitit.AutoExecutor(folder, cluster=settings.cluster)
        executor.update_parameters(timeout_min=settings.timeout_min, name="clawhpc", **settings.parameters)
    except (NameError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"launch.parameters: {error}") from error
    return executor
