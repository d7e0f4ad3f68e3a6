"""A hook of mkdocs: links to files outside docs/, which the site does not have, become their text."""

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text. A link goes outside if it has more `../` than its folder is deep."""
    depth = page.file.src_uri.count("/")

    def local(link: re.Match[str]) -> str:
        return link[1] if link[2].count("../") > depth else link[0]

    return _LINK.sub(local, markdown)
