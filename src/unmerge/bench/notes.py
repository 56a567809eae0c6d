"""What a long benchmark says as it goes."""

from __future__ import annotations

from tqdm.auto import tqdm


def note(text: str) -> None:
    """Print a line above the progress bars, at once also where it goes to a file."""
    with tqdm.external_write_mode():
        print(text, flush=True)
