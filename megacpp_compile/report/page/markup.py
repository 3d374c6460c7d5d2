"""HTML that is escaped because nothing else can be written: text becomes `Html` through `tag` alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Iterable["Content"] | None


def joined(*content: Content) -> Html:
    """All of `content`, escaped where it is not HTML already."""
    found = []
    for part in content:
        if isinstance(part, str):
            found.append(part if isinstance(part, Html) else escape(part))
        elif part is not None:
            found.append(joined(*part))
    return Html("".join(found))


def tag(name: str, /, *content: Content, **attributes: str | float | bool | None) -> Html:
    """An element. An attribute that Python has a word for ends in "_", hyphens are "_"; None and False leave it out."""
    texts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        texts.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    opened = f"<{name}{''.join(texts)}>"
    return Html(opened if name in ("input", "br") else f"{opened}{joined(*content)}</{name}>")


def spaced(*content: Content) -> Html:
    """All of `content` that is there, with room for a line break between."""
    return Html(" ".join(filter(None, map(joined, content))))


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Content]], **attributes: str) -> Html:
    """A table whose cells know their header, which narrow pages show beside them."""
    head = tag("tr", (tag("th", header, scope="col") for header in headers))
    body = (tag("tr", (tag("td", cell, data_label=header) for header, cell in zip(headers, row, strict=True)))
            for row in rows)  # fmt: skip
    return tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body), **attributes)
