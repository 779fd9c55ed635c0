"""What a run will take, worked out from its settings: memory, tokens, time, storage. Pure arithmetic, and no torch."""
