#!/usr/bin/env python3
"""Validates what `prl k8s render` writes: manifests against the published schemas of Kubernetes, and the chart against the manifests.

    tests/integration/kubernetes_client/run.py

Needs the packages of requirements.txt; run outside of such an environment it makes one and starts again there.
"""
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))
import client_venv  # noqa: E402

client_venv.enter("kubernetes", "kubernetes_validate", __file__)

import yaml  # noqa: E402

import harness  # noqa: E402
from harness import check, prl  # noqa: E402


def validate(folder, text):
    """Each document with `kubernetes-validate --strict`, which refuses properties that a kind does not have."""
    path = folder / "validated.yaml"
    path.write_text(text)
    tool = pathlib.Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([tool, "--strict", path], capture_output=True, text=True, timeout=120, check=False)
    check(done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}")


def documents(text):
    """{(kind, name): object}."""
    found = {}
    for each in yaml.safe_load_all(text):
        if each:
            key = each["kind"], each["metadata"]["name"]
            check(key not in found, f"{key} is there twice")
            found[key] = each
    return found


class Chart:
    """The part of Go's templates that the chart uses: if, else, range, and pipes of a few functions."""
    def __init__(self, folder, release):
        self.values = yaml.safe_load((folder / "values.yaml").read_text())
        self.root = {"Values": self.values, "Release": {"Name": release}}
        self.templates = [path.read_text() for path in sorted((folder / "templates").glob("*.yaml"))]

    def render(self):
        return "\n---\n".join(self.expand(text) for text in self.templates)

    def expand(self, text):
        parts, at = [], 0
        for match in re.finditer(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", text, re.S):
            before = text[at:match.start()]
            parts += [before.rstrip() if match[1] else before, ("do", match[2])]
            at = match.end()
            if match[3]:
                at += len(text[at:]) - len(text[at:].lstrip())
        parts.append(text[at:])
        out, end = self.run(parts, 0, self.root, {})
        check(end == len(parts), f"an end too many at {parts[end:end + 1]}")
        return out

    def run(self, parts, at, dot, names):
        """Text up to the part that ends the block, and its place."""
        out = ""
        while at < len(parts):
            part = parts[at]
            if isinstance(part, str):
                out += part
                at += 1
                continue
            word, _, rest = part[1].partition(" ")
            if word in ("end", "else"):
                return out, at
            if word == "if":
                is_true = bool(self.value(rest, dot, names))
                first, at = self.run(parts, at + 1, dot, names)
                second = ""
                if parts[at][1] == "else":
                    second, at = self.run(parts, at + 1, dot, names)
                out += first if is_true else second
            elif word == "range":
                variables, expression = rest.split(":=")
                key_name, value_name = (each.strip() for each in variables.split(","))
                many = self.value(expression.strip(), dot, names)
                items = sorted(many.items()) if isinstance(many, dict) else list(enumerate(many))
                begin = at + 1
                _, at = self.run(parts, begin, dot, {**names, key_name: 0, value_name: 0})
                for key, value in items:
                    out += self.run(parts, begin, value, {**names, key_name: key, value_name: value})[0]
            else:
                out += self.text(self.value(part[1], dot, names))
            at += 1
        return out, at

    @staticmethod
    def text(value):
        return str(value).lower() if isinstance(value, bool) else str(value)

    def value(self, expression, dot, names):
        result = None
        for number, stage in enumerate(expression.split(" | ")):
            words = re.findall(r'"(?:[^"\\]|\\.)*"|\((?:[^()])*\)|\S+', stage)
            arguments = [self.operand(word, dot, names) for word in words[1:]]
            result = self.call(words[0], arguments + ([result] if number else []), dot, names)
        return result

    def operand(self, word, dot, names):
        if word.startswith("("):
            return self.value(word[1:-1], dot, names)
        if word.startswith('"'):
            return json.loads(word)
        if word.startswith("$.") or word.startswith("."):
            found = self.root if word.startswith("$") else dot
            for key in word.lstrip("$.").split("."):
                found = found[key]
            return found
        return names[word]

    def call(self, word, arguments, dot, names):
        functions = {"quote": lambda value: json.dumps(self.text(value)), "int": int, "until": lambda count: list(range(count)),
                     "join": lambda between, items: between.join(items), "printf": lambda form, *rest: form % rest,
                     "and": lambda *all_of: all(all_of)}
        return functions[word](*arguments) if word in functions else self.operand(word, dot, names)


def render(folder, *flags):
    prl("k8s", "render", "--output-dir", folder, *flags)
    return (folder / "manifests.yaml").read_text()


CASES = {"defaults": [],
         "example": ["--example", "reverse-text", "--namespace", "training", "--name", "first"],
         "many": ["--trainer.replicas", 4, "--inference.replicas", 3, "--trainer.gpu.count", 8, "--inference.probes", "--trainer.probes",
                  "--secrets.enabled", "--trainer.env.NCCL_DEBUG", "INFO", "--inference.env.NOTE", 'say "hi" {{ x }}',
                  "--orchestrator.auto-start", "--orchestrator.command.0", "prl", "--orchestrator.command.1", "orchestrator",
                  "--inference.service-type", "LoadBalancer"],
         "small": ["--storage.enabled", "false", "--trainer.enabled", "false", "--inference.gpu.enabled", "false", "--orchestrator.memory", "512Mi"]}


def test_manifests_pass_the_schemas_and_the_chart_gives_the_same_objects():
    with harness.workspace("k8s") as folder:
        for name, flags in CASES.items():
            text = render(folder / name, *flags)
            validate(folder, text)
            release = "first" if name == "example" else "prime-rl"
            wanted = documents(text)
            found = documents(Chart(folder / name / "chart", release).render())
            check(found.keys() == wanted.keys(), f"{name}: {sorted(found)} and {sorted(wanted)}")
            for key, each in wanted.items():
                check(found[key] == each, f"{name}: {key} differs:\n{yaml.dump(found[key])}\n{yaml.dump(each)}")
            # Values of one case in the chart of another give the objects of the first.
            other = Chart(folder / "defaults/chart", release)
            other.values.clear()
            other.values.update(yaml.safe_load((folder / name / "chart/values.yaml").read_text()))
            check(documents(other.render()) == wanted, f"{name}: its values in the chart of the defaults give other objects")


def container_of(objects, role, name="prime-rl"):
    return objects["StatefulSet", f"{name}-{role}"]["spec"]["template"]["spec"]["containers"][0]


def env_of(container):
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_pods_learn_where_the_others_are():
    with harness.workspace("k8s-env") as folder:
        objects = documents(render(folder, "--inference.replicas", 2, "--trainer.replicas", 3, "--namespace", "rl", "--secrets.enabled"))
        roles = ("orchestrator", "inference", "trainer")
        kinds = {("PersistentVolumeClaim", "prime-rl-shared-data")}
        kinds |= {("StatefulSet", f"prime-rl-{role}") for role in roles}
        kinds |= {("Service", f"prime-rl-{role}{suffix}") for role in roles for suffix in ("", "-headless")}
        check(objects.keys() == kinds, f"{sorted(objects)}")
        env = env_of(container_of(objects, "orchestrator"))
        check(env["INFERENCE_URL"] == "http://prime-rl-inference-0.prime-rl-inference-headless.rl.svc.cluster.local:8000/v1", env)
        check(env["ADMIN_INFERENCE_URLS"].split(",") == [f"http://prime-rl-inference-{i}.prime-rl-inference-headless.rl.svc.cluster.local:8000"
                                                         for i in range(2)], env)
        trainer = container_of(objects, "trainer")
        # The engines belong to the release, whichever of their names a client uses.
        ids = {role: env_of(container_of(objects, role))["PRL_RUN_ID"] for role in ("orchestrator", "inference", "trainer")}
        check(set(ids.values()) == {"rl.prime-rl"}, ids)
        servers = env["PRL_RUN_SERVERS"].split(" ")
        check(set(env["ADMIN_INFERENCE_URLS"].split(",")) < set(servers) and len(set(servers)) == len(servers) == 2 * 2 + 4, servers)
        check("http://prime-rl-inference:8000" in servers and "http://prime-rl-inference.rl.svc.cluster.local:8000" in servers, servers)
        check("PRL_RUN_SERVERS" not in env_of(container_of(objects, "inference")), objects)
        check(env_of(trainer)["STATEFUL_REPLICAS"] == "3" and env_of(trainer)["RDZV_ENDPOINT"].endswith(":29501"), trainer)
        check(trainer["resources"]["limits"] == {"nvidia.com/gpu": 1} and "limits" not in container_of(objects, "orchestrator")["resources"], trainer)
        check(env_of(trainer)["HF_TOKEN"]["secretKeyRef"] == {"name": "prime-rl-secrets", "key": "hf-token", "optional": True}, trainer)
        check(trainer["command"][:2] == ["/bin/sh", "-c"] and trainer["command"][2] == "exec sleep infinity", trainer["command"])
        headless = objects["Service", "prime-rl-trainer-headless"]["spec"]
        check(headless["clusterIP"] == "None" and {port["name"] for port in headless["ports"]} == {"http", "nccl"}, headless)


def test_the_commands_of_the_example_are_understood():
    with harness.workspace("k8s-example") as folder:
        objects = documents(render(folder, "--example", "reverse-text"))
        for role, command in (("orchestrator", "orchestrator"), ("inference", "inference"), ("trainer", "launch --nproc-per-node 1 trainer")):
            script = container_of(objects, role)["command"][2]
            match = re.search(r"; (prl .*) \|\| exit", script)
            check(match and f"prl {command} " in match[1], script)
            words = match[1].replace("/app/", f"{ROOT}/").replace("$INFERENCE_URL", "http://localhost:8000/v1")
            words = words.replace("$ADMIN_INFERENCE_URLS", "http://localhost:8000").replace("/data/", f"{folder}/").split()[1:]
            # With one key that does not exist: all problems are told at once, so this one must be the only one.
            said = "".join(prl(*words, "--unknown-thing", 1, expect=None))
            check("1 problem in" in said and "unknown_thing" in said, said)


def test_wrong_values_are_refused_with_their_key():
    with harness.workspace("k8s-wrong") as folder:
        for flags, key in ((["--name", "No_Name"], "name"), (["--trainer.memory", "4 GB"], "trainer.memory"),
                           (["--image.pull-policy", "Sometimes"], "image.pull_policy"), (["--example", "chess"], "example"),
                           (["--inference.service-type", "Cluster"], "inference.service_type"), (["--storage.mount-path", "data"], "storage.mount_path")):
            said = "".join(prl("k8s", "render", "--output-dir", folder / "out", *flags, expect=None))
            check(key in said, f"{flags}: {said[-500:]}")
        check(not (folder / "out").exists(), "something was written")


def test_the_image_has_the_libraries_of_the_binary():
    if 'VERSION_ID="12"' not in pathlib.Path("/etc/os-release").read_text():
        raise harness.Skip("the image is Debian 12, this machine is not: its libraries have other names")
    packages = set(re.search(r"--no-install-recommends(.*?)&&", (ROOT / "Dockerfile").read_text(), re.S)[1].replace("\\", " ").split())
    needed = subprocess.run(["readelf", "-d", harness.PRL], capture_output=True, text=True, timeout=60, check=True).stdout
    libraries = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", needed)) - {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
    check(libraries, "the binary loads no library")
    for library in sorted(each for each in libraries if not each.startswith("ld-linux")):
        # Debian's packages of libraries are named after them: libfmt.so.9 is in libfmt9, libpcre2-8.so.0 in libpcre2-8-0.
        stem, version = re.fullmatch(r"(.*)\.so\.?(.*)", library).groups()
        plain = (stem + ("-" if stem[-1].isdigit() else "") + version).replace("_", "-").lower()
        known = {"libz1": "zlib1g", "libboost-json1.81.0": "libboost-json1.81.0", "libsnappy1": "libsnappy1v5", "libcrypto3": "libssl3", "libjpeg62": "libjpeg62-turbo"}
        check(known.get(plain, plain) in packages, f"the image lacks {library}: {known.get(plain, plain)} is not in {sorted(packages)}")


sys.argv = [word for word in sys.argv if word != "--skip-without-package"]
harness.main(test_manifests_pass_the_schemas_and_the_chart_gives_the_same_objects, test_pods_learn_where_the_others_are,
             test_the_commands_of_the_example_are_understood, test_wrong_values_are_refused_with_their_key,
             test_the_image_has_the_libraries_of_the_binary)
