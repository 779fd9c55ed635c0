"""What the proxy costs: added latency and CPU time per call, beside that of other proxies for training."""
