"""Runs other packages' own tests under `hmpx.convert()` and says which fail, and why.

    python zoo/peers.py einops                      # three runs; rewrites its part of docs/evidence/peers.md
    python zoo/peers.py torchmetrics --policy none  # one comparison only, printed

Needs an environment with hmpx, pytest and the package; `peers.ini` names the packages. Each test
runs with plain torch, under a policy that casts nothing (any difference is a fault of hmpx), and
under plain ``hmpx.convert()``. What passes in plain torch and fails under the default is run again
under four variations of it, which tell why it fails without reading what it says:

crash            no comparison failed, but a call raised: a kernel is missing, or hmpx is at fault
dtype asserted   the test compares dtypes, or passes where comparisons are blind to them
tolerance        it passes where comparisons allow for bf16's rounding; or, in fp32 tensors, where
                 values are rounded to one bit less than fp32 has, but not where to those of bf16:
                 it asks for more than bf16 can give
other            everything else, to be looked at one by one
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
DOCUMENT: Final = FOLDER.parent / "docs" / "evidence" / "peers.md"

Results = Mapping[str, Mapping[str, Any]]  # name of a test -> what became of it

CRASH, DTYPE, TOLERANCE, OTHER = "crash", "dtype asserted", "tolerance", "other"
CLASSES: Final = (CRASH, DTYPE, TOLERANCE, OTHER)

#: Runs of what fails under the default, which tell why.
VARIATIONS: Final = ("typeless", "loose", "rounded", "fine")


@dataclass(frozen=True)
class Peer:
    """A package and its tests, as `peers.ini` has them."""

    name: str
    distribution: str
    source: str
    tests: tuple[str, ...]
    every: int
    options: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def version(self) -> str:
        """The installed version."""
        return importlib.metadata.version(self.distribution)


def read_peers(path: Path = FOLDER / "peers.ini") -> dict[str, Peer]:
    """Returns the packages that a file describes, by name."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(path.read_text("utf-8"))
    return {name: _peer(name, parser[name]) for name in parser.sections()}


def _peer(name: str, section: configparser.SectionProxy) -> Peer:
    variables = [line.partition("=") for line in section.get("environment", "").split()]
    return Peer(
        name=name,
        distribution=section["distribution"],
        source=section["source"],
        tests=tuple(section["tests"].split()),
        every=section.getint("every", 1),
        options=tuple(shlex.split(section.get("options", ""))),
        environment={key: value for key, _, value in variables},
    )


# --- running -----------------------------------------------------------------------------------


def fetch(peer: Peer, folder: Path) -> Path:
    """Returns the unpacked source distribution of the installed version of a package.

    Raises:
        SystemExit: pip can't get it.
    """
    done = sorted(folder.glob(f"{peer.distribution}-{peer.version}/"))
    if not done:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        source_only = ["--no-binary", peer.distribution, "--dest", str(folder)]
        requirement = f"{peer.distribution}=={peer.version}"
        if subprocess.run([*pip, *source_only, requirement], check=False).returncode:
            sys.exit(f"pip can't download the source distribution of {requirement}")
        name = re.sub(r"[-_.]+", "[-_.]", peer.distribution)
        for archive in folder.glob(f"{name}-{peer.version}.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        done = sorted(folder.glob(f"{name}-{peer.version}/"))
    return done[0]


def targets(peer: Peer, folder: Path) -> tuple[Path, list[str]]:
    """Returns where pytest is to run and what it is to be given there."""
    if peer.source == "installed":
        spec = importlib.util.find_spec(peer.tests[0])
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"no package {peer.tests[0]} is installed")
        package = spec.submodule_search_locations[0]
        options = ["--doctest-modules", "--doctest-ignore-import-errors", f"--rootdir={package}"]
        where = tempfile.mkdtemp(dir=folder)  # examples may write files
        return Path(where), [*options, package]
    where = fetch(peer, folder)
    found = [test for test in peer.tests if (where / test).exists()]
    if not found:
        sys.exit(f"the source distribution of {peer.name} {peer.version} holds no {peer.tests[0]}")
    return where, found


def run(
    peer: Peer,
    which: str,
    folder: Path,
    *,
    every: int,
    seconds: int,
    only: Iterable[str] = (),
    saved: bool = False,
) -> dict[str, Any]:
    """Returns what became of each test in one run; see `peers_plugin` for what runs there are.

    Raises:
        SystemExit: pytest didn't get as far as running tests.
    """
    results = folder / f"{peer.name}-{which}.json"
    if saved and results.exists():
        return dict(json.loads(results.read_text("utf-8")))
    results.unlink(missing_ok=True)
    where, tests = targets(peer, folder)
    command = [sys.executable, "-m", "pytest", "-p", "peers_plugin", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_randomly"):
        command += ["-p", "no:randomly"]
    command += ["-q", "--no-header", "--tb=no", "-o", "addopts=", "-W", "ignore"]
    command += ["--continue-on-collection-errors", f"--peers-run={which}"]
    command += [f"--peers-results={results}", f"--peers-every={every}"]
    command += [f"--peers-seconds={seconds}", *peer.options]
    names = sorted(only)
    if names:
        listed = folder / f"{peer.name}-only.json"
        listed.write_text(json.dumps(names), encoding="utf-8")
        command.append(f"--peers-only={listed}")
        files = sorted({name.partition("::")[0] for name in names})
        if peer.source == "installed":
            files = [str(Path(tests[-1]) / file) for file in files]
        tests = [*(option for option in tests if option.startswith("--")), *files]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(FOLDER), str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        **peer.environment,
    }
    log = folder / f"{peer.name}-{which}.log"
    with log.open("w", encoding="utf-8") as file:
        command += tests
        subprocess.run(command, cwd=where, env=environment, stdout=file, stderr=file, check=False)
    if not results.exists():
        sys.exit(f"pytest failed; see {log}:\n{log.read_text('utf-8')[-2000:]}")
    return dict(json.loads(results.read_text("utf-8")))


# --- comparing ---------------------------------------------------------------------------------


def differences(plain: Results, other: Results) -> list[str]:
    """Returns the tests whose outcome differs, those that one run alone collected included.

    A test that timed out in either run is no difference: that tells of the machine.
    """
    found = []
    for name in sorted({*plain, *other}):
        outcomes = {_outcome(plain, name), _outcome(other, name)}
        if len(outcomes) > 1 and TIMED_OUT not in outcomes:
            found.append(name)
    return found


def newly_failing(plain: Results, other: Results) -> list[str]:
    """Returns the tests that don't fail in plain torch, and do in another run."""
    return [
        name
        for name in differences(plain, other)
        if _outcome(other, name) in {"failed", "not collected", "missing"}
    ]


TIMED_OUT: Final = "timed out"


def _outcome(results: Results, name: str) -> str:
    result = results.get(name, {"outcome": "missing"})
    return TIMED_OUT if result.get("exception") == "TimedOutError" else str(result["outcome"])


def classify(failure: Mapping[str, Any], passes: Mapping[str, bool]) -> str:
    """Returns why a test fails under the default, one of `CLASSES`.

    Args:
        failure: What the default run noted of it.
        passes: For each of `VARIATIONS`, whether the test passes there.
    """
    if not failure.get("is_comparison", False):
        return CRASH
    if failure.get("compares_dtypes") or passes["typeless"]:
        return DTYPE
    if passes["loose"] or (passes["fine"] and not passes["rounded"]):
        return TOLERANCE
    return OTHER


def reasons(failing: Results, variations: Mapping[str, Results]) -> dict[str, str]:
    """Returns failing test -> why, from the runs of all `VARIATIONS`."""
    return {
        name: classify(
            failure,
            {which: _outcome(variations[which], name) == "passed" for which in VARIATIONS},
        )
        for name, failure in failing.items()
    }


# --- writing -----------------------------------------------------------------------------------


def counts(results: Results) -> str:
    """Returns how many tests had each outcome, in words."""
    found = Counter(_outcome(results, name) for name in results)
    order = ("passed", "failed", "skipped", "not collected", TIMED_OUT)
    return ", ".join(f"{found[each]} {each}" for each in order if found[each])


def section(
    title: str, runs: Mapping[str, Results], why: Mapping[str, str], notes: Sequence[str]
) -> str:
    """Returns what docs/evidence/peers.md says of one package."""
    lines = [f"### {title}", "", *notes, ""]
    lines += ["| run | outcomes | differences from plain torch |", "|---|---|---|"]
    for which, results in runs.items():
        said = "" if which == "plain" else str(len(differences(runs["plain"], results)))
        lines.append(f"| {which} | {counts(results)} | {said} |")
    if why:
        lines += ["", "| fails under the default for | tests |", "|---|---|"]
        found = Counter(why.values())
        lines += [f"| {each} | {found[each]} |" for each in CLASSES if found[each]]
        told = [name for name, each in why.items() if each in {CRASH, OTHER}]
        if told:
            lines += ["", "| test | class | what it says |", "|---|---|---|"]
            lines += [_told(name, why[name], runs["default"][name]) for name in told]
    return "\n".join(lines)


def _told(name: str, why: str, failure: Mapping[str, Any]) -> str:
    said = f"{failure.get('exception', '')}: {failure.get('said', '')}"
    short = said if len(said) <= 160 else said[:157] + "..."
    test = name.rpartition("/")[2]
    return f"| `{test}` | {why} | {short.replace('|', chr(92) + '|')} |"


def put(text: str, name: str, content: str) -> str:
    """Returns a document with the part between the marks of ``name`` replaced, or added at its end."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    part = f"{begin}\n{content.strip()}\n{end}"
    if begin in text:
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        return before + part + after
    return f"{text.rstrip()}\n\n{part}\n"


@contextlib.contextmanager
def working_folder(path: Path | None) -> Iterator[Path]:
    """Makes the folder for downloads and logs: a given one stays, another one goes."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def main() -> None:
    """Runs the comparison that the command line asks for."""
    peers = read_peers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peer", choices=sorted(peers))
    parser.add_argument("--policy", choices=["none", "default"], help="compare with this run only")
    parser.add_argument("--every", type=int, help="run one test in so many")
    parser.add_argument("--seconds", type=int, default=60, help="a test's time limit")
    parser.add_argument("--folder", type=Path, help="for downloads, results and logs; is kept")
    parser.add_argument("--saved", action="store_true", help="repeat no run that --folder holds")
    parser.add_argument("--write", type=Path, default=DOCUMENT, help="the document to write to")
    options = parser.parse_args()
    peer = peers[options.peer]
    settings = {"every": options.every or peer.every, "seconds": options.seconds}
    settings["saved"] = options.saved
    asked = [options.policy] if options.policy else ["none", "default"]
    with working_folder(options.folder) as folder:
        runs = {which: run(peer, which, folder, **settings) for which in ["plain", *asked]}
        why: dict[str, str] = {}
        names = newly_failing(runs["plain"], runs.get("default", runs["plain"]))
        failing = {name: runs["default"].get(name, {}) for name in names}
        if failing:
            again = settings | {"only": names, "every": 1}
            variations = {which: run(peer, which, folder, **again) for which in VARIATIONS}
            why = reasons(failing, variations)
    where = "examples in docstrings" if peer.source == "installed" else "tests of its sdist"
    share = "all" if settings["every"] == 1 else f"one in {settings['every']}"
    notes = [f"{where}: {' '.join(peer.tests)}; {share} of them."]
    content = section(f"{peer.name} {peer.version}", runs, why, notes)
    for which in asked:
        for name in differences(runs["plain"], runs[which]):
            told = runs[which].get(name, {})
            print(which, why.get(name, ""), name, told.get("exception"), told.get("said"))
    print(content)
    if not options.policy:
        text = options.write.read_text("utf-8") if options.write.exists() else "# Peers\n"
        options.write.write_text(put(text, peer.name, content), encoding="utf-8")


if __name__ == "__main__":
    main()
