"""The report: what it says first, its charts, and in a real browser: no errors, plots there, choosing a head works."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import shown

from bochner.report import HeadPictures, Number, Report, error_map
from bochner.report.viewer import packed


def pictures(layers: int = 2, heads: int = 3, n: int = 6) -> HeadPictures:
    g = torch.Generator().manual_seed(0)
    exact = [torch.softmax(3 * torch.randn(heads, n, n, generator=g), -1) for _ in range(layers)]
    errors = [[0.1 * (h + layer + 1) for h in range(heads)] for layer in range(layers)]
    tokens = ["the", "cat", "sat", "on", "<b>", "mats"][:n]
    return HeadPictures(tokens, [False] * n, exact, [e.flip(-1) for e in exact], errors, "A caption.")


def page() -> Report:
    report = Report("a < b").verdict("It is worth it.", [Number("quality retained", "99 %", "of all")])
    report.steps([("Convert.", "bochner convert x y --keep 0.99")])
    report.heads(pictures())
    return report.table(["n", "v"], [["a", 0.12345], [3, 1e-9]], chosen="a").code("<pre>", "More")


def test_a_report_is_self_contained_and_escaped(tmp_path: Path) -> None:
    text = page().save(tmp_path / "deep" / "r.html").read_text()
    assert "a &lt; b" in text
    assert "0.123" in text
    assert "&lt;pre&gt;" in text
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", text)
    assert text.index("It is worth it.") < text.index("What to do next") < text.index("<svg")
    for said in ("bochner 0", "UTC", "torch", "thread"):
        assert said in text.partition("<footer>")[2]


def test_the_map_of_errors_has_a_number_in_every_cell() -> None:
    errors = error_map("t", [[0.25] * 16], rows=[7])
    assert errors.count(">.25</text>") == 16
    assert "layer 7</text>" in errors
    assert error_map("t", []) == ""


def test_weights_survive_packing() -> None:
    import base64

    w = torch.tensor([[[0.0, 0.001, 0.999]]])
    back = torch.frombuffer(bytearray(base64.b64decode(packed([w]))), dtype=torch.uint8).float() / 255
    assert torch.allclose(back.square(), w.flatten(), atol=0.004)


def test_in_a_browser_the_map_is_there_and_choosing_a_head_works(tmp_path: Path) -> None:
    # What a reader does: choose a cell of the map, then a token, then another head in the list.
    clicks = """<script>
    const box = document.querySelector("section.viewer"), log = [];
    const seen = (what) => [...document.querySelectorAll(what)].filter((e) => e.getBoundingClientRect().width > 0);
    const cut = (e) => [...e.querySelectorAll("text")].filter((t) => {
      const box = t.getBoundingClientRect(), frame = e.getBoundingClientRect();
      return t.textContent && (box.right > frame.right + 1 || box.left < frame.left - 1 || box.height < 9);
    });
    const note = () => log.push([Number(box.dataset.head), Number(box.dataset.row),
      box.querySelector(".converted .tokens span:last-of-type").title, seen(".cell.on").length]);
    note();
    seen(".cell")[4].dispatchEvent(new MouseEvent("click", { bubbles: true })); note();
    box.querySelectorAll(".exact .tokens span")[0].click(); note();
    const select = box.querySelector("select"); select.value = "1"; select.dispatchEvent(new Event("change")); note();
    document.body.dataset.log = JSON.stringify(log);
    document.body.dataset.size = JSON.stringify([document.documentElement.scrollWidth, innerWidth,
      box.querySelector("canvas").width, seen("svg").length, seen(".value").length, seen("svg").flatMap(cut).length]);
    </script></body>"""
    for width in (1200, 480):
        dom, console = shown(page().html().replace("</body>", clicks), tmp_path, width)
        assert console == ""
        found = re.search(r'data-log="([^"]*)"', dom)
        assert found is not None, dom[-500:]
        log = json.loads(found[1].replace("&quot;", '"'))
        assert [entry[0] for entry in log] == [2, 4, 4, 1]
        assert [entry[1] for entry in log] == [3, 3, 0, 0]
        assert all(entry[3] == 1 for entry in log)
        # The shades are the head's own weights: of the first token by head 1 of the first layer, converted.
        wanted = 100 * float(pictures().converted[0][1, 0, -1])
        assert abs(float(log[-1][2].rstrip(" %")) - wanted) < 0.5
        size = re.search(r'data-size="\[([\d,]+)\]"', dom)
        assert size is not None
        page_width, window, canvas, charts, numbers, unreadable = map(int, size[1].split(","))
        assert page_width <= window, f"the page is wider than a screen of {window}"
        assert canvas == 6
        assert charts == 1
        assert numbers == 6  # of the map of heads
        assert unreadable == 0, "a text of a chart is cut off or smaller than 9 pixels"


@pytest.mark.model
def test_the_weights_shown_are_those_of_the_model() -> None:
    pytest.importorskip("transformers")
    from hf_models import TEXT, build

    import bochner
    from bochner.hf.calibrate import Far, attention_weights
    from bochner.hf.observe import Call, recording, run
    from bochner.report.model import head_pictures

    class Words:
        """A tokenizer of three-letter words."""

        pad_token = "w0"

        def __call__(self, texts: list[str], **_: object) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.tensor([[int(w[1:]) for w in texts[0].split()]])}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [f"w{i}" for i in ids]

        def decode(self, ids: list[int]) -> str:
            return f"w{ids[0]}"

    model = build("bert", TEXT)
    bochner.convert(model, bochner.Recipe("positive", 16))
    text = " ".join(f"w{i}" for i in range(1, 13))
    drawn = head_pictures(model, Words(), text)
    assert drawn.tokens[:2] == ["w1", "w2"]
    seen: list[torch.Tensor] = []

    def look(name: str, call: Call) -> None:
        seen.append(attention_weights(call, Far.of(call).allowed)[0])

    bochner.revert(model)
    with recording(model, look):
        run(model, Words()([text]))
    for exact, mine, converted in zip(seen, drawn.exact, drawn.converted, strict=True):
        assert torch.allclose(exact, mine, atol=1e-5)
        assert torch.allclose(converted.sum(-1), torch.ones(converted.shape[:-1]), atol=1e-4)
        assert not torch.allclose(exact, converted, atol=1e-2)


@pytest.mark.model
def test_a_model_with_many_heads_shows_some_layers_and_says_so() -> None:
    pytest.importorskip("transformers")
    from hf_models import TEXT, build

    import bochner
    from bochner.report.model import head_pictures, spread

    class Words:
        pad_token = "w0"

        def __call__(self, texts: list[str], **_: object) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.arange(1, 13)[None]}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [f"w{i}" for i in ids]

        def decode(self, ids: list[int]) -> str:
            return f"w{ids[0]}"

    model = build("bert", TEXT)
    bochner.convert(model, bochner.Recipe("positive", 16))
    whole = head_pictures(model, Words(), "any")
    assert whole.layers == [0, 1]
    assert "layers are shown" not in whole.caption
    assert not torch.allclose(whole.exact[0], whole.converted[0], atol=1e-2)
    some = head_pictures(model, Words(), "any", most_heads=4)
    assert len(some.exact) == 1
    assert "1 of 2 layers are shown: all 8 heads" in some.caption
    assert spread(list("abcdefghij"), [10] * 10, 40) == ["a", "d", "g", "j"]
    assert spread(["a"], [1000], 300) == ["a"]


def test_the_crossing_is_where_the_lines_cross_and_the_sentence_agrees() -> None:
    pytest.importorskip("transformers")
    from bochner.report.cost import crossing, crossing_sentence, round_length

    never = {512: {"exact": 1.0, "plan": 2.0}, 1024: {"exact": 2.0, "plan": 3.0}}
    assert crossing(never) is None
    assert "Exact attention is faster at every length" in crossing_sentence(None, never)
    later = {512: {"exact": 1.0, "plan": 2.0}, 2048: {"exact": 16.0, "plan": 8.0}}
    where = crossing(later)
    assert where == pytest.approx(1024, rel=1e-6)
    assert "Below about 1,000 tokens" in crossing_sentence(where, later)
    assert round_length(937) == 940


@pytest.mark.model
def test_the_page_of_a_target_compares_with_exact_attention_and_shows_every_point() -> None:
    pytest.importorskip("transformers")
    from dataclasses import replace

    from hf_models import TEXT, build

    import bochner
    from bochner.report.model import Place, target_page

    g = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(5, 55, (1, 48), generator=g)} for _ in range(12)]
    target = bochner.Target(keep=0.5, minimize="time", length=8192)
    found = bochner.search(build("bert", TEXT), target, batches)
    assert found.met
    assert found.beyond  # the model has 512 positions
    assert any("has positions for 512 tokens: at 8,192" in reason for reason in found.reasons)
    assert not any("to verify at 8,192" in reason for reason in found.reasons)
    times = {512: {"exact": 1.0, "plan": 0.5}, 8192: {"exact": 9.0, "plan": 1.0}}
    beyond = target_page("t", found, times=times, place=Place("a")).html()
    assert "Not at 8,192 tokens as it is: the model has positions for 512." in beyond
    assert 'class="verdict no"' in beyond
    assert "bochner search a --keep 0.5 --length 512" in beyond
    assert "beyond them its attention alone was timed" in beyond
    within = target_page("t", replace(found, positions=None), times=times, place=Place("a")).html()
    assert re.search(r"Convert it. .* on validation texts of 48 tokens", within)
    assert found.time_share == found.frontier[found.chosen].attention
    # Two choices with as many approximate heads, the dearer one last.
    first = replace(found.frontier[found.chosen], attention=0.02)
    found = replace(found, frontier=[first, replace(first, attention=0.04)], chosen=0)
    html = target_page("t", found, times={512: {"exact": 1.0, "plan": 0.5}}, place=Place("a")).html()
    table = html[html.index("What was measured") :].partition("</table>")[0]
    assert re.findall(r"<tr( class=chosen)?><td>(\d):", table) == [(" class=chosen", "1"), ("", "2")]
    assert re.findall(r"<td>([\d.]+)%</td></tr>", table) == ["2.0", "4.0"]


def test_after_a_loss_the_page_asks_for_what_may_help() -> None:
    """Longer texts and a lower quality after a loss on speed; more memory where memory was the limit; never shorter."""
    pytest.importorskip("transformers")
    from types import SimpleNamespace

    from bochner.report.model import Place, _steps

    def told(keep: float | None, memory: float | None) -> str:
        goal = SimpleNamespace(keep=keep, memory=memory, length=2000)
        found: Any = SimpleNamespace(goal=goal, beyond=False, worthwhile=False)
        return " ".join(f"{sentence} {code}" for sentence, code in _steps(found, Place("m")))

    assert "longer sequences" in told(0.99, None)
    assert "bochner search m --keep 0.99 --length 4000" in told(0.99, None)
    assert "bochner search m --keep 0.97 --length 2000" in told(0.99, None)
    assert told(None, 0.1) == "Allow more memory. bochner search m --memory 0.2 --length 2000"


def test_what_a_page_says_to_do_next_names_where_the_model_is() -> None:
    pytest.importorskip("transformers")
    from bochner.report.model import Place

    here = Place("my model", text="sample.txt", loader="BertModel")
    assert here.convert("--keep 0.9") == "bochner convert 'my model' 'my model-linear' --keep 0.9 --text sample.txt"
    assert "transformers.BertModel.from_pretrained('my model-linear')" in here.load()[1]
    assert Place("a/b/", "out").saved == "out"
    assert Place("a/b/").saved == "b-linear"


@pytest.mark.filterwarnings("ignore:The model has .* positions:bochner.BochnerWarning")
def test_a_recipe_is_judged_by_lengths_that_the_model_can_read() -> None:
    pytest.importorskip("transformers")
    from hf_models import TEXT, build

    import bochner
    from bochner.hf.evaluate import Measure, Quality
    from bochner.report.model import Held, Place, recipe_page

    model = build("bert", TEXT)
    bochner.convert(model, bochner.Recipe("positive", 16))
    held = Held.__new__(Held)
    held.count, held.verifier = 3, types.SimpleNamespace(length=129)
    times = {512: {"exact": 1.0, "plan": 0.9}, 4096: {"exact": 9.0, "plan": 1.0}}
    quality = Quality({"cosine": Measure(torch.tensor([0.01]))}, {"cosine": 0.99})
    plan = bochner.Conversion.of(model).plan
    html = recipe_page("t", plan, quality, held, times, Place("a", "b"), positions=512).html()
    verdict = html.partition('<p class="verdict">')[2].partition("</p>")[0]
    assert "by cosine alone on 3 validation texts of up to 129 tokens" in verdict
    assert "takes 90% of the exact time at 512 tokens" in verdict
    assert "which distills the maps" in html
    assert "4,096" not in verdict
    table = html[html.index("What it costs, by length") :].partition("</table>")[0]
    assert [row.split("</td><td>")[0] for row in table.split("<tr><td>")[1:]] == ["512", "4,096"]
    bochner.revert(model)
    bochner.convert(model, bochner.Recipe(None, window=8))
    plan = bochner.Conversion.of(model).plan
    assert "distills" not in recipe_page("t", plan, quality, held, times, Place("a", "b")).html()  # nothing can learn
