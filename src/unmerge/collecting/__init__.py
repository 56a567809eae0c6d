"""From a model and data to `Statistics`: one forward pass with hooks."""
