"""Jobs through submitit: the only place that knows it."""
