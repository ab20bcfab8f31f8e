#!/usr/bin/env python3
"""Fails when a file in src/<module> includes a module that layers.toml does not allow it to use, and when nobody uses what it allows."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z_0-9]+)/')


def read_layers(path):
    layers = {}
    for line in path.read_text().splitlines():
        match = re.match(r'^([a-z_]+)\s*=\s*\[(.*)\]', line)
        if match:
            layers[match.group(1)] = re.findall(r'"([^"]+)"', match.group(2))
    return layers


def main():
    layers = read_layers(ROOT / "layers.toml")
    problems, used_edges = [], set()
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix not in {".hpp", ".cpp", ".cu", ".cuh"}:
            continue
        module = path.relative_to(ROOT / "src").parts[0]
        allowed = layers.get(module)
        if allowed is None:
            problems.append(f"{path.relative_to(ROOT)}: module {module} has no line in layers.toml")
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            used = match.group(1)
            used_edges.add((module, used))
            if used in layers and used != module and used not in allowed and "*" not in allowed:
                problems.append(f"{path.relative_to(ROOT)}:{number}: {module} may not include {used}")
    for module, allowed in layers.items():
        if "*" in allowed:
            continue
        for name in allowed:
            if name not in layers:
                problems.append(f"layers.toml: {module} may include {name}, which is no module")
            elif (module, name) not in used_edges:
                problems.append(f"layers.toml: no file of {module} includes {name}: remove it from the line of {module}")
    print("\n".join(problems) or f"layers: {len(layers)} modules, no include against layers.toml")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
