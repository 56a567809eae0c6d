"""The version of this package, also when it runs from its source tree."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("unmerge")
except PackageNotFoundError:
    VERSION = "0.1.0+source"
