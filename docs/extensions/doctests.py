"""Examples in docstrings become code blocks on the reference page; as Markdown `>>>` would be a quotation."""

from __future__ import annotations

import ast
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


ONE = r"`\w+(?:=[^`]*)?`(?: \([^)]*\))?"  # a name, with a value or a shape
NAMED = re.compile(rf"(?:^|(?<=[.;] ))((?:{ONE}(?:, | and )?)+)([^.:`]{{0,40}}): ")
BARE = re.compile(rf"^({ONE})() (?=\w)")  # begins an entry of a list, without a colon


def described(text: str, parameters: set[str]) -> str:
    """The text with what it says of parameters, as "`name`: what it is.", in a section of its own behind the rest.

    Lists and sentences are taken alike; those about other names stay where they are.

    >>> print(described("Does it.\\n\\n`a`: one. `b`, `c`: two\\nlines. Also `d`: no.", {"a", "b", "c"}))
    Does it.
    <BLANKLINE>
    Args:
        a: one.
        b: two lines. Also `d`: no.
        c: two lines. Also `d`: no.
    """
    rest, found = [], []
    for block in re.split(r"\n\s*\n", text):
        lines = re.split(r"\n(?=\s*- )", block) if block.lstrip().startswith("- ") else [block]
        kept = []
        for line in lines:
            flat = " ".join(line.split()).removeprefix("- ")
            names = [n for n in NAMED.finditer(flat) if set(re.findall(r"`(\w+)", n[1])) <= parameters]
            bare = BARE.match(flat) if line.lstrip().startswith("- ") and not names else None
            if bare and set(re.findall(r"`(\w+)", bare[1])) <= parameters:
                names = [bare]
            if ">>>" in line or "```" in line or " | " in line or not names:
                kept.append(line)
                continue
            if flat[: names[0].start()].strip():
                kept.append(flat[: names[0].start()].strip())
            ends = [n.start() for n in names[1:]] + [len(flat)]
            for name, end in zip(names, ends, strict=True):
                first, *others = re.findall(r"`(\w+)", name[1])
                shape = " ".join(re.findall(r"`[^`]*=[^`]*`|\([^)]*\)", name[1])) + name[2]
                found.append((first, f"{shape}: {flat[name.end() : end]}".removeprefix(": ").strip()))
                found += [(other, found[-1][1]) for other in others]
        if kept:
            rest.append("\n".join(kept))
    if not found:
        return text
    return "\n\n".join(
        [
            *rest,
            "\n".join(["Args:", *(f"    {name}: {what}" for name, what in found)]),
        ]
    )


class Doctests(griffe.Extension):
    """Rewrites the docstring of everything that is documented, and gives public names to what is imported late."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in (pkg, pkg.members.get("hf")):
            late = module.members.get("_LAZY") if isinstance(module, griffe.Module) else None
            if not isinstance(late, griffe.Attribute):
                continue
            for name, where in ast.literal_eval(str(late.value)).items():
                home, _, what = where.partition(":")
                target = f"{home}.{what}" if what else home
                if "." not in home:  # of bochner.hf: the name of a module alone
                    target = f"{module.path}.{home}.{name}"
                if name not in module.members:
                    module.set_member(name, griffe.Alias(name, target))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if obj.is_function and "old" in obj.parameters:  # call forms of the version before
            del obj.parameters["old"]
        if obj.is_function or obj.is_class:
            text = described(text, {p.name.lstrip("*") for p in obj.parameters})
        obj.docstring.value = fenced(text)
