"""Settings: the only package that reads the environment.

Each setting is declared once, with its variable, default, allowed values and meaning. Services get
frozen values, and `docs/CONFIG.md` is generated from the same declarations. A process keeps the
settings it started with.

To add a setting, add a field with `setting(...)` to the class of its service, in the module of that
name. Other packages import from here.
"""

from tidemark.settings.broker import BrokerSettings
from tidemark.settings.client import ClientSettings
from tidemark.settings.declaration import Settings, load_or_exit, part, setting
from tidemark.settings.environment import keep_grpc_out_of_forks, turn_off_grpc_event_engine
from tidemark.settings.known_variables import PREFIX, SERVICES, unknown_variables
from tidemark.settings.lifecycle import LifecycleSettings
from tidemark.settings.retention import RetentionSettings
from tidemark.settings.service import ServiceSettings
from tidemark.settings.storage import StorageSettings
from tidemark.settings.telemetry import TelemetrySettings

__all__ = [
    "PREFIX",
    "SERVICES",
    "BrokerSettings",
    "ClientSettings",
    "LifecycleSettings",
    "RetentionSettings",
    "ServiceSettings",
    "Settings",
    "StorageSettings",
    "TelemetrySettings",
    "keep_grpc_out_of_forks",
    "load_or_exit",
    "part",
    "setting",
    "turn_off_grpc_event_engine",
    "unknown_variables",
]
