#!/usr/bin/env python3
"""Fails when a document points to what is not there, or is listed nowhere.

Checked in every *.md file of the tree: relative links lead to a file or folder, and anchors of links to *.md files to a heading. In sources
under src/: "spec N.M" has its section in docs/specification.md, and paths docs/*.md exist. Every page under docs/ is linked from
docs/README.md; docs/configuration and docs/notebook have lists of their own.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPECIFICATION = "docs/specification.md"
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
SPEC = re.compile(r"\bspec (\d+\.\d+)\b(?! of verifiers)(?:(?:, | and )(\d+\.\d+))?")
# A path may be cut by the end of a line of a comment, so the rest of the name is asked for too.
DOCUMENT = re.compile(r"\bdocs/[\w/-]+\.md\b")


def tree_files(*patterns):
    # --others: a new file counts before it is added.
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:  # a copy of the tree without git
        return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.rglob(pattern.removeprefix("src/"))
                      if path.relative_to(ROOT).parts[0] not in {"build", "outputs"})
    return [name for name in listed.stdout.split("\n") if name and (ROOT / name).is_file()]


def prose(text):
    """The text without blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S))


def anchors(path):
    """The anchors that GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", re.sub(r"^(```|~~~).*?^\1", "", path.read_text(), flags=re.M | re.S), flags=re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


def problems_of_page(name):
    problems = []
    page = ROOT / name
    for match in LINK.finditer(prose(page.read_text(errors="replace"))):
        target, _, anchor = (match.group(1) or match.group(2)).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            problems.append(f"{name}: the link to {target} leads nowhere")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            problems.append(f"{name}: {target or name} has no heading for #{anchor}")
    return problems


def problems_of_source(name, sections):
    problems = []
    text = (ROOT / name).read_text(errors="replace")
    for match in SPEC.finditer(text):
        for section in filter(None, match.groups()):
            if section not in sections:
                problems.append(f"{name}: cites spec {section}, which {SPECIFICATION} does not have")
    for document in sorted(set(DOCUMENT.findall(text))):
        # Names of documents elsewhere begin with their host or repository.
        if not (ROOT / document).is_file() and not re.search(rf"[\w.]/?{re.escape(document)}|{re.escape(document)} of ", text):
            problems.append(f"{name}: names {document}, which does not exist")
    return problems


def unlisted(pages):
    """Pages under docs/ that the README.md nearest above them, or docs/README.md, does not link to."""
    listed = set()
    for index in (name for name in pages if re.fullmatch(r"docs/(\w+/)?README\.md", name)):
        folder = (ROOT / index).parent
        listed |= {(folder / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / index).read_text())}
    return [name for name in pages if name.startswith("docs/") and name != "docs/README.md" and (ROOT / name).resolve() not in listed]


def main():
    sections = set(re.findall(r"^### (\d+\.\d+)\b", (ROOT / SPECIFICATION).read_text(), flags=re.M))
    pages = tree_files("*.md")
    problems = [problem for name in pages for problem in problems_of_page(name)]
    problems += [f"{name}: no README.md under docs/ lists it" for name in unlisted(pages)]
    for name in tree_files("src/*.hpp", "src/*.cpp", "src/*.cu", "src/*.cuh"):
        problems += problems_of_source(name, sections)
    print("\n".join(problems) or f"documents: {len(pages)} pages, every link and every cited section exists")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
