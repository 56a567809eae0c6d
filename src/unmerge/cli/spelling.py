"""The library's messages in the words of the command: `force=True` as `--force`, `init="zero"` as `--init zero`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What is said in Python and is no keyword with a flag of its name.
PHRASES = {
    "check_init=False": "--any-init",
    "pass one as reference": "pass one as --reference",
    "pass that as reference": "pass that as --reference",
    "it needs the test split": "it needs --test",
    "unmerge.diagnose": "unmerge diagnose",
    "Give batches as (inputs, labels)": "Give data with labels",
    "a larger max_length": "a larger --max-length",
    "Set tokenizer.eos_token.": "Pass --tokenizer DIR of one that has.",
    "Pass a fast tokenizer": "Pass --tokenizer DIR of a fast one",
    "Pass the same mask= to both": "Give the same --tokens to both",
    "Pass mask= with one entry": "Give an attention_mask with one entry",
    "pass forward= for anything else": "--data package.module:function names a loader that gives these",
    "pass forward= that feeds them in another way": "pass --image-size, or --model package.module:function that takes "
    "them as they are",
    "Pass forward=, which returns them": "--model package.module:function names a model that returns them",
    "pass forward=lambda model, batch: ... that returns them": "--model package.module:function names one that does",
    "pass forward= that returns them": "--model package.module:function names one that does",
}
_CALL = re.compile(r"\b(?:Recipe|recipe\.but)\(([a-z_]+=[^()]*)\)")
_KEYWORD = re.compile(
    r"(?<![\w/.\-])(?<!\bat )"  # neither inside a path, nor a strength that something was measured at
    r"(?P<name>[a-z_]+)="
    r"(?P<value>'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\.\.\.|-?\d+(?:\.\d+)?(?:e-?\d+)?|True|False|None)?"
)


@dataclass(frozen=True)
class Flag:
    """How a keyword of the library is typed."""

    text: str
    placeholder: str = ""  # of a flag that takes a value
    switch: bool = False
    negative: str = ""  # what switches it off
    command: str = ""  # another subcommand, which has it

    def with_value(self, value: str | None) -> str:
        """The flag and its value, from what stands behind the `=` of the keyword."""
        of = f" of unmerge {self.command}" if self.command else ""
        if self.switch:
            return (self.negative if value == "False" and self.negative else self.text) + of
        return f"{self.text} {self._typed(value)}".rstrip() + of

    def _typed(self, value: str | None) -> str:
        if value is None:
            return ""
        if value == "...":
            return self.placeholder
        if value.startswith("["):
            return shlex.quote(",".join(part.strip(" '\"") for part in value[1:-1].split(",")))
        return "none" if value == "None" else shlex.quote(value.strip("'\""))


def flags_of(parameters: Iterable[Any], command: str = "") -> dict[str, Flag]:
    """The flags of a subcommand by the name of the keyword that they stand for."""
    return {
        each.name: Flag(each.opts[0], each.metavar or "", each.is_flag, "".join(each.secondary_opts[:1]), command)
        for each in parameters
        if each.opts[0].startswith("--")
    }


def as_flags(message: str, flags: Mapping[str, Flag]) -> str:
    """A message with every keyword that is a flag spelled as one; others stay."""

    def spelled(found: re.Match[str]) -> str:
        flag = flags.get(found["name"])
        return found[0] if flag is None else flag.with_value(found["value"])

    for said, typed in PHRASES.items():
        message = message.replace(said, typed)
    return _KEYWORD.sub(spelled, _CALL.sub(r"\1", message))
