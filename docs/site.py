"""A hook of mkdocs, for what is different in the repository and on the site.

Links to files outside docs/, which the site does not have, become their text. Images in HTML get the
prefix `../`, because the site has a folder for each page; mkdocs adds it only to Markdown's images.
"""

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)]+)\)")

_IMAGE = re.compile(r'(?<=\s)(src|srcset)="(?![a-z]+:|/)([^"]+)"')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text. A link goes outside if it has more `../` than its folder is deep."""
    depth = page.file.src_uri.count("/")

    def local(link: re.Match[str]) -> str:
        return link[1] if link[2].count("../") > depth else link[0]

    markdown = _LINK.sub(local, markdown)
    return markdown if page.is_index else _IMAGE.sub(r'\1="../\2"', markdown)
