"""What the chart makes is valid, fits together and is safe, under every set of values."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.support.chart_rendering import (
    CHART,
    NAME,
    Manifest,
    Values,
    container,
    environment,
    helm,
    pod_template,
    pods,
    render,
)
from tests.support.chart_value_sets import REDIS, VALUE_SETS
from tidemark.rpc.health import LIVENESS, READINESS
from tidemark.settings import SERVICES, BrokerSettings, StorageSettings

KUBERNETES_VERSIONS = ("1.25", "1.37")
CUSTOM = {"ServiceMonitor"}  # defined by the Prometheus operator, not by Kubernetes

KNOWN = {variable.name for service in SERVICES for variable in service.variables()}

SEVERAL = VALUE_SETS["several nodes"]
REDIS_SECRETS = {
    "TIDEMARK_REDIS_USERNAME": "tidemark",
    "TIDEMARK_REDIS_PASSWORD": "secret",
    "TIDEMARK_REGISTRY_URL": "redis://tidemark:secret@valkey:6379",
}

each_value_set = pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())


@each_value_set
def test_lint_has_no_complaint(values: Values) -> None:
    """S5."""
    done = helm("lint", "--strict", str(CHART), values=values)

    assert done.returncode == 0, done.stdout + done.stderr


@each_value_set
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_takes_every_manifest(values: Values, version: str) -> None:
    """S5: strictly, so that a misspelt field is found."""
    for manifest in render(values).values():
        if manifest["kind"] not in CUSTOM:
            validate(json.dumps(manifest), version)


@cache
def validate(manifest: str, version: str) -> None:
    """Most manifests are the same in several sets of values."""
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


@each_value_set
def test_selectors_match_the_pods_they_mean(values: Values) -> None:
    rendered = render(values)
    labels = {key: template["metadata"]["labels"] for key, template in pods(rendered)}

    for key, manifest in rendered.items():
        selector = selector_of(manifest)
        if selector is None:
            continue
        chosen = {pod for pod, has in labels.items() if selector.items() <= has.items()}
        component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        meant = {
            pod for pod, has in labels.items() if has["app.kubernetes.io/component"] == component
        }
        assert chosen == meant != set(), key


@each_value_set
def test_services_and_policies_lead_to_ports_that_the_container_has(values: Values) -> None:
    rendered = render(values)
    ports = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: {
            port["name"] for port in container(template).get("ports", [])
        }
        for _, template in pods(rendered)
    }

    for manifest in rendered.values():
        component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        if manifest["kind"] == "Service":
            assert {port["targetPort"] for port in manifest["spec"]["ports"]} <= ports[component]
        if manifest["kind"] == "NetworkPolicy":
            rules = manifest["spec"]["ingress"] or []
            named = {port["port"] for rule in rules for port in rule["ports"]}
            assert {port for port in named if isinstance(port, str)} <= ports[component]


@each_value_set
def test_each_service_listens_where_its_port_says_and_is_called_there(values: Values) -> None:
    rendered = render(values)
    services = {
        f"{key.removeprefix('Service/')}:{port['port']}"
        for key, manifest in rendered.items()
        if manifest["kind"] == "Service"
        for port in manifest["spec"]["ports"]
    }

    for _, template in pods(rendered):
        variables = environment(container(template))
        ports = {p["name"]: p["containerPort"] for p in container(template).get("ports", [])}
        for name, value in variables.items():
            if name == "TIDEMARK_METRICS_LISTEN":
                assert value.endswith(f":{ports['metrics']}")
            elif name.endswith(("_LISTEN", "_ADVERTISE")):
                assert value.endswith(f":{ports['grpc']}")
            elif name.endswith("_ADDRESS"):
                assert value in services
            if name.endswith("_LISTEN"):
                assert value.startswith(("0.0.0.0:", "[::]:")), "loopback is of no use in a pod"


@each_value_set
def test_every_variable_is_a_known_setting(values: Values) -> None:
    """S5."""
    for key, template in pods(render(values)):
        ours = {name for name in environment(container(template)) if name.startswith("TIDEMARK_")}

        assert ours <= KNOWN, key


@each_value_set
def test_what_listens_is_probed_with_three_different_questions(values: Values) -> None:
    """S1."""
    for key, template in pods(render(values)):
        only = container(template)
        ports = {port["name"]: port["containerPort"] for port in only.get("ports", [])}
        if not ports:
            assert not any("Probe" in field for field in only), key
            continue
        asked = {
            name: only[f"{name}Probe"]["grpc"] for name in ("startup", "liveness", "readiness")
        }
        assert {probe["port"] for probe in asked.values()} == {ports["grpc"]}
        assert [probe.get("service", "") for probe in asked.values()] == ["", LIVENESS, READINESS]


@each_value_set
def test_every_pod_is_confined(values: Values) -> None:
    """S5: it runs without a name, writes to its volumes alone and has no rights."""
    for key, template in pods(render(values)):
        spec, only = template["spec"], container(template)

        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= only["resources"].keys()
        claimed = {"data"} if key.startswith("StatefulSet/") else set()
        volumes = {volume["name"] for volume in spec["volumes"]} | claimed
        assert {mount["name"] for mount in only["volumeMounts"]} == volumes


@each_value_set
def test_a_pod_gets_longer_to_stop_than_the_service_takes(values: Values) -> None:
    """S5: it drains, closes its data, and only then would be killed."""
    for key, template in pods(render(values)):
        variables = environment(container(template))
        if "TIDEMARK_SHUTDOWN_GRACE_MS" not in variables:
            continue
        drains_s = int(variables["TIDEMARK_SHUTDOWN_GRACE_MS"]) / 1000

        assert template["spec"]["terminationGracePeriodSeconds"] > drains_s, key


def test_storage_keeps_its_data_on_a_claim_of_its_own() -> None:
    storage = render()[f"StatefulSet/{NAME}-storage"]

    (claim,) = storage["spec"]["volumeClaimTemplates"]
    (mount,) = (
        each
        for each in container(storage["spec"]["template"])["volumeMounts"]
        if each["name"] == claim["metadata"]["name"]
    )
    data_dir = environment(container(storage["spec"]["template"]))["TIDEMARK_STORAGE_DATA_DIR"]

    # Below the mount, where a file system may keep things of its own, such as lost+found.
    assert Path(mount["mountPath"]) == Path(data_dir).parent
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_storage_is_named_by_its_headless_service() -> None:
    rendered = render()

    name = rendered[f"StatefulSet/{NAME}-storage"]["spec"]["serviceName"]

    assert rendered[f"Service/{name}"]["spec"]["clusterIP"] == "None"


def test_two_brokers_run_at_once_during_an_update_only_with_a_registry() -> None:
    """E10, S8: without one, the second would fence the first while it still has clients."""
    alone = render()[f"Deployment/{NAME}-broker"]
    several = render(SEVERAL)[f"Deployment/{NAME}-broker"]
    replaced = render({**SEVERAL, "broker": {"replicas": 3, "updateStrategy": "Recreate"}})

    assert alone["spec"]["strategy"] == {"type": "Recreate"}
    assert several["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert replaced[f"Deployment/{NAME}-broker"]["spec"]["strategy"] == {"type": "Recreate"}


@each_value_set
def test_services_find_every_storage_node(values: Values) -> None:
    """S8: each node by the name of its pod, which is also what it advertises."""
    rendered = render(values)
    storage = storage_of(rendered)
    name, spec = storage["metadata"]["name"], storage["spec"]
    port = container(spec["template"])["ports"][0]["containerPort"]
    named = spec["replicas"] if storage["kind"] == "StatefulSet" else 1
    nodes = [f"{name}-{number}" for number in range(named)]
    expected = [f"{node}.{spec.get('serviceName')}:{port}" for node in nodes]

    addresses = {
        key: environment(container(template))["TIDEMARK_STORAGE_ADDRESSES"].split(",")
        for key, template in pods(rendered)
        if not key.startswith("Pod/")
    }

    assert len(addresses) >= 3
    for key, found in addresses.items():
        assert found == (expected if len(nodes) > 1 else [f"{name}:{port}"]), key
    if len(nodes) > 1:
        assert spec["podManagementPolicy"] == "Parallel"
        for node in nodes:
            settings = StorageSettings.from_environment(environment_of_pod(storage, node))
            assert settings.own_address in settings.storage_addresses


def test_storage_on_a_shared_store_is_a_deployment_without_volumes() -> None:
    """S5, S9: nothing of it has to survive, so any pod takes the place of another."""
    rendered = render(REDIS)

    storage = rendered[f"Deployment/{NAME}-storage"]
    spec = storage["spec"]["template"]["spec"]
    assert [volume["name"] for volume in spec["volumes"]] == ["tmp"]
    variables = environment(container(storage["spec"]["template"]))
    assert variables["TIDEMARK_STORAGE_ADVERTISE"] == "$(POD_IP):7410"
    assert variables["TIDEMARK_STORAGE_ADDRESSES"] == f"{NAME}-storage:7410"
    assert not {f"StatefulSet/{NAME}-storage", f"Service/{NAME}-storage-pods"} & rendered.keys()
    assert {
        f"PodDisruptionBudget/{NAME}-storage",
        f"NetworkPolicy/{NAME}-storage",
        f"Service/{NAME}-storage",
    } <= rendered.keys()


def test_nodes_of_a_shared_store_are_replaced_one_by_one_only_with_a_registry() -> None:
    """S9: without one, the second takes everything from the first while brokers still use it."""
    sharing = render(REDIS)[f"Deployment/{NAME}-storage"]
    alone = render(VALUE_SETS["redis from one secret"])[f"Deployment/{NAME}-storage"]

    assert sharing["spec"]["replicas"] == 2
    assert sharing["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert alone["spec"]["strategy"] == {"type": "Recreate"}
    first, second = (
        StorageSettings.from_environment(
            {**environment_of_pod(sharing, f"{NAME}-storage-x", ip), **REDIS_SECRETS}
        )
        for ip in ("10.0.0.1", "10.0.0.2")
    )
    assert first.shares_partitions
    assert (first.own_address, second.own_address) == ("10.0.0.1:7410", "10.0.0.2:7410")


def test_the_connection_of_the_store_comes_from_a_secret() -> None:
    """S5, S9: the user and the password, or the whole URL; only storage gets them."""
    beside, inside = render(REDIS), render(VALUE_SETS["redis from one secret"])

    login = connection_of(beside, "tidemark-valkey")
    whole = connection_of(inside, "valkey")

    assert login == {
        "TIDEMARK_REDIS_USERNAME": "username",
        "TIDEMARK_REDIS_PASSWORD": "tidemark",
        "TIDEMARK_REGISTRY_URL": "registry-url",
    }
    assert whole == {"TIDEMARK_REDIS_URL": "url"}
    for rendered in (beside, inside):
        for key, template in pods(rendered):
            names = {name for name in environment(container(template)) if "_REDIS_" in name}
            assert bool(names) == (key == f"Deployment/{NAME}-storage"), key


def test_of_the_secret_for_tls_only_the_named_files_are_mounted() -> None:
    """S9: it may hold the key of the server as well."""
    storage = render(VALUE_SETS["redis with certificates"])[f"Deployment/{NAME}-storage"]
    template = storage["spec"]["template"]

    (volume,) = (each for each in template["spec"]["volumes"] if "secret" in each)
    (mount,) = (
        each for each in container(template)["volumeMounts"] if each["name"] == volume["name"]
    )

    assert volume["secret"]["secretName"] == "valkey-tls"
    files = {
        item["key"]: f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]
    }
    variables = environment(container(template))
    assert files == {
        "ca.crt": variables["TIDEMARK_REDIS_CA_FILE"],
        "tls.crt": variables["TIDEMARK_REDIS_CERT_FILE"],
        "tls.key": variables["TIDEMARK_REDIS_KEY_FILE"],
    }
    assert mount["readOnly"] is True


def test_several_brokers_have_ids_and_addresses_of_their_own() -> None:
    """S8: a new pod is a new member, at the address of the pod."""
    broker = render(SEVERAL)[f"Deployment/{NAME}-broker"]

    first, second = (
        BrokerSettings.from_environment(environment_of_pod(broker, f"{NAME}-broker-{letter}", ip))
        for letter, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
    )

    assert broker["spec"]["replicas"] == 3
    assert (first.broker_id, first.advertise) == (f"{NAME}-broker-a", "10.0.0.1:7400")
    assert (second.broker_id, second.advertise) == (f"{NAME}-broker-b", "10.0.0.2:7400")
    variables = environment(container(broker["spec"]["template"]))
    assert variables["TIDEMARK_REGISTRY_URL"] == "redis://valkey:6379/0"


def test_the_url_of_the_registry_may_be_in_a_secret() -> None:
    """S5, S8: then it is in no manifest, and only brokers and storage get it."""
    rendered = render({"registry": {"secret": {"name": "login", "key": "redis"}}})

    found = {
        key: environment(container(template)).get("TIDEMARK_REGISTRY_URL")
        for key, template in pods(rendered)
    }

    for key in (f"Deployment/{NAME}-broker", f"StatefulSet/{NAME}-storage"):
        assert found.pop(key) == {"secretKeyRef": {"name": "login", "key": "redis"}}
    assert set(found.values()) == {None}


def test_the_autoscaler_decides_how_many_brokers_there_are() -> None:
    """S8: unless they are stopped. An upgrade must not set the number back."""
    values = VALUE_SETS["autoscaled"]
    stopped = {**values, "broker": {**values["broker"], "replicas": 0}}

    rendered = render(values)

    broker = rendered[f"Deployment/{NAME}-broker"]
    autoscaler = rendered[f"HorizontalPodAutoscaler/{NAME}-broker"]["spec"]
    assert "replicas" not in broker["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == broker["metadata"]["name"]
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (2, 6)
    assert render(stopped)[f"Deployment/{NAME}-broker"]["spec"]["replicas"] == 0
    assert f"HorizontalPodAutoscaler/{NAME}-broker" not in render()


def test_drains_take_one_pod_of_a_service_at_a_time() -> None:
    """S8."""
    rendered = render(SEVERAL)

    for service in ("storage", "broker", "lifecycle"):
        budget = rendered[f"PodDisruptionBudget/{NAME}-{service}"]
        assert budget["spec"]["maxUnavailable"] == 1


@each_value_set
def test_pods_of_a_service_are_spread_over_zones(values: Values) -> None:
    """S8: where that is possible; one zone is enough to run."""
    for key, template in pods(render(values)):
        if key.startswith("Pod/"):
            continue
        (constraint,) = template["spec"]["topologySpreadConstraints"]

        assert constraint["topologyKey"] == "topology.kubernetes.io/zone", key
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
        labels = template["metadata"]["labels"]
        assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


def test_only_its_own_services_may_call_storage() -> None:
    storage = render()[f"NetworkPolicy/{NAME}-storage"]

    (grpc,) = (rule for rule in storage["spec"]["ingress"] if rule["ports"] == [{"port": "grpc"}])
    callers = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in grpc["from"]
    }

    assert callers == {"storage", "broker", "lifecycle", "retention"}


def test_no_pod_may_call_the_driver_of_spark_while_it_runs_in_its_pod() -> None:
    cronjobs = render({"retention": {"mode": "cronjobs"}})[f"NetworkPolicy/{NAME}-retention"]

    assert not cronjobs["spec"]["ingress"]
    assert cronjobs["spec"]["policyTypes"] == ["Ingress"]


def test_a_spread_constraint_without_a_selector_means_its_own_service() -> None:
    storage = render(VALUE_SETS["everything"])["StatefulSet/mq-storage"]

    (constraint,) = storage["spec"]["template"]["spec"]["topologySpreadConstraints"]

    assert constraint["labelSelector"] == storage["spec"]["selector"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/zone"


def test_a_dashboard_in_the_chart_becomes_a_config_map(tmp_path: Path) -> None:
    chart = tmp_path / "tidemark"
    copy_chart(chart)
    (chart / "dashboards" / "example.json").write_text('{"title": "{{ not a template }}"}\n')

    rendered = render({"telemetry": {"dashboard": {"enabled": True}}}, chart)

    dashboard = rendered[f"ConfigMap/{NAME}-dashboard"]
    assert dashboard["data"]["example.json"] == '{"title": "{{ not a template }}"}\n'
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_each_template_makes_one_resource() -> None:
    for template in CHART.glob("templates/**/*.yaml"):
        assert "\n---" not in template.read_text(), template.name


def environment_of_pod(owner: Manifest, name: str, ip: str = "10.0.0.1") -> dict[str, str]:
    """The environment of a pod that Kubernetes has given a name and an address."""
    variables = environment(container(owner["spec"]["template"]))
    return {
        variable: value.replace("$(POD_NAME)", name).replace("$(POD_IP)", ip)
        for variable, value in variables.items()
        if isinstance(value, str)
    }


def storage_of(rendered: Mapping[str, Manifest]) -> Manifest:
    """The resource that makes the pods of storage."""
    (found,) = (
        manifest
        for key, manifest in rendered.items()
        if pod_template(manifest) is not None and key.endswith("-storage")
    )
    return found


def connection_of(rendered: Mapping[str, Manifest], secret: str) -> dict[str, str]:
    """The variables of storage that come from a Secret, with their keys in it."""
    variables = environment(container(storage_of(rendered)["spec"]["template"]))
    return {
        name: value["secretKeyRef"]["key"]
        for name, value in variables.items()
        if isinstance(value, dict) and value.get("secretKeyRef", {}).get("name") == secret
    }


def copy_chart(target: Path) -> None:
    for source in CHART.rglob("*"):
        if source.is_file():
            copy = target / source.relative_to(CHART)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())


def selector_of(manifest: Manifest) -> Mapping[str, str] | None:
    spec: Any = manifest.get("spec", {})
    found: Mapping[str, str] | None = None
    if manifest["kind"] == "Service":
        found = spec["selector"]
    elif manifest["kind"] == "NetworkPolicy":
        found = spec["podSelector"]["matchLabels"]
    elif manifest["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        found = spec["selector"]["matchLabels"]
    return found
