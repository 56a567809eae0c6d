"""Settings for all tests."""

import signal

import torch

# The models are so small that a second thread costs more than it brings.
torch.set_num_threads(1)

# A shell starts what it runs in the background deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
