"""Where a model's weights are: on its device, kept off it by accelerate, or spread over processes."""
