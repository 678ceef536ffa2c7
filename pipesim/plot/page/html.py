"""A page as one HTML file: styles, scripts and data are inside, nothing is loaded.

A content-security policy admits two scripts by their hashes: a short one that decompresses the
program, and the program. No request leaves the page.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
import zlib
from functools import cache
from html import escape
from importlib import resources

#: Text near the beginning of each page that tells it from other HTML.
PAGE_MARK = 'id="pipesim-page"'
_IMPORT = re.compile(r'^import [^;]*?"([./\w]+)\.js";\n', re.MULTILINE)
#: Digits of bytes as text. None of them means anything in HTML or JSON.
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=/?@^_:{|}~"
#: Those of `base64.b85encode` in the same order.
_B85_DIGITS = (
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
)
#: Decode and decompress the program, and run it. Missing digits at the end are the last one.
_LOADER = (
    'const text=document.getElementById("pipesim-program").textContent;'
    "const n=text.length-Math.ceil(text.length/5),bytes=new Uint8Array(n+4);"
    "const view=new DataView(bytes.buffer);"
    f'const digits="{_DIGITS}";'
    "for(let k=0,at=0;k<text.length;k+=5,at+=4){let number=0;"
    'for(let j=k;j<k+5;j++)number=85*number+digits.indexOf(text[j]??"~");'
    "view.setUint32(at,number);}"
    "const stream=new Blob([bytes.subarray(0,n)]).stream()"
    '.pipeThrough(new DecompressionStream("deflate"));'
    'const script=document.createElement("script");'
    'script.type="module";'
    "script.textContent=await new Response(stream).text();"
    "document.head.append(script);"
)
_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {hashes}; \
style-src {style}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<div {mark}{embedded}>{title}. This page needs JavaScript, and a browser with \
DecompressionStream: Chrome 80, Firefox 113, Safari 16.4 or newer.</div>
<script type="text/plain" id="pipesim-data">{data}</script>
<script type="text/plain" id="pipesim-program">{program}</script>
<script type="module">{loader}</script>
</body>
</html>
"""
_CSS = "html,body,#pipesim-page{height:100%;margin:0}"


@cache
def program(main: str = "controls/page") -> str:
    """Return module ``main`` and those that it imports as one, each after its imports."""
    texts: dict[str, str] = {}
    _add_module(main, texts)
    return "".join(texts.values())


def _add_module(name: str, texts: dict[str, str]) -> None:
    """Add a module to ``texts`` without imports, exports and lines of comments."""
    text = resources.files(__package__).joinpath(f"program/{name}.js").read_text(encoding="utf-8")
    for path in _IMPORT.findall(text):
        imported = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if imported not in texts:
            _add_module(imported, texts)
    text = _IMPORT.sub("", text)
    text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*/\*\*.*?\*/\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*//.*\n", "", text, flags=re.MULTILINE)
    texts[name] = re.sub(r"^[ \n]+", "", text, flags=re.MULTILINE)


def page_html(title: str, data: bytes, *, embedded: bool = False) -> str:
    """Return a page.

    Parameters
    ----------
    title
        Any text.
    data
        A packed document.
    embedded
        Whether the page is a part of another one, which the wheel scrolls.
    """
    code = program() + "start();\n"
    return _HTML.format(
        hashes=" ".join(f"'sha256-{_digest(text)}'" for text in (_LOADER, code)),
        style=f"'sha256-{_digest(_CSS)}'",
        title=escape(title),
        mark=PAGE_MARK,
        css=_CSS,
        embedded=" data-embedded" if embedded else "",
        data=_text(data),
        program=_text(zlib.compress(code.encode(), 9)),
        loader=_LOADER,
    )


def widget_program() -> str:
    """Return the program as a module for anywidget."""
    return program("controls/widget") + "export default { render };\n"


def _digest(text: str) -> str:
    """Return the hash of a script as a content-security policy has it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _text(data: bytes) -> str:
    """Return bytes as text of 85 digits: four bytes are five of them."""
    return base64.b85encode(data).translate(_TO_DIGITS).decode("ascii")


_TO_DIGITS = bytes.maketrans(_B85_DIGITS, _DIGITS.encode())
