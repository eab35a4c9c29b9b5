"""Sets of values under which the chart must hold: the defaults, and one for each way to use it."""

import yaml

from tests.support.chart_rendering import CHART, Values

LOADS: dict[str, Values] = {
    load: yaml.safe_load((CHART / f"values-{load}.yaml").read_text(encoding="utf-8"))
    for load in ("high-throughput", "low-load")
}
"""The files that the chart brings for two loads."""

REDIS: Values = yaml.safe_load((CHART / "values-redis.yaml").read_text(encoding="utf-8"))
"""The file that the chart brings for storage beside a Valkey."""

VALKEY: Values = yaml.safe_load((CHART / "examples" / "valkey.yaml").read_text(encoding="utf-8"))
"""The values of that Valkey, for its own chart."""

VALUE_SETS: dict[str, Values] = {
    "defaults": {},
    **LOADS,
    "redis": REDIS,
    "redis from one secret": {
        "storage": {"engine": "redis", "redis": {"secret": {"name": "valkey"}}},
        "retention": {"mode": "none"},
    },
    "redis with certificates": {
        "ipFamily": "IPv6",
        "storage": {
            "engine": "redis",
            "replicas": 0,
            "redis": {
                "url": "rediss+cluster://valkey-0:6379,valkey-1:6379",
                "tls": {"secretName": "valkey-tls", "certKey": "tls.crt", "keyKey": "tls.key"},
                "durability": "as-is",
            },
        },
    },
    "cronjobs": {"retention": {"mode": "cronjobs"}},
    "foreign spark": {
        "retention": {"spark": {"master": "spark://spark-master:7077"}},
        "networkPolicy": {"sparkExecutors": [{"podSelector": {"matchLabels": {"app": "spark"}}}]},
    },
    "foreign spark by cron": {
        "retention": {"mode": "cronjobs", "spark": {"master": "spark://spark-master:7077"}}
    },
    "no retention": {"retention": {"mode": "none"}},
    "bare": {
        "telemetry": {"metrics": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "storage": {"podDisruptionBudget": {"enabled": False}},
        "retention": {"mode": "none"},
    },
    "ipv6": {"ipFamily": "IPv6"},
    "several nodes": {
        "storage": {"replicas": 3},
        "broker": {"replicas": 3},
        "lifecycle": {"replicas": 2},
        "registry": {"url": "redis://valkey:6379/0"},
    },
    "autoscaled": {
        "ipFamily": "IPv6",
        "storage": {"replicas": 2},
        "broker": {"autoscaling": {"enabled": True}},
        "registry": {"secret": {"name": "registry-login"}},
    },
    "everything": {
        "fullnameOverride": "mq",
        "image": {"registry": "registry.example.com/team", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry-login"}],
        "settings": {"TIDEMARK_LOG_LEVEL": "debug"},
        "secretSettings": {"OTEL_EXPORTER_OTLP_HEADERS": {"name": "collector", "key": "headers"}},
        "telemetry": {
            "otlpEndpoint": "http://collector:4317",
            "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
            "dashboard": {"enabled": True},
        },
        "storage": {
            "persistence": {"size": "1Ti", "storageClass": "fast"},
            "settings": {"TIDEMARK_STORAGE_BLOCK_CACHE_BYTES": 1_073_741_824},
            "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "3Gi"}},
            "nodeSelector": {"disk": "nvme"},
            "tolerations": [{"key": "queues", "operator": "Exists"}],
            "priorityClassName": "important",
            "podAnnotations": {"team": "mq"},
            "podLabels": {"team": "mq"},
            "topologySpreadConstraints": [
                {
                    "topologyKey": "topology.kubernetes.io/zone",
                    "maxSkew": 1,
                    "whenUnsatisfiable": "ScheduleAnyway",
                }
            ],
        },
        "broker": {
            "service": {"type": "LoadBalancer", "annotations": {"lb": "internal"}},
            "affinity": {"nodeAffinity": {}},
        },
        "lifecycle": {"replicas": 3},
        "networkPolicy": {
            "brokerClients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "storageClients": [{"podSelector": {"matchLabels": {"app": "spark"}}}],
            "metricsClients": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
        "serviceAccount": {"annotations": {"owner": "mq"}},
    },
}
