"""The runner of the experiments: arguments, exit codes, resuming, and what counts as broken."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`run.py` on a folder of three experiments: one whose claim holds, one whose does not, one that breaks."""
    spec = importlib.util.spec_from_file_location("experiments_run", EXPERIMENTS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path / "experiments"
    (folder / "results").mkdir(parents=True)
    write = "import pathlib, sys\npath = pathlib.Path(__file__)\n"
    write += "result = path.parent / 'results' / (path.stem + '.json')\n"
    count = "open(path.parent / (path.stem + '.runs'), 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    holds = f'"""Holds."""\n{write}{count}result.write_text("{{}}")\nparser = ["--quick"]\n'
    (folder / "holds.py").write_text(holds)
    (folder / "fails.py").write_text(f'"""Fails."""\n{write}{count}result.write_text("{{}}")\nsys.exit(1)\n')
    (folder / "breaks.py").write_text(f'"""Breaks."""\n{write}{count}raise ZeroDivisionError\n')
    monkeypatch.setattr(module, "HERE", folder)
    return module


def runs(module: ModuleType, name: str, folder: Path | None = None) -> int:
    file = (folder or module.HERE) / f"{name}.runs"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_typo_is_refused_and_help_runs_nothing(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["typo"], 2), (["--fast"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as stopped:
            runner.main(arguments)
        assert stopped.value.code == code
    assert "unknown experiment typo; there are breaks, fails, holds" in capsys.readouterr().err
    assert runner.main(["--list"]) == 0
    assert not any(runs(runner, n) for n in ("holds", "fails", "breaks"))


def test_what_ran_is_not_run_again_until_it_changes(runner: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["holds"]) == 0
    assert runner.main([]) == 1  # a claim fails that is said to hold, and one script breaks
    said = capfd.readouterr().out
    assert "broke down: breaks" in said
    assert "of these the gallery says that they hold: fails" in said
    assert [runs(runner, n) for n in ("holds", "fails", "breaks")] == [1, 1, 1]
    runner.main([])
    assert [runs(runner, n) for n in ("holds", "fails", "breaks")] == [1, 1, 2]
    (runner.HERE / "holds.py").write_text((runner.HERE / "holds.py").read_text() + "# changed\n")
    runner.main([])
    assert runs(runner, "holds") == 2
    runner.main(["--again", "fails"])
    assert runs(runner, "fails") == 2


def test_a_claim_that_is_known_not_to_hold_is_no_failure(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "NOT_REPRODUCED", {"fails"})
    assert runner.main(["holds", "fails"]) == 0
    assert runner.main(["breaks"]) == 1


def test_quick_runs_small_forms_in_a_copy(runner: ModuleType) -> None:
    assert runner.main(["--quick"]) == 0
    copy = runner.HERE.parent / ".quick" / "experiments"
    assert (copy / "holds.runs").read_text() == "--quick\n"
    assert not (runner.HERE / "results" / "holds.json").exists()
    assert not (copy / "fails.runs").exists()  # it has no small form


def test_what_a_quick_run_leaves_out_is_said_with_the_reason(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "LEFT_OUT", {"fails": "takes hours"})
    assert runner.main(["--quick"]) == 0
    assert "left out, fails: takes hours" in capfd.readouterr().out


def test_every_experiment_has_a_small_form_or_a_reason_for_which_it_has_none() -> None:
    spec = importlib.util.spec_from_file_location("experiments_run", EXPERIMENTS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    without = {name for name in module.names() if module.quick_arguments(name) is None}
    assert without == set(module.LEFT_OUT)
    assert len(without) < len(module.names()) / 2


def test_the_script_itself_answers_help() -> None:
    done = subprocess.run([sys.executable, str(EXPERIMENTS / "run.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--quick" in done.stdout


def gallery() -> ModuleType:
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import gallery as module
    finally:
        sys.path.remove(str(EXPERIMENTS))
    return module


def test_every_figure_and_table_of_the_papers_has_an_entry() -> None:
    papers = {p.key: p for p in gallery().PAPERS}
    counts = {"001": (11, 5), "002": (4, 0), "003": (20, 2), "004": (6, 7)}
    for key, (figures, tables) in counts.items():
        labels = [item.label for item in papers[key].items]
        for kind, count in (("Figure", figures), ("Table", tables)):
            missing = [n for n in range(1, count + 1) if not any(x.split(",")[0] == f"{kind} {n}" for x in labels)]
            assert missing == [], f"{kind} of {key}"
    for paper in papers.values():
        for item in paper.items:
            assert bool(item.script) != bool(item.reason or item.page) or item.script, f"{paper.key} {item.label}"
            assert not item.script or (EXPERIMENTS / f"{item.script}.py").exists(), item.script
            assert not item.page or (EXPERIMENTS.parent / "docs" / item.page).exists(), item.page


def test_every_experiment_is_in_the_gallery_and_its_result_can_be_read() -> None:
    module = gallery()
    scripts = {p.stem for p in EXPERIMENTS.glob("[!_]*.py")} - {"run", "gallery", "pictures", "draw"}
    text = "".join(module.pages().values())
    assert [s for s in scripts if f'<a id="{s}"></a>' not in text] == []
    for script in scripts:
        said = module.said_of(script)
        if said is not None:
            assert said.verdict in ("reproduced", "partly", "not")
            assert said.claim
            assert said.ours
            assert said.why or said.verdict == "reproduced", script


def test_every_figure_that_is_reproduced_or_partly_has_a_picture() -> None:
    module = gallery()
    for paper in module.PAPERS:
        for item in paper.items:
            said = module.said_of(item.script, item.needs) if item.script else None
            if said is not None and said.verdict in ("reproduced", "partly"):
                shown = module.pictures(item.script) or item.script in module.NO_PICTURE
                assert shown, f"{paper.key} {item.label}: {item.script} has no picture"


def test_pictures_are_drawn_from_stored_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import _gallery
    import draw

    monkeypatch.setattr(_gallery, "IMAGES", tmp_path)
    names = list(draw.PICTURES)
    assert draw.main(names) == 0
    assert sorted(p.stem for p in tmp_path.glob("*.png")) == sorted(names)
    assert set(json.loads((tmp_path / "drawn.json").read_text())) == set(names)
    for name in names:  # and they are what the gallery shows
        assert (EXPERIMENTS.parent / "docs" / "images" / "gallery" / f"{name}.png").exists()
    monkeypatch.setattr(draw, "RESULTS", tmp_path / "none")
    capsys.readouterr()
    assert draw.main(["train_table"]) == 0
    assert "left out, train_table was not run yet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        draw.main(["train_tabel"])


def test_a_script_that_covers_part_of_an_item_reproduces_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    module = gallery()
    said = module.Said("claim", "ours", "reproduced")
    monkeypatch.setattr(module, "said_of", lambda script, needs="": said)
    whole, part = (module.Item("Figure 1", "what", "some", limits=x) for x in ("", "one layer"))
    homes = {"some": "page.md"}
    assert "**reproduced** |" in module.row(whole, homes)
    assert "**partly**: one layer |" in module.row(part, homes)
    said = module.Said("claim", "ours", "not", "why")
    assert "**not**: one layer |" in module.row(part, homes)


def test_the_pages_have_one_section_for_every_script_and_are_made_of_the_results() -> None:
    pages = gallery().pages()
    for paper in gallery().PAPERS:
        for item in paper.items:
            assert f"| {item.label} |" in pages["gallery.md"]
            if item.script:
                home = re.search(rf"\[result\]\(([\w.-]+)#{item.script}\)", pages["gallery.md"])
                assert home is not None
                assert [n for n, text in pages.items() if f'<a id="{item.script}"></a>' in text] == [home[1]]
                assert item.label in pages[home[1]]
    assert "Verdict: **reproduced**" in pages["gallery-001.md"]


def test_no_picture_is_older_than_its_result() -> None:
    """Beside the pictures stands what each was drawn from; figures that have changed since want it drawn again."""
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import _gallery
        import draw
    finally:
        sys.path.remove(str(EXPERIMENTS))
    drawn = json.loads((EXPERIMENTS.parent / "docs" / "images" / "gallery" / "drawn.json").read_text())
    assert set(draw.PICTURES) <= set(drawn)
    stale = [name for name, entry in drawn.items() if _gallery.digest(entry["results"]) != entry["sha256"]]
    assert stale == [], f"run python experiments/draw.py {' '.join(stale)}"


def test_a_page_says_of_every_item_what_the_index_says_and_the_index_counts_in_a_sentence() -> None:
    module = gallery()
    pages = module.pages()
    for paper in module.PAPERS:
        for item in paper.items:
            if item.script and item.limits:
                line = f"- Verdict on {paper.key} {item.label}, {item.title}: {module.told(item)}."
                assert any(line in text for text in pages.values()), line
            assert item.script or item.reason, item.label
    said = module.summary({"reproduced": 3, "partly": 2, "not": 1, "reason": 4, "ours": 5})
    assert said.startswith(
        "Of the 10 figures, tables and statements of the papers 3 are reproduced, 2 in part and 1 not;"
    )
    assert said.endswith("5 experiments go beyond the papers.\n")


def test_the_ablations_of_the_landmark_fit_run_and_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny random model with words for texts; what the file holds already is not measured again."""
    models = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import landmark_ablations as ablations

    torch.manual_seed(0)
    config = models.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    model = models.BertModel(config).eval()
    g = torch.Generator().manual_seed(0)
    texts = [" ".join(str(int(i)) for i in torch.randint(50, (160,), generator=g)) for _ in range(12)]

    def tokenizer(text: str, max_length: int, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()[:max_length]]])}

    monkeypatch.setattr(ablations.demo, "load_minilm", lambda: (model, tokenizer))
    monkeypatch.setattr(ablations.data, "paragraphs", lambda split, count: texts[:8] if count > 16 else texts[8:])
    monkeypatch.setattr(ablations, "reviews", lambda count, words: texts[10:])
    small = {n: v._replace(m=4, M=8, texts=8) for n, v in ablations.VARIANTS.items() if n in ("window", "positive")}
    monkeypatch.setattr(ablations, "VARIANTS", {**small, "as it is": ablations.Variant(m=4, M=8)})
    out = tmp_path / "results.json"
    arguments = ["--layers", "1", "--only", "window", "--json", str(out)]
    assert ablations.main(arguments) == 0
    found = json.loads(out.read_text())
    assert 0 < found["window"]["other authors"] < 2
    assert 0 <= found["in the stated interval"]["window"]["same books"] <= 1
    assert set(found) == {"window", "in the stated interval"}
    found["window"]["modern"] = 9.0
    out.write_text(json.dumps(found))
    capsys.readouterr()
    monkeypatch.setattr(ablations, "run", None)  # nothing left to measure
    assert ablations.main(arguments) == 0
    assert "9.000" in capsys.readouterr().out


def test_verdicts_say_what_the_figures_say() -> None:
    readers = gallery().READERS
    names = [
        f"{h} hybrid below positive and trig in {k}" for h in ("angular", "gaussian") for k in ("wasserstein", "ks")
    ]
    lengths = {"queries": 4.4, "classes": 1.9}
    for wins, verdict in (((0, 0, 0, 0), "not"), ((4, 0, 0, 0), "partly"), ((4, 4, 4, 4), "reproduced")):
        found = {name: f"at {n} of 4 sizes" for name, n in zip(names, wins, strict=True)}
        found["angular hybrid fewer negative estimates than trig"] = f"at {max(2, *wins)} of 4 sizes"
        assert readers["softmax_metrics"]({"verdict": found, "lengths": lengths}).verdict == verdict
    losses = {"exact": 6.0, "tree": 6.1, "uniform": 9.0}
    for paper, verdict in ((6.05, "reproduced"), (8.0, "partly"), (9.5, "not")):
        runs = {f"{k}/0": {"loss": v} for k, v in {**losses, "trig, as the paper": paper}.items()}
        assert readers["sampled_softmax"]({"runs": runs}).verdict == verdict
    for held, verdict in ((("holds", "holds"), "reproduced"), (("holds", "fails"), "partly"), (("fails",) * 2, "not")):
        said = readers["sampler_variance"]({"variance": {"tree": [0.1]}, "verdict": dict(zip("ab", held, strict=True))})
        assert said.verdict == verdict
