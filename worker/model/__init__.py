"""The model: one file per layer kind, one per architecture family."""
