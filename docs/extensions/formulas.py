"""Formulas of the pages as MathML, which browsers typeset by themselves: no script, no font, no network.

Pages write `$...$` and `$$...$$`; arithmatex finds them, and this hook of mkdocs converts what it found. Without
latex2mathml a formula is shown as it is written.
"""

import html
import re

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    try:
        from latex2mathml.converter import convert
    except ImportError:
        return FORMULA.sub(lambda m: f"<code>{m[3]}</code>", content)

    def typeset(found: re.Match[str]) -> str:
        shown = convert(html.unescape(found[3]), display="block" if found[2] == "[" else "inline")
        shown = re.sub(r"<mo[^>]*>&#x0007C;</mo>", '<mo stretchy="false" lspace="0" rspace="0">|</mo>', shown)
        return f'<div class="formula">{shown}</div>' if found[2] == "[" else shown

    return FORMULA.sub(typeset, content)
