"""The network of a request: its layers, its weights before fine-tuning, the edits that it carries."""
