"""Check the links within a built site: files and anchors exist, and nothing is fetched.

``python tools/site_links.py docs/_build/html`` prints each link of a page to a file or an anchor
that the site lacks, and each script, style, font or picture that a page would fetch from a server.
Exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes of elements that a browser fetches at once.
FETCHED = {
    ("img", "src"),
    ("script", "src"),
    ("iframe", "src"),
    ("link", "href"),
    ("source", "src"),
}
#: Values of ``rel`` of links that a browser does not fetch.
NOT_FETCHED = {"canonical", "next", "prev", "index", "search", "author", "copyright"}


class Page(HTMLParser):
    """Anchors, links and fetched addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.fetched = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what an element names and where it leads."""
        values = {name: value or "" for name, value in attributes}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        is_fetched = not set(values.get("rel", "").split()) & NOT_FETCHED
        self.fetched += [
            values[name]
            for element, name in FETCHED
            if is_fetched and tag == element and name in values
        ]


def broken_links(site: Path) -> tuple[list[str], int]:
    """Return a line for each broken link of the site, and the number of links within it."""
    paths = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    pages = {path.resolve(): Page(path.read_text()) for path in paths}
    broken, count = [], 0
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for address in {*page.links, *page.fetched}:
            parts = urlsplit(address)
            if parts.scheme == "data" or address.startswith(("mailto:", "javascript:")):
                continue
            if parts.scheme or parts.netloc:
                if address in page.fetched:
                    broken.append(f"{where}: fetches {address}")
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            has_anchor = not parts.fragment or target not in pages or (
                unquote(parts.fragment) in anchors
            )  # fmt: skip
            if not target.exists() or not has_anchor:
                broken.append(f"{where}: {address}")
    for style in site.rglob("*.css"):
        for address in re.findall(r"url\([\"']?(https?:[^)\"']+)", style.read_text()):
            broken.append(f"{style.relative_to(site)}: fetches {address}")
    return broken, count


def main() -> int:
    """Print broken links; return the exit status."""
    site = Path(sys.argv[1])
    broken, count = broken_links(site)
    print(*broken, sep="\n", end="\n" if broken else "")
    n_pages = sum("_static" not in path.parts for path in site.rglob("*.html"))
    print(f"{n_pages} pages, {count} links within the site, {len(broken)} broken")
    return 1 if broken or not n_pages else 0


if __name__ == "__main__":
    sys.exit(main())
