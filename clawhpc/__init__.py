"""clawhpc: reinforcement learning of language models inside real, opaque agent harnesses, as a Slurm batch system."""

__version__ = "0.1.0"
