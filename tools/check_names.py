#!/usr/bin/env python3
"""Names in unnamed namespaces differ within a module, since its files are compiled several at a time (PRL_JOINED in cmake/prl.cmake), and from
the names of its headers. How many files are one depends on the build; this finds a clash whatever it is. Types, constants and variables differ
by name, functions by name and parameters."""
import pathlib
import re
import sys

CALL = re.compile(r"^(?:template <.*> )?(?:[\w:<>,&*\[\] ]+[ &*>])(\w+)\(([^;{}]*)\)(?: const)?(?: noexcept)?(?: ->[^{;]*)? ?[{;]")
VALUE = re.compile(r"^(?:inline |static |thread_local )*(?:constexpr|const|constinit|std::\w+|bool|int)\b[^({]*?\b(\w+)(?:\[[^\]]*\])?\s*(?:=|\{|;)")
TYPE = re.compile(r"^(?:template <.*> )?(?:struct|class|enum class|enum|union) (?:\[\[\w+\]\] )?(\w+)(?!\w|::)(?: final)?(?: : .*)? ?[{;]?")


def statements(text):
    """(namespace, is unnamed, first line or more of it) of what begins at the left margin."""
    spaces = []
    lines = text.split("\n")
    for at, line in enumerate(lines):
        opened = re.match(r"^(?:inline )?namespace ?([\w:]*) ?\{", line)
        if opened:
            spaces.append(opened.group(1))
        elif line.startswith("}  // namespace"):
            spaces and spaces.pop()
        elif spaces and line[:1].isalpha():
            whole = line
            for more in lines[at + 1:at + 8]:
                if re.search(r"[{;]", whole):
                    break
                whole += " " + more.strip()
            yield "::".join(space for space in spaces if space), "" in spaces, whole


def types_of(parameters):
    """The parameters without their names and default values."""
    plain = re.sub(r"\s*=[^,]*", "", parameters)
    return tuple(re.sub(r"\s+\w+$", "", one.strip()) for one in plain.split(",")) if plain.strip() else ()


def names(path):
    for space, is_unnamed, line in statements(path.read_text()):
        line = re.sub(r"^\[\[\w+\]\] ", "", re.sub(r"//.*", "", line))
        if line.startswith(("namespace ", "return ", "extern ", "friend ", "static_assert", "using ")):
            continue
        if (found := TYPE.match(line)) and not re.match(r"^(?:struct|class|union|enum)\b[^{]*\(", line):
            if line.rstrip().endswith(";") and "{" not in line and "=" not in line:
                continue  # declared, not defined
            yield space, is_unnamed, found.group(1), None
        elif found := CALL.match(line):
            if line.rstrip().endswith(";") or "::" + found.group(1) in line.split("(")[0]:
                continue
            yield space, is_unnamed, found.group(1), types_of(found.group(2))
        elif "(" not in line.split("=")[0].split("{")[0] and (found := VALUE.match(line)):
            for name in {found.group(1), *re.findall(r"\b(k[A-Z]\w*)(?: =|\{)", line)}:
                yield space, is_unnamed, name, None


def check(module):
    clashes = []
    seen = {}  # (namespace, name) to [(unnamed, parameters, file)]
    for path in sorted(module.rglob("*.[ch]pp")):
        if path.name.endswith(("_test.cpp", "_bench.cpp")) or "cuda" in path.parts or "testing" in path.parts or path.name.startswith("kernels_") or \
                re.search(r"_(absent|avx2|avx512|avx512bf16|amx)\.cpp$", path.name):
            continue
        for space, is_unnamed, name, parameters in names(path):
            others = seen.setdefault((space, name), [])
            for was_unnamed, before, file in others:
                if file != path and (is_unnamed or was_unnamed) and (parameters is None or before is None or parameters == before):
                    clashes.append(f"{path}: {name} of an unnamed namespace is also in {file}; files of {module.name}/ are compiled together")
                    break
            others.append((is_unnamed, parameters, path))
    return clashes


def main():
    joined = re.search(r"set\(PRL_JOINED ([^)]*)\)", pathlib.Path("cmake/prl.cmake").read_text()).group(1).split()
    clashes = [clash for module in [*joined, "apps"] for clash in check(pathlib.Path("src") / module)]
    for clash in clashes:
        print(f"names: {clash}")
    return 1 if clashes else 0


if __name__ == "__main__":
    sys.exit(main())
