"""Settings: each can be set through the chart, by name, by a value, or from a Secret."""

from typing import Any

import pytest

from tests.support.chart_rendering import (
    NAME,
    NO_VALUES,
    Values,
    container,
    environment,
    pods,
    refusal,
    render,
)
from tidemark.settings import (
    SERVICES,
    BrokerSettings,
    LifecycleSettings,
    Settings,
    StorageSettings,
)

REDIS_ONE: Values = {"storage": {"engine": "redis", "redis": {"url": "redis://valkey:6379"}}}
REDIS_ALL: Values = {
    "storage": {
        "engine": "redis",
        "redis": {
            "url": "rediss://valkey:6379",
            "secret": {"name": "valkey", "usernameKey": "user", "passwordKey": "password"},
            "tls": {"secretName": "valkey-tls", "certKey": "tls.crt", "keyKey": "tls.key"},
            "durability": "replicated",
        },
    }
}

DECIDED_BY_VALUES: dict[str, Values] = {
    "TIDEMARK_CLUSTER_ID": {"cluster": {"id": "blue"}},
    "TIDEMARK_PARTITIONS": {"cluster": {"partitions": 16}},
    "TIDEMARK_SHUTDOWN_GRACE_MS": {"shutdownGraceSeconds": 60},
    "TIDEMARK_METRICS_LISTEN": {"telemetry": {"metrics": {"port": 9999}}},
    "TIDEMARK_STORAGE_LISTEN": {"storage": {"port": 7777}},
    "TIDEMARK_STORAGE_ADVERTISE": {"storage": {"port": 7777}},
    "TIDEMARK_STORAGE_ADDRESSES": {"storage": {"port": 7777}},
    "TIDEMARK_STORAGE_ENGINE": REDIS_ONE,
    "TIDEMARK_REDIS_URL": REDIS_ONE,
    "TIDEMARK_REDIS_USERNAME": REDIS_ALL,
    "TIDEMARK_REDIS_PASSWORD": REDIS_ALL,
    "TIDEMARK_REDIS_CA_FILE": REDIS_ALL,
    "TIDEMARK_REDIS_CERT_FILE": REDIS_ALL,
    "TIDEMARK_REDIS_KEY_FILE": REDIS_ALL,
    "TIDEMARK_REDIS_DURABILITY": REDIS_ALL,
    "TIDEMARK_BROKER_LISTEN": {"broker": {"port": 7777}},
    "TIDEMARK_BROKER_ADVERTISE": {"broker": {"port": 7777}},
    "TIDEMARK_REGISTRY_URL": {"registry": {"url": "redis://valkey:6379"}},
    "TIDEMARK_LIFECYCLE_LISTEN": {"lifecycle": {"port": 7777}},
    "TIDEMARK_LIFECYCLE_ADVERTISE": {"lifecycle": {"port": 7777}},
    "TIDEMARK_LIFECYCLE_ADDRESS": {"lifecycle": {"port": 7777}},
    "TIDEMARK_RETENTION_LISTEN": {"retention": {"port": 7777}},
    "TIDEMARK_SPARK_MASTER": {"retention": {"spark": {"master": "local[2]"}}},
    "TIDEMARK_SPARK_OPTIONS": {"retention": {"spark": {"options": {"spark.x": "1"}}}},
}
"""Settings that the chart decides, and a value that changes each."""

FIXED = {
    "TIDEMARK_STORAGE_DATA_DIR",  # the mount of the volume
    "TIDEMARK_BROKER_ID",  # the name of the pod
}
SECTIONS: dict[type[Settings], str] = {
    StorageSettings: "storage",
    BrokerSettings: "broker",
    LifecycleSettings: "lifecycle",
}
ALL_SETTINGS = [
    (SECTIONS.get(service, "retention"), variable.name)
    for service in SERVICES
    for variable in service.variables()
]


def variables_of(service: str, values: Values) -> dict[str, Any]:
    """Of the pods of a service, of whichever kind of resource they are."""
    rendered = pods(render(values))
    (found,) = (pod for key, pod in rendered if key.partition("/")[2] == f"{NAME}-{service}")
    return environment(container(found))


@pytest.mark.parametrize(("service", "name"), ALL_SETTINGS)
def test_every_setting_can_be_set(service: str, name: str) -> None:
    """S5: by the service's settings, or by the value from which the chart makes it."""
    if name in DECIDED_BY_VALUES:
        before = variables_of(service, NO_VALUES).get(name)

        assert variables_of(service, DECIDED_BY_VALUES[name])[name] != before
    elif name not in FIXED:
        values = {service: {"settings": {name: "something"}}}

        assert variables_of(service, values)[name] == "something"


@pytest.mark.parametrize("section", ["settings", "secretSettings"])
@pytest.mark.parametrize("name", sorted(FIXED | {"TIDEMARK_BROKER_LISTEN", "TIDEMARK_PARTITIONS"}))
def test_what_the_chart_decides_cannot_be_set_beside_it(section: str, name: str) -> None:
    value = {"settings": "x", "secretSettings": {"name": "a", "key": "b"}}[section]
    service = "storage" if "STORAGE" in name else "broker"

    assert f"{name} is set by the chart" in refusal({service: {section: {name: value}}})


@pytest.mark.parametrize(
    ("value", "text"),
    [(1_073_741_824, "1073741824"), (0, "0"), (False, "false"), ("", ""), ("a b", "a b")],
)
def test_a_setting_arrives_as_it_was_written(value: object, text: str) -> None:
    name = "TIDEMARK_STORAGE_DISK_FREE_BYTES_MIN"

    assert variables_of("storage", {"storage": {"settings": {name: value}}})[name] == text


def test_a_service_wins_over_the_settings_of_all_also_with_nothing() -> None:
    name = "TIDEMARK_PUBLISHER_CACHE_IDLE_TIMEOUT_MS"
    values = {"settings": {name: 5}, "broker": {"settings": {name: 0}}}

    assert variables_of("broker", values)[name] == "0"
    assert variables_of("storage", values)[name] == "5"


def test_a_secret_is_named_and_not_copied() -> None:
    name = "OTEL_EXPORTER_OTLP_HEADERS"
    values = {"broker": {"secretSettings": {name: {"name": "collector", "key": "headers"}}}}

    found = variables_of("broker", values)[name]

    assert found == {"secretKeyRef": {"name": "collector", "key": "headers"}}
    assert not any(key.startswith("Secret/") for key in render(values))


def test_a_setting_that_is_also_a_secret_is_refused() -> None:
    name = "TIDEMARK_LOG_LEVEL"
    values = {"settings": {name: "info"}, "secretSettings": {name: {"name": "a", "key": "b"}}}

    assert f"{name} is set twice" in refusal(values)
