"""What a batch is, and a pass over batches: all of them, or this process's share."""
