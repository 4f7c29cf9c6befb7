"""Every table that is filled from stored results can be downloaded: this hook of mkdocs writes `tables/NAME.csv`.

The marks that `tables.py` looks for name the tables. A link to the file stands below each.
"""

import csv
import io
import re
from pathlib import Path
from typing import Any

MARKED = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n(?P<lines>\|.*?)<!-- end -->", flags=re.DOTALL)
found: dict[str, str] = {}


def as_csv(lines: str) -> str:
    """The rows of a table in Markdown, without its rule and its emphasis."""
    out = io.StringIO()
    rows = [
        [cell.strip().replace("`", "").replace("**", "") for cell in line.strip("|").split("|")]
        for line in lines.strip().splitlines()
    ]
    csv.writer(out, lineterminator="\n").writerows(row for i, row in enumerate(rows) if i != 1)
    return out.getvalue()


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    up = "../" * page.url.count("/")

    def linked(mark: re.Match[str]) -> str:
        found[mark["name"]] = as_csv(mark["lines"])
        link = f'<a class="csv" href="{up}tables/{mark["name"]}.csv" download>CSV</a>'
        return f"{mark[0]}\n\n{link}"

    return MARKED.sub(linked, markdown)


def on_post_build(config: Any, **_: object) -> None:
    folder = Path(config["site_dir"]) / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
