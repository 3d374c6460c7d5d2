"""Guards of Dynamo's in words: what has changed since a frame was compiled, so that it is compiled again."""

from __future__ import annotations

import re

from megacpp_compile.fx.module_names import canonical

_TENSOR = re.compile(
    r"tensor '(.*?)' (\w+) mismatch(?: at index (\d+))?\. expected (?:\w+=)?(\S+?)(?:, actual (\S+?))?(?:\.|$|\s)"
)
_NO_TENSOR = re.compile(r"expected type of '(.*?)' to be a tensor type, ' but found <class '(\w+)'>")
_TYPE = re.compile(r"___check_type_id\((.*?), \d+\), type=<class '(?:.*\.)?(\w+)'>")
_NONE = re.compile(r"(.*?) is None\s*(?:#|$)")
_STATE = re.compile(r"GLOBAL_STATE changed:\s*(.*)", re.DOTALL)
# What of a tensor has changed -> how that reads, of what it is and what it was.
_OF_TENSOR = {
    "size": "{name} has size {now} in dimension {at}, and had {was}",
    "stride": "{name} has stride {now} in dimension {at}, and had {was}",
    "rank": "{name} has {now} dimensions, and had {was}",
    "dtype": "{name} is {now}, and was {was}",
}


def in_words(reason: str) -> str:
    """What Dynamo says of a guard that failed, as a clause. What it is not known how to read is left as it is said, in
    backticks and without the line of code beside it."""
    said = re.sub(r"^(!\d+/)?\d+/\d+: ", "", reason.strip())
    if found := _NO_TENSOR.match(said):
        return f"{_name(found[1])} is {found[2]}, and was a tensor"
    if found := _TYPE.match(said):
        return f"{_name(found[1])} is no longer of the class {found[2]}"
    if found := _NONE.match(said):
        return f"{_name(found[1])} is no longer None"
    if found := _TENSOR.match(said):
        return _of_tensor(*found.groups())
    if found := _STATE.match(said):
        names = ", ".join(name.replace("_", " ") for name in found[1].split())
        return f"{names} has changed"
    condition = re.split(r"\s+# ", said, maxsplit=1)[0].strip()
    return f"`{_name(condition)}` no longer holds" if condition else "Dynamo does not say why"


def _of_tensor(source: str, what: str, at: str, was: str, now: str | None) -> str:
    name = _name(source)
    if what == "requires_grad":
        did = was in ("1", "True")
        return f"{name} requires {'no' if did else 'a'} gradient, and did{'' if did else ' not'}"
    text = _OF_TENSOR.get(what)
    return text.format(name=name, at=at, was=was, now=now) if text and now else f"{what} of {name} has changed"


def _name(source: str) -> str:
    """As the user's code has it, without what wrappers add: self.up.weight for
    L['self']._modules['up']._parameters['weight']."""
    source = re.sub(r"\bL\['(\w+)'\]", r"\1", source)
    return canonical(re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source))
