"""Renders the chart with the real `helm`, and finds things in what comes out.

It only runs helm and reads YAML; the tests state what should be in there.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.repository import ROOT

CHART = ROOT / "helm" / "tidemark"
RELEASE = "demo"
NAME = "demo-tidemark"

Manifest = dict[str, Any]
Values = Mapping[str, Any]
NO_VALUES: Values = {}


def helm(*arguments: str, values: Values = NO_VALUES) -> subprocess.CompletedProcess[str]:
    """Run helm; `values` go on top of the chart's own."""
    command = [str(Path(sys.executable).parent / "helm"), *arguments, "--values", "-"]
    return subprocess.run(
        command, input=yaml.safe_dump(dict(values)), capture_output=True, text=True, timeout=60
    )


@cache
def render_text(values_json: str, chart: Path) -> str:
    """What helm prints; the same values are rendered once in a run."""
    values = json.loads(values_json)
    done = helm("template", RELEASE, str(chart), "--namespace", "queues", values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: Values = NO_VALUES, chart: Path = CHART) -> dict[str, Manifest]:
    """Everything the chart makes, by `Kind/name`."""
    text = render_text(json.dumps(dict(values)), chart)
    manifests = [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
    rendered = {f"{each['kind']}/{each['metadata']['name']}": each for each in manifests}
    assert len(rendered) == len(manifests), "two resources of one name"
    return rendered


def refusal(values: Values) -> str:
    """What helm says about values that it does not take."""
    done = helm("template", RELEASE, str(CHART), values=values)
    assert done.returncode != 0, "rendered without complaint"
    return done.stderr


def pod_template(manifest: Manifest) -> Manifest | None:
    """What the pods of a resource look like; None if it makes none."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "Pod":
        return manifest
    if kind == "CronJob":
        return _mapping(spec["jobTemplate"]["spec"]["template"])
    if kind in ("Deployment", "StatefulSet"):
        return _mapping(spec["template"])
    return None


def pods(rendered: Mapping[str, Manifest]) -> Iterator[tuple[str, Manifest]]:
    for key, manifest in rendered.items():
        template = pod_template(manifest)
        if template is not None:
            yield key, template


def container(template: Manifest) -> Manifest:
    """The one container of a pod."""
    (only,) = template["spec"]["containers"]
    return _mapping(only)


def environment(container: Manifest) -> dict[str, Any]:
    """Name to value, or to where the value comes from."""
    variables = container.get("env", [])
    found = {each["name"]: each.get("value", each.get("valueFrom")) for each in variables}
    assert len(found) == len(variables), "a variable is set twice"
    return found


def leaves(rendered: Mapping[str, Manifest]) -> dict[str, Any]:
    """Every value in the manifests by its path; items of lists are known by their names."""
    return dict(_leaves("", rendered))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            name = inner.get("name", index) if isinstance(inner, dict) else index
            yield from _leaves(f"{path}[{name}]", inner)
    else:
        yield path, value


def _mapping(value: Any) -> Manifest:
    assert isinstance(value, dict)
    return value
