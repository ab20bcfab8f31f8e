#!/usr/bin/env python3
"""Fails for a configuration key whose status is `built` although no code reads its field.

    tools/check_config_keys.py [BUILD_DIR]      BUILD_DIR holds compile_commands.json; build/release if left out

tests/golden/config_keys.txt names for each key the struct that lists it and its status. The tool copies the headers src/config/*_config.hpp,
marks each field in the copies as deprecated, and has the compiler check the files that use configurations against the copies: it warns
of each use by its type, so that reading ckpt.interval is not taken for reading log.interval. Uses in src/config/ are not counted, for
checking a value is not acting on it; the exception is cli.cpp, which acts on dry_run. Keys without effect need the status inert or
not_built, those that resolving hands to other keys passed_on (config_test proves that it does).
"""
import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/config_keys.txt"
FIELD = re.compile(r'v\.field\(\s*"(\w+)",\s*(\w+),')
STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? \{$(.*?)^\};$", re.M | re.S)
USE = re.compile(r"^([^:\s]+):\d+:\d+: warning: .*is deprecated: PRL_KEY (\w+)\.(\w+) ", re.M)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
CONFIGURATION = re.compile(r"config/\w+_config\.hpp$")
COMPILE_TIMEOUT_S = 300


def read_structs():
    """Name -> (base or None, {key: member}) of every struct with fields."""
    structs = {}
    for header in sorted((ROOT / "src/config").glob("*_config.hpp")):
        for name, base, body in STRUCT.findall(header.read_text()):
            structs[name] = (base or None, dict(FIELD.findall(body)))
    return structs


def built_fields(structs):
    """(struct, member) -> one key that reaches it, for every field that is built in at least one place."""
    fields = {}
    for line in GOLDEN.read_text().splitlines():
        words, owner, status = line.rsplit(" | ", 2)
        command, key, kind = words.split(" ")[:3]
        if status != "built" or kind.startswith(("section", "list[section")):
            continue
        name = key.rsplit(".", 1)[-1]
        while owner in structs and name not in structs[owner][1] and structs[owner][0]:
            owner = structs[owner][0]
        if owner not in structs or name not in structs[owner][1]:
            sys.exit(f"config keys: {command} {key} is listed by {owner}, whose visit() was not found in src/config/*_config.hpp")
        fields.setdefault((owner, structs[owner][1][name]), f"{command} {key}")
    return fields


def mark_fields(folder, structs):
    """Copies of the headers in which the compiler warns of every use of a field."""
    (folder / "config").mkdir()
    for header in sorted((ROOT / "src/config").glob("*_config.hpp")):
        text = header.read_text()

        def marked(match):
            name, body = match.group(1), match.group(3)
            for member in set(structs[name][1].values()):
                declaration = re.compile(rf"^  ((?:std::|[A-Z]|bool|int|double|float)[^;()\n]*\b{member}(?:;| = |\{{))", re.M)
                body, count = declaration.subn(rf'  [[deprecated("PRL_KEY {name}.{member} ")]] \1', body, count=1)
                if count == 0:
                    sys.exit(f"config keys: {header.name}: no declaration of {name}.{member} was found; write it on one line")
            return match.group(0).replace(match.group(3), body)

        (folder / "config" / header.name).write_text(STRUCT.sub(marked, text))


@functools.cache
def reads_configurations(file):
    """Whether the file includes one of the marked headers, directly or not."""
    included = INCLUDE.findall(file.read_text())
    return any(CONFIGURATION.match(name) or ((ROOT / "src" / name).exists() and reads_configurations(ROOT / "src" / name)) for name in included)


def readers(source):
    """Of a source, or of those that CMake joined to it, the files that read a configuration."""
    source = pathlib.Path(source)
    files = [source]
    if source.suffix == ".cxx":
        files = [pathlib.Path(line.split('"')[1]) for line in source.read_text().splitlines() if line.startswith("#include")]
    return [file for file in files if reads_configurations(file)]


def commands(build, marked):
    """Compiler commands that check, without output, all files that may use a configuration."""
    modules = set()
    for file in (ROOT / "src").glob("*/**/*.cpp"):
        if not file.name.endswith(("_test.cpp", "_bench.cpp")) and reads_configurations(file):
            modules.add(file.relative_to(ROOT / "src").parts[0])
    modules.discard("config")
    wanted = re.compile(r"/prl_(%s)\.dir/|/prl\.dir/" % "|".join(sorted(modules)))
    of_target = {}  # target -> (one of its commands, the place of the source in it, its directory, all that reads a configuration)
    config_command = None
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        if words and os.path.basename(words[0]) == "ccache":
            words = words[1:]
        output = words[words.index("-o") + 1]
        target = re.search(r"[^/]+\.dir/", output)
        if "/prl_config.dir/" in "/" + output:
            config_command = (words, entry["directory"])
        elif wanted.search("/" + output) and entry["file"].endswith((".cpp", ".cxx")) and "cmake_pch" not in entry["file"]:
            files = readers(entry["file"])
            if files:
                of_target.setdefault(target[0], (words, words.index(entry["file"]), entry["directory"], []))[3].extend(files)
    if config_command is None or not of_target:
        sys.exit(f"config keys: {build}/compile_commands.json has no commands of src/config and its users; run cmake --preset release")
    found = []
    for words, place, directory, files in sorted(of_target.values(), key=lambda of: -len(of[3])):
        # Templates that all files of a module use are instantiated once.
        joined = marked / f"part_{len(found)}.cxx"
        joined.write_text("".join(f'#include "{file}"\n' for file in files))
        found.append((words[:place] + [str(joined)] + words[place + 1:], directory))
    words, directory = config_command
    found.append((words[: words.index("-c") + 1] + [str(ROOT / "src/config/cli.cpp"), "-o", "unused"], directory))
    return [(check_only(words, marked), directory) for words, directory in found]


def check_only(words, marked):
    at = words.index("-o")
    words = words[:at] + words[at + 2:]
    words = [word for word in words if word not in ("-c", "-Werror")]
    return [words[0], f"-I{marked}", "-fsyntax-only", "-fdiagnostics-color=never"] + words[1:] + ["-Wdeprecated-declarations", "-Wno-error"]


def uses(command, directory):
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        sys.exit(f"config keys: the compiler failed: {' '.join(command)}\n{done.stderr[-4000:]}")
    found = set()
    for path, struct, member in USE.findall(done.stderr):
        path = os.path.normpath(os.path.join(directory, path))
        if "/config/" not in path or path.endswith("/src/config/cli.cpp"):
            found.add((struct, member))
    return found


def main():
    build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/release").resolve()
    structs = read_structs()
    built = built_fields(structs)
    used = set()
    with tempfile.TemporaryDirectory(prefix="prl_config_keys_") as folder:
        marked = pathlib.Path(folder)
        mark_fields(marked, structs)
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for found in pool.map(lambda job: uses(*job), commands(build, marked)):
                used |= found
    unread = sorted(key for field, key in built.items() if field not in used)
    for key in unread:
        print(f"config keys: {key} is accepted and no code reads it: make it work, or give it the status inert or not_built in visit()")
    if not unread:
        print(f"config keys: every one of {len(built)} built fields is read")
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main())
