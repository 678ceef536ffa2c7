"""Documents that show an output of a notebook with the rules of VS Code and Colab."""

from __future__ import annotations

import json
from html import escape

# A notebook's output is put into the element by innerHTML, which runs no scripts of its own.
_HOST = """<!doctype html><html><head><meta charset="utf-8">{policy}</head>
<body style="margin:0"><div style="height:150px"></div><div id="output"></div>
<div style="height:2000px"></div>
<script>
globalThis.keys = [];
addEventListener("keydown", ({{ key }}) => keys.push(key));
document.getElementById("output").innerHTML = {output};
</script></body></html>"""
# Of VS Code: generateContent in notebook/browser/view/renderers/backLayerWebView.ts, and
# webviewGenericCspSource in webview/common/webview.ts. Documents of frames inherit it.
VS_CODE = (
    "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
    "script-src 'self' https://*.vscode-cdn.net 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' https://*.vscode-cdn.net 'unsafe-inline'; "
    "img-src 'self' https://*.vscode-cdn.net https: http: data:; "
    "font-src 'self' https://*.vscode-cdn.net https:; "
    'connect-src https:; child-src https: data: blob:;">'
)
# VS Code and Colab put outputs into such a frame, with an origin of its own.
_FRAME = (
    '<!doctype html><iframe sandbox="allow-scripts allow-downloads allow-forms allow-pointer-lock" '
    'srcdoc="{host}" style="width:96vw;height:94vh"></iframe>'
)


def host_html(output: str, policy: str = "") -> str:
    """Return a notebook with one output; ``policy`` is a meta element of its head.

    The notebook keeps the keys that reach it in ``keys``.
    """
    return _HOST.format(policy=policy, output=json.dumps(output).replace("</", "<\\/"))


def framed_html(output: str, policy: str = "") -> str:
    """Return a page with that notebook in a frame."""
    return _FRAME.format(host=escape(host_html(output, policy)))
