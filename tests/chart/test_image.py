"""The image, the chart and the package agree with each other, as far as their texts show."""

import re
import tomllib

from tests.support.chart_rendering import CHART, container, pods, render
from tests.support.chart_value_sets import VALUE_SETS
from tests.support.repository import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_chart_deploys_the_images_that_are_built_from_this_version() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    built = set(re.findall(r"--tag (\S+):\$\(VERSION\)", makefile))

    deployed = {container(template)["image"] for _, template in pods(render())}

    assert deployed == {f"{name}:{VERSION}" for name in built}


def test_the_chart_runs_containers_as_the_user_of_the_image() -> None:
    user, group = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]

    for _, template in pods(render()):
        context = template["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))


def test_every_module_that_the_chart_runs_is_let_into_the_image() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

    for values in VALUE_SETS.values():
        for _, template in pods(render(values)):
            package = container(template)["command"][2].partition(".")[0]
            assert f"!{package}/**" in ignore


def test_what_runs_is_made_from_the_bare_base_image() -> None:
    """No compiler and no installer of ours: they stay in the stages that build."""
    found = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    stages = {name: base for base, name in found}

    assert stages["services"] == stages["spark"] == "runtime"
    assert stages["runtime"] == "${BASE}"
    runtime = DOCKERFILE[DOCKERFILE.index("AS runtime") :]
    assert not re.search(r"\b(apt|apt-get|pip|uv|gcc)\b", runtime)


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = (CHART / "Chart.yaml").read_text(encoding="utf-8")

    assert re.findall(r"^(?:appVersion|version): (\S+)", chart, re.MULTILINE) == [VERSION, VERSION]
