"""Settings for all tests."""

import torch

# The models are so small that a second thread costs more than it brings.
torch.set_num_threads(1)
