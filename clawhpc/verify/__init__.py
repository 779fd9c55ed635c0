"""Score the workspace that a harness left."""
