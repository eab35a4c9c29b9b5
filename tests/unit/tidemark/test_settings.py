"""Settings: defaults, every way to get a value wrong, and what the operator then reads."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tidemark.settings import (
    SERVICES,
    BrokerSettings,
    LifecycleSettings,
    ServiceSettings,
    StorageSettings,
    TelemetrySettings,
    load_or_exit,
    unknown_variables,
)
from tidemark.settings.variables import SettingsError, split_address


def test_an_empty_environment_gives_the_defaults() -> None:
    assert StorageSettings.from_environment({}) == StorageSettings()
    assert BrokerSettings.from_environment({}) == BrokerSettings()
    assert LifecycleSettings.from_environment({}) == LifecycleSettings()


def test_the_defaults_let_the_services_find_each_other() -> None:
    storage, broker, lifecycle = StorageSettings(), BrokerSettings(), LifecycleSettings()

    assert broker.storage_addresses == lifecycle.storage_addresses == (storage.listen,)
    assert storage.lifecycle_address == lifecycle.listen


def test_values_come_from_the_environment() -> None:
    """S5: configured by environment."""
    storage = StorageSettings.from_environment(
        {
            "TIDEMARK_CLUSTER_ID": "blue",
            "TIDEMARK_PARTITIONS": "16",
            "TIDEMARK_STORAGE_LISTEN": "[::1]:0",
            "TIDEMARK_STORAGE_DATA_DIR": "some/where",
            "TIDEMARK_SHUTDOWN_GRACE_MS": "0",
            "TIDEMARK_LOG_FORMAT": "TEXT",
        }
    )

    assert storage == StorageSettings(
        cluster_id="blue",
        partitions=16,
        listen="[::1]:0",
        data_dir=Path("some/where"),
        shutdown_grace_ms=0,
        telemetry=TelemetrySettings(log_format="text"),
    )


def test_the_process_environment_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMARK_BROKER_ID", "broker-7")

    assert BrokerSettings.from_environment().broker_id == "broker-7"


@pytest.mark.parametrize("value", ["", "   "])
def test_an_empty_variable_counts_as_unset(value: str) -> None:
    assert StorageSettings.from_environment({"TIDEMARK_PARTITIONS": value}).partitions == 0


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("TIDEMARK_PARTITIONS", ["0", "1", "1024"]),
        ("TIDEMARK_SHUTDOWN_GRACE_MS", ["0", "600000"]),
        ("TIDEMARK_CLUSTER_ID", ["x" * 128, "7", "_a.B-c"]),
        ("TIDEMARK_BROKER_LISTEN", ["0.0.0.0:0", "broker.example:65535", "[::]:1"]),
        ("TIDEMARK_STORAGE_ADDRESSES", ["storage-0.storage:1", "[fe80::1]:65535", "a:1, b:1"]),
    ],
)
def test_values_at_the_edge_are_taken(variable: str, values: list[str]) -> None:
    for value in values:
        BrokerSettings.from_environment({variable: value})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIDEMARK_PARTITIONS", "1025"),
        ("TIDEMARK_PARTITIONS", "-1"),
        ("TIDEMARK_PARTITIONS", "four"),
        ("TIDEMARK_PARTITIONS", "4.0"),
        ("TIDEMARK_PARTITIONS", "1_0"),
        ("TIDEMARK_PARTITIONS", "٤"),
        ("TIDEMARK_PARTITIONS", "9" * 5000),
        ("TIDEMARK_SHUTDOWN_GRACE_MS", "600001"),
        ("TIDEMARK_CLUSTER_ID", "x" * 129),
        ("TIDEMARK_CLUSTER_ID", "-rf"),
        ("TIDEMARK_CLUSTER_ID", "../up"),
        ("TIDEMARK_BROKER_ID", "a\nb"),
        ("TIDEMARK_BROKER_LISTEN", "7400"),
        ("TIDEMARK_BROKER_LISTEN", ":7400"),
        ("TIDEMARK_BROKER_LISTEN", "localhost"),
        ("TIDEMARK_BROKER_LISTEN", "localhost:"),
        ("TIDEMARK_BROKER_LISTEN", "localhost:65536"),
        ("TIDEMARK_BROKER_LISTEN", "localhost:-1"),
        ("TIDEMARK_BROKER_LISTEN", "::1:7400"),
        ("TIDEMARK_BROKER_LISTEN", "http://localhost:7400"),
        ("TIDEMARK_STORAGE_ADDRESSES", "localhost:0"),
        ("TIDEMARK_STORAGE_ADDRESSES", "a:1,b:1,a:1"),
        ("TIDEMARK_STORAGE_ADDRESSES", "a:1,,b:1"),
        ("TIDEMARK_BROKERS", "a:1"),
        ("TIDEMARK_BROKERS", "a=a:1,a=b:1"),
        ("TIDEMARK_BROKERS", "a=a:1,b=a:1"),
        ("TIDEMARK_LOG_LEVEL", "loud"),
        ("TIDEMARK_LOG_FORMAT", "xml"),
        ("TIDEMARK_METRICS_LISTEN", "off"),
        ("OTEL_SDK_DISABLED", "perhaps"),
        ("OTEL_TRACES_EXPORTER", "smoke"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.01"),
        ("OTEL_TRACES_SAMPLER_ARG", "-0.5"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan"),
        ("OTEL_TRACES_SAMPLER_ARG", "1e-2"),
    ],
)
def test_a_wrong_value_gets_one_line_with_variable_value_and_what_is_allowed(
    variable: str, value: str
) -> None:
    """S3: bad input is refused with its reason."""
    known = {each.name: each for each in BrokerSettings.variables()}

    with pytest.raises(SettingsError) as caught:
        BrokerSettings.from_environment({variable: value})

    message = str(caught.value)
    assert message.startswith(f"{variable}={ascii(value)[:50]}")
    assert message.endswith(f"must be {known[variable].kind.allowed}")
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://:secret@host:6379/0",
        "redis://user:s%40cret@[::1]:6379/15",
        "rediss://user:secret@host:6380?ssl_ca_certs=/ca.pem&ssl_check_hostname=true",
    ],
)
def test_the_url_of_a_registry_is_taken(url: str) -> None:
    """S8."""
    assert BrokerSettings.from_environment({"TIDEMARK_REGISTRY_URL": url}).registry_url == url


@pytest.mark.parametrize(
    "url",
    [
        "host:6379",
        "http://:secret@host",
        "redis://:secret@",
        "redis://:secret@host:70000",
        "redis://:secret@host:0",
        "redis://:secret@host:x",
        "redis://:secret@host/db",
        "redis://:secret@host#x",
        "redis://:secret@host?socket_timeout=1",
        "rediss://:secret@host?ssl_cert_reqs=none",
        "redis://:secret@ho\x00st",
        "redis://:secret@[::1",
        "redis+sentinel://:secret@host/main",
        "redis+cluster://:secret@host",
    ],
)
def test_a_wrong_url_of_a_registry_is_refused_without_showing_it(url: str) -> None:
    """S8: it may hold a password."""
    with pytest.raises(SettingsError, match=r"^TIDEMARK_REGISTRY_URL: must be redis://") as caught:
        BrokerSettings.from_environment({"TIDEMARK_REGISTRY_URL": url})

    assert "secret" not in str(caught.value)


def test_the_password_of_a_registry_is_not_shown_with_the_settings() -> None:
    """S8."""
    assert "secret" not in repr(BrokerSettings(registry_url="redis://:secret@host"))


def test_brokers_are_either_listed_or_found_in_a_registry() -> None:
    """S8."""
    environ = {"TIDEMARK_REGISTRY_URL": "redis://host", "TIDEMARK_BROKERS": "broker-0=a:1"}

    with pytest.raises(SettingsError, match="cannot be combined with TIDEMARK_BROKERS"):
        BrokerSettings.from_environment(environ)


@pytest.mark.parametrize("listen", ["0.0.0.0:7400", "[::]:0"])
def test_a_broker_in_a_registry_needs_an_address_that_others_reach(listen: str) -> None:
    """S8."""
    environ = {"TIDEMARK_REGISTRY_URL": "redis://host", "TIDEMARK_BROKER_LISTEN": listen}

    with pytest.raises(SettingsError, match=r"^TIDEMARK_BROKER_ADVERTISE: must be set"):
        BrokerSettings.from_environment(environ)
    BrokerSettings.from_environment({**environ, "TIDEMARK_BROKER_ADVERTISE": "pod-1:7400"})


REDIS = {"TIDEMARK_STORAGE_ENGINE": "redis", "TIDEMARK_REDIS_URL": "rediss://a:1,b/x?ssl_y=1"}


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "rediss://a:1,b/x?ssl_y=1"),
        ({"TIDEMARK_REDIS_PASSWORD": "p@s/s:"}, "rediss://:p%40s%2Fs%3A@a:1,b/x?ssl_y=1"),
        (
            {"TIDEMARK_REDIS_USERNAME": "us er", "TIDEMARK_REDIS_PASSWORD": "secret"},
            "rediss://us%20er:secret@a:1,b/x?ssl_y=1",
        ),
        (
            {"TIDEMARK_REDIS_CA_FILE": "/a b/ca.crt"},
            "rediss://a:1,b/x?ssl_y=1&ssl_ca_certs=%2Fa+b%2Fca.crt",
        ),
        (
            {"TIDEMARK_REDIS_CERT_FILE": "tls.crt", "TIDEMARK_REDIS_KEY_FILE": "tls.key"},
            "rediss://a:1,b/x?ssl_y=1&ssl_certfile=tls.crt&ssl_keyfile=tls.key",
        ),
    ],
)
def test_login_and_files_become_part_of_the_url_of_the_store(
    environ: Mapping[str, str], url: str
) -> None:
    """S5, S9: as they are, from Secrets that other software writes."""
    assert StorageSettings.from_environment({**REDIS, **environ}).redis_server_url == url


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"TIDEMARK_REDIS_USERNAME": "user"}, "TIDEMARK_REDIS_USERNAME: needs"),
        (
            {"TIDEMARK_REDIS_URL": "redis://:secret@a", "TIDEMARK_REDIS_PASSWORD": "secret"},
            "TIDEMARK_REDIS_PASSWORD: must not be set",
        ),
        ({"TIDEMARK_REDIS_CERT_FILE": "tls.crt"}, "must be set together"),
        ({"TIDEMARK_REDIS_KEY_FILE": "tls.key"}, "must be set together"),
        (
            {"TIDEMARK_REDIS_URL": "redis://a", "TIDEMARK_REDIS_CA_FILE": "ca.crt"},
            "need a TIDEMARK_REDIS_URL that begins with rediss",
        ),
    ],
)
def test_a_login_that_does_not_fit_the_url_of_the_store_is_refused(
    environ: Mapping[str, str], why: str
) -> None:
    """S3, S9: without showing it."""
    with pytest.raises(SettingsError, match=why) as caught:
        StorageSettings.from_environment({**REDIS, **environ})

    assert "secret" not in str(caught.value)


def test_the_password_of_the_store_is_not_shown_with_the_settings() -> None:
    """S9."""
    settings = StorageSettings.from_environment({**REDIS, "TIDEMARK_REDIS_PASSWORD": "secret"})

    assert "secret" not in repr(settings)


def test_a_directory_with_unprintable_characters_is_refused() -> None:
    with pytest.raises(SettingsError):
        StorageSettings.from_environment({"TIDEMARK_STORAGE_DATA_DIR": "a\x00b"})


def test_a_service_ignores_the_variables_of_others() -> None:
    LifecycleSettings.from_environment({"TIDEMARK_BROKER_LISTEN": "nonsense"})


def test_a_service_with_wrong_settings_exits_with_2_and_one_line() -> None:
    """S5: what `python -m broker_svc` does with a wrong value."""
    program = "from tidemark.settings import *; load_or_exit(BrokerSettings); print('not reached')"

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TIDEMARK_PARTITIONS": "many"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "TIDEMARK_PARTITIONS='many': must be a whole number from 0 to 1024\n"


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("TIDEMARK_STORAGE_ADDRESSES", "a:1,b:1,a:1", "all different"),
        ("TIDEMARK_BROKERS", "x=a:1,x=b:1", "each id and each address once"),
        ("TIDEMARK_BROKERS", "x=a:1,y=a:1", "each id and each address once"),
    ],
)
def test_a_list_that_names_a_member_twice_is_refused_with_that_reason(
    variable: str, value: str, why: str
) -> None:
    """S8: a duplicate would be asked twice, and would be taken for two members."""
    with pytest.raises(SettingsError, match=why):
        BrokerSettings.from_environment({variable: value})


def test_right_settings_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMARK_PARTITIONS", "9")

    assert load_or_exit(BrokerSettings).partitions == 9


def test_misspelt_variables_are_found() -> None:
    environ = {
        "TIDEMARK_PARTITONS": "8",
        "TIDEMARK_BROKER_PORT": "7400",
        "TIDEMARK_PARTITIONS": "8",
        "TIDEMARK_STORAGE_LISTEN": "127.0.0.1:0",
        "PATH": "/bin",
    }

    assert unknown_variables(environ) == ("TIDEMARK_BROKER_PORT", "TIDEMARK_PARTITONS")


def test_what_kubernetes_adds_is_not_taken_for_a_misspelling() -> None:
    environ = {
        "TIDEMARK_BROKER_SERVICE_HOST": "10.0.0.1",
        "TIDEMARK_BROKER_SERVICE_PORT": "7400",
        "TIDEMARK_BROKER_SERVICE_PORT_GRPC": "7400",
        "TIDEMARK_BROKER_PORT": "tcp://10.0.0.1:7400",
        "TIDEMARK_BROKER_PORT_7400_TCP": "tcp://10.0.0.1:7400",
        "TIDEMARK_BROKER_PORT_7400_TCP_ADDR": "10.0.0.1",
        "TIDEMARK_BROKER_PORT_7400_TCP_PORT": "7400",
        "TIDEMARK_BROKER_PORT_7400_TCP_PROTO": "tcp",
    }

    assert unknown_variables(environ) == ()


def test_every_known_variable_is_declared_the_same_way_everywhere() -> None:
    declared: dict[str, object] = {}
    for service in SERVICES:
        for variable in service.variables():
            assert declared.setdefault(variable.name, variable) == variable
            assert variable.doc.endswith("."), variable.name


def _text(default: object) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default).lower()


@pytest.mark.parametrize("service", SERVICES)
def test_every_default_is_itself_allowed(service: type[ServiceSettings]) -> None:
    environ = {
        variable.name: _text(variable.default)
        for variable in service.variables()
        if variable.default not in ("", ())
    }

    assert service.from_environment(environ) == service()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BrokerSettings().partitions = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("localhost:7400", "localhost", 7400), ("[::1]:0", "::1", 0), ("10.0.0.1:1", "10.0.0.1", 1)],
)
def test_an_address_splits_into_host_and_port(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://both:4317"}


@pytest.mark.parametrize(
    ("environ", "traces", "metrics"),
    [
        ({}, "", ""),
        (ENDPOINT, "http://both:4317", "http://both:4317"),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, "", ""),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}, "http://both:4317", ""),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, "", "http://both:4317"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1"}, "http://t:1", ""),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m:1"}, "", "http://m:1"),
        (
            ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1"},
            "http://t:1",
            "http://both:4317",
        ),
    ],
)
def test_the_standard_variables_decide_what_is_exported(
    environ: Mapping[str, str], traces: str, metrics: str
) -> None:
    """S4: traces and metrics with OpenTelemetry."""
    settings = TelemetrySettings.from_environment(environ)

    assert (settings.traces_endpoint, settings.metrics_endpoint) == (traces, metrics)
