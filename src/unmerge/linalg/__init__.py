"""Linear algebra on plain tensors: nothing here knows of networks, data or requests."""
