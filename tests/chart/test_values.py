"""Values: one change changes only what it should, and nonsense is refused."""

from typing import Any

import pytest

from tests.support.chart_rendering import (
    NAME,
    Values,
    leaves,
    refusal,
    render,
)

SERVICE = {"storage": "StatefulSet", "broker": "Deployment", "lifecycle": "Deployment"}
SERVICE["retention"] = "Deployment"


def pod(service: str, path: str) -> str:
    return f"{SERVICE[service]}/{NAME}-{service}.spec.template.spec.{path}"


def variable(service: str, name: str) -> set[str]:
    """The leaves of a variable that is set to something else."""
    return {pod(service, f"containers[{service}].env[{name}].value")}


def added_variable(service: str, name: str) -> set[str]:
    """The leaves of a variable that was not there before."""
    return variable(service, name) | {pod(service, f"containers[{service}].env[{name}].name")}


def everywhere(*names: str) -> set[str]:
    return {leaf for name in names for service in SERVICE for leaf in variable(service, name)}


def resources(*keys: str) -> set[str]:
    return {leaf for leaf in leaves(render()) if leaf.startswith(tuple(f"{key}." for key in keys))}


BROKER_PORT = {
    *variable("broker", "TIDEMARK_BROKER_LISTEN"),
    *variable("broker", "TIDEMARK_BROKER_ADVERTISE"),
    *(
        pod("broker", f"containers[broker].{path}")
        for path in (
            "ports[grpc].containerPort",
            "startupProbe.grpc.port",
            "livenessProbe.grpc.port",
            "readinessProbe.grpc.port",
        )
    ),
    f"Service/{NAME}-broker.spec.ports[grpc].port",
    f"Pod/{NAME}-test.spec.containers[test].command[3]",
}
IMAGES = {
    *(pod(service, f"containers[{service}].image") for service in SERVICE),
    f"Pod/{NAME}-test.spec.containers[test].image",
}
GRACE = {
    *everywhere("TIDEMARK_SHUTDOWN_GRACE_MS"),
    *(pod(service, "terminationGracePeriodSeconds") for service in SERVICE),
}
CLAIM = f"StatefulSet/{NAME}-storage.spec.volumeClaimTemplates[0].spec"

DELTAS: list[tuple[Values, set[str]]] = [
    ({"cluster": {"id": "blue"}}, everywhere("TIDEMARK_CLUSTER_ID")),
    ({"cluster": {"partitions": 16}}, everywhere("TIDEMARK_PARTITIONS")),
    ({"shutdownGraceSeconds": 60}, GRACE),
    ({"image": {"tag": "9.9.9"}}, IMAGES),
    ({"image": {"sparkRepository": "other"}}, {pod("retention", "containers[retention].image")}),
    ({"storage": {"persistence": {"size": "1Ti"}}}, {f"{CLAIM}.resources.requests.storage"}),
    ({"storage": {"persistence": {"storageClass": "fast"}}}, {f"{CLAIM}.storageClassName"}),
    ({"storage": {"replicas": 0}}, {f"StatefulSet/{NAME}-storage.spec.replicas"}),
    (
        {"storage": {"startupSeconds": 61}},
        {pod("storage", "containers[storage].startupProbe.failureThreshold")},
    ),
    (
        {"storage": {"podDisruptionBudget": {"maxUnavailable": 0}}},
        {f"PodDisruptionBudget/{NAME}-storage.spec.maxUnavailable"},
    ),
    (
        {"storage": {"podDisruptionBudget": {"enabled": False}}},
        resources(f"PodDisruptionBudget/{NAME}-storage"),
    ),
    ({"broker": {"port": 7777}}, BROKER_PORT),
    ({"broker": {"service": {"type": "NodePort"}}}, {f"Service/{NAME}-broker.spec.type"}),
    (
        {"broker": {"resources": {"limits": {"memory": "3Gi"}}}},
        {pod("broker", "containers[broker].resources.limits.memory")},
    ),
    (
        {"broker": {"settings": {"TIDEMARK_CLIENT_TIMEOUT_MS": 60_000}}},
        added_variable("broker", "TIDEMARK_CLIENT_TIMEOUT_MS"),
    ),
    (
        {"settings": {"TIDEMARK_LOG_LEVEL": "debug"}},
        {leaf for each in SERVICE for leaf in added_variable(each, "TIDEMARK_LOG_LEVEL")},
    ),
    (
        {"telemetry": {"otlpEndpoint": "http://collector:4317"}},
        {leaf for each in SERVICE for leaf in added_variable(each, "OTEL_EXPORTER_OTLP_ENDPOINT")},
    ),
    (
        {"telemetry": {"metrics": {"scrapeAnnotations": False}}},
        {
            f"{kind}/{NAME}-{service}.spec.template.metadata.annotations.prometheus.io/{name}"
            for service, kind in SERVICE.items()
            for name in ("scrape", "port", "path")
        },
    ),
    (
        {"networkPolicy": {"enabled": False}},
        resources(*(f"NetworkPolicy/{NAME}-{service}" for service in SERVICE)),
    ),
    (
        {"retention": {"mode": "none"}},
        resources(
            *(f"{kind}/{NAME}-retention" for kind in ("Deployment", "Service", "NetworkPolicy"))
        ),
    ),
    (
        {"retention": {"spark": {"options": {"spark.driver.memory": "2g"}}}},
        variable("retention", "TIDEMARK_SPARK_OPTIONS"),
    ),
    ({"retention": {"cronJobs": {"eviction": {"schedule": "@hourly"}}}}, set()),
]


@pytest.mark.parametrize(("values", "expected"), DELTAS, ids=[str(values) for values, _ in DELTAS])
def test_a_value_changes_what_it_should_and_nothing_else(
    values: Values, expected: set[str]
) -> None:
    before, after = leaves(render()), leaves(render(values))

    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}

    assert changed == expected


# --- nonsense -----------------------------------------------------------------------------------


def redis_with(**changes: Any) -> Values:
    return {"storage": {"engine": "redis", "redis": {"url": "redis://valkey", **changes}}}


NONSENSE: dict[str, tuple[Values, str]] = {
    "a section that does not exist": (
        {"brokers": {}},
        "Additional property brokers is not allowed",
    ),
    "a value that does not exist": (
        {"broker": {"replicaCount": 1}},
        "broker: Additional property replicaCount is not allowed",
    ),
    "a number that is a text": (
        {"broker": {"port": "7400"}},
        "broker.port: Invalid type. Expected: integer, given: string",
    ),
    "a fraction": (
        {"cluster": {"partitions": 1.5}},
        "cluster.partitions: Invalid type. Expected: integer",
    ),
    "less than the least": (
        {"cluster": {"partitions": -1}},
        "cluster.partitions: Must be greater than or equal to 0",
    ),
    "more than the most": (
        {"shutdownGraceSeconds": 601},
        "shutdownGraceSeconds: Must be less than or equal to 600",
    ),
    "a port that only root may open": (
        {"broker": {"port": 80}},
        "broker.port: Must be greater than or equal to 1024",
    ),
    "a choice that does not exist": (
        {"retention": {"mode": "daemon"}},
        'retention.mode must be one of the following: "deployment", "cronjobs", "none"',
    ),
    "a size without sense": (
        {"storage": {"persistence": {"size": "large"}}},
        "storage.persistence.size: Does not match pattern",
    ),
    "a name that no cluster may have": (
        {"cluster": {"id": "my cluster"}},
        "cluster.id: Does not match pattern",
    ),
    "a name that Kubernetes does not take": (
        {"fullnameOverride": "My_Queues"},
        "fullnameOverride: Does not match pattern",
    ),
    "a collector without a scheme": (
        {"telemetry": {"otlpEndpoint": "collector:4317"}},
        "telemetry.otlpEndpoint: Does not match pattern",
    ),
    "a schedule that is none": (
        {"retention": {"cronJobs": {"eviction": {"schedule": "often"}}}},
        "retention.cronJobs.eviction.schedule: Does not match pattern",
    ),
    "a Spark master of a kind that is not supported": (
        {"retention": {"spark": {"master": "yarn"}}},
        "retention.spark.master: Does not match pattern",
    ),
    "a variable that is none of ours": (
        {"broker": {"settings": {"CLIENT_TIMEOUT_MS": 1}}},
        'broker.settings: Property name of "CLIENT_TIMEOUT_MS" does not match',
    ),
    "a setting that is a list": (
        {"broker": {"settings": {"TIDEMARK_LOG_LEVEL": ["info"]}}},
        "broker.settings.TIDEMARK_LOG_LEVEL: Invalid type",
    ),
    "a secret without a key": (
        {"secretSettings": {"OTEL_EXPORTER_OTLP_HEADERS": {"name": "collector"}}},
        "key is required",
    ),
    "a spread constraint without a key": (
        {"broker": {"topologySpreadConstraints": [{"maxSkew": 1}]}},
        "topologyKey is required",
    ),
    "more storage nodes than partitions": (
        {"storage": {"replicas": 3}, "cluster": {"partitions": 2}},
        "storage.replicas is 3, and there are 2 partitions (cluster.partitions)",
    ),
    "several brokers without a registry": (
        {"broker": {"replicas": 2}},
        "broker.replicas is 2: several brokers need a registry to share the partitions",
    ),
    "a rolling update without a registry": (
        {"broker": {"updateStrategy": "RollingUpdate"}},
        "broker.updateStrategy is RollingUpdate: the old and the new broker need a registry",
    ),
    "an autoscaler without a registry": (
        {"broker": {"autoscaling": {"enabled": True}}},
        "broker.autoscaling.enabled requires a registry",
    ),
    "an autoscaler with less than nothing to decide": (
        {
            "broker": {"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 3}},
            "registry": {"url": "redis://valkey:6379"},
        },
        "broker.autoscaling.minReplicas is 4, more than maxReplicas, 3",
    ),
    "an autoscaler without a request to compare with": (
        {
            "broker": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}},
            "registry": {"url": "redis://valkey:6379"},
        },
        "broker.autoscaling.enabled requires broker.resources.requests.cpu",
    ),
    "a registry of another kind": (
        {"registry": {"url": "http://consul:8500"}},
        "registry.url: Does not match pattern",
    ),
    "two registries": (
        {"registry": {"url": "redis://valkey:6379", "secret": {"name": "login"}}},
        "registry.url and registry.secret.name are both set",
    ),
    "a registry beside that of the chart": (
        {"broker": {"settings": {"TIDEMARK_REGISTRY_URL": "redis://valkey:6379"}}},
        "TIDEMARK_REGISTRY_URL is set by the chart",
    ),
    "a storage engine that does not exist": (
        {"storage": {"engine": "lmdb"}},
        'storage.engine must be one of the following: "rocksdb", "redis"',
    ),
    "a level of durability that does not exist": (
        {"storage": {"engine": "redis", "redis": {"durability": "maybe"}}},
        'storage.redis.durability must be one of the following: "local", "replicated", "as-is"',
    ),
    "a password in a value": (
        {"storage": {"engine": "redis", "redis": {"url": "redis://user:password@valkey"}}},
        "storage.redis.url: Does not match pattern",
    ),
    "a server of another kind": (
        {"storage": {"engine": "redis", "redis": {"url": "postgres://database"}}},
        "storage.redis.url: Does not match pattern",
    ),
    "redis without a server": (
        {"storage": {"engine": "redis"}},
        "storage.engine is redis, and its servers are not named",
    ),
    "redis with a secret without a URL": (
        {"storage": {"engine": "redis", "redis": {"secret": {"name": "a", "urlKey": ""}}}},
        "storage.redis.url and storage.redis.secret.urlKey are both empty",
    ),
    "redis with two URLs": (
        {"storage": {"engine": "redis", "redis": {"url": "redis://a", "secret": {"name": "a"}}}},
        "storage.redis.url and storage.redis.secret.name are both set, and nothing is taken from",
    ),
    "redis with a user without a password": (
        redis_with(secret={"name": "a", "usernameKey": "user"}),
        "storage.redis.secret.usernameKey is set without passwordKey",
    ),
    "redis with a password of no secret": (
        redis_with(secret={"passwordKey": "password"}),
        "usernameKey or passwordKey is set without storage.redis.secret.name",
    ),
    "redis with certificates and no TLS": (
        redis_with(tls={"secretName": "valkey-tls"}),
        "storage.redis.tls.secretName is set, and storage.redis.url is without TLS",
    ),
    "redis with certificates of no secret": (
        redis_with(tls={"certKey": "tls.crt", "keyKey": "tls.key"}),
        "storage.redis.tls.certKey or keyKey is set without storage.redis.tls.secretName",
    ),
    "redis with a certificate without its key": (
        redis_with(url="rediss://a", tls={"secretName": "valkey-tls", "certKey": "tls.crt"}),
        "storage.redis.tls.certKey and keyKey belong together",
    ),
    "redis with a secret of which nothing is taken": (
        redis_with(url="rediss://a", tls={"secretName": "valkey-tls", "caKey": ""}),
        "storage.redis.tls.secretName is set without caKey and certKey",
    ),
    "redis with several nodes without a registry": (
        {"storage": {"engine": "redis", "replicas": 2, "redis": {"url": "redis://a"}}},
        "storage.replicas is 2: with storage.engine redis, several nodes need a registry",
    ),
    "redis with volumes": (
        {
            "storage": {
                "engine": "redis",
                "redis": {"url": "redis://a"},
                "persistence": {"storageClass": "fast"},
            }
        },
        "storage.persistence.storageClass is set: with storage.engine redis, storage has no",
    ),
    "redis with the caches of another engine": (
        {**redis_with(), "settings": {"TIDEMARK_STORAGE_BLOCK_CACHE_BYTES": 1_048_576}},
        "TIDEMARK_STORAGE_BLOCK_CACHE_BYTES is set: it has no effect with storage.engine redis",
    ),
    "a server without the engine for it": (
        {"storage": {"redis": {"url": "redis://valkey"}}},
        "storage.engine is rocksdb, and storage.redis is set",
    ),
    "durability without the engine for it": (
        {"storage": {"redis": {"durability": "replicated"}}},
        "storage.engine is rocksdb, and storage.redis is set",
    ),
    "caches that do not fit": (
        {"storage": {"settings": {"TIDEMARK_STORAGE_BLOCK_CACHE_BYTES": 1_073_741_824}}},
        "storage.resources.requests.memory is 512Mi, less than the 1140850688 bytes of",
    ),
    "write buffers of all services that do not fit": (
        {"settings": {"TIDEMARK_STORAGE_WRITE_BUFFER_BYTES": "536870912"}},
        "storage.resources.requests.memory is 512Mi, less than the 603979776 bytes of",
    ),
    "less memory than the defaults need": (
        {"storage": {"resources": {"requests": {"memory": "0.12G"}}}},
        "storage.resources.requests.memory is 0.12G, less than the 134217728 bytes of",
    ),
    "a limit without a request that is too low": (
        {"storage": {"resources": {"requests": {"memory": None}, "limits": {"memory": "100M"}}}},
        "storage.resources.requests.memory is 100M, less than",
    ),
    "a monitor without metrics": (
        {"telemetry": {"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}}},
        "serviceMonitor.enabled requires telemetry.metrics.enabled",
    ),
    "one port for two": (
        {"telemetry": {"metrics": {"port": 7400}}},
        "telemetry.metrics.port is 7400, which is the port of a service",
    ),
}


@pytest.mark.parametrize(("values", "message"), NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_refused_in_words(values: Values, message: str) -> None:
    """S3."""
    assert message in refusal(values)
