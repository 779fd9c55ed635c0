"""Ask a model behind an API: what judges and a model in the policy's place have in common."""
