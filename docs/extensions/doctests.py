"""Examples in docstrings become code blocks on the reference page; as Markdown `>>>` would be a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^( *)>>> .*(?:\n(?!\s*$).*)*")


def fenced(text: str) -> str:
    """The text with every run of example lines, up to an empty line, in a code fence.

    >>> fenced("One.\\n\\n  >>> 1 + 1\\n  2").splitlines()
    ['One.', '', '  ```pycon', '  >>> 1 + 1', '  2', '  ```']
    """
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class Doctests(griffe.Extension):
    """Rewrites the docstring of everything that is documented."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
