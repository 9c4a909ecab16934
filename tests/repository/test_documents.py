"""The repository as others meet it: no dead links, no command that does not exist, arrows between packages kept."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import typer.main

from experiments.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_relative_links_lead_somewhere(document: Path):
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{names(document)}: dead link {target}"
        if anchor and linked.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{names(document)}: dead anchor {target}"


def commands() -> list[tuple[str, list[str]]]:
    """(document, words) of every dilocox and make command in a code block or in back quotes."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        lines = [line.strip() for _, block in FENCE.findall(text) for line in block.splitlines()]
        lines += re.findall(r"`((?:sudo )?(?:\.venv/bin/)?(?:dilocox|make) [^`]+)`", FENCE.sub("", text))
        for line in lines:
            words = re.sub(r"^(\$ )?(sudo )?(\.venv/bin/)?", "", line).split("#")[0].split()
            if words and words[0] in ("dilocox", "make"):
                found.append((names(document), words))
    return found


@pytest.mark.parametrize(
    ("document", "words"), commands(), ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_documented_commands_exist_with_their_options(document: str, words: list[str]):
    if words[0] == "make":
        verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in verbs, f"{document}: make {words[1]}"
        return
    command = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{document}: dilocox {' '.join(words[1:])}"
        command, rest = command.commands[rest[0]], rest[1:]
    options = {option for p in command.params for option in p.opts} | {"--help"}
    before_program = rest[: rest.index("--")] if "--" in rest else rest
    for word in before_program:
        if word.startswith("-"):
            assert word.split("=")[0] in options, f"{document}: {' '.join(words)}: {word}"


def test_documents_show_commands():
    assert len(commands()) > 10


def imported_packages(package: str) -> set[str]:
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found


def test_imports_run_one_way():
    assert not imported_packages("testbed") & {"trainer", "experiments"}
    assert not imported_packages("trainer") & {"testbed", "experiments"}


def test_make_help_lists_every_verb():
    done = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    for verb in ("setup", "demo", "test", "test-all", "lint", "bench", "clean", "help"):
        assert re.search(rf"^{verb}\s+\S", done.stdout, re.MULTILINE), verb


def test_nothing_asks_a_shell_or_unpickles():
    for package in ("testbed", "trainer", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "shell":
                    assert isinstance(node.value, ast.Constant), path
                    assert node.value.value is False, path
        assert not imported_packages(package) & {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
