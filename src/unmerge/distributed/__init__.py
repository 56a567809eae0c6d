"""Several processes that work as one: each reads its share of the data, all end with the same result."""

from unmerge.distributed.processes import OwnShare, alone, is_first, leave, rank, size, start

__all__ = ["OwnShare", "alone", "is_first", "leave", "rank", "size", "start"]
