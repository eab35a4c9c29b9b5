"""The known variables, and those that look like ours but are not known."""

import re
from collections.abc import Mapping
from typing import Final

from tidemark.settings.broker import BrokerSettings
from tidemark.settings.client import ClientSettings
from tidemark.settings.environment import given_or_own
from tidemark.settings.lifecycle import LifecycleSettings
from tidemark.settings.retention import RetentionSettings
from tidemark.settings.storage import StorageSettings

PREFIX: Final = "TIDEMARK_"

SERVICES: Final = (StorageSettings, BrokerSettings, LifecycleSettings, RetentionSettings)
"""The settings of every service, as documented."""

# Kubernetes adds variables of these forms for every service `tidemark-x` in the namespace.
_SERVICE_LINK: Final = re.compile(
    r"\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)


def unknown_variables(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Variables with our prefix that no service reads: most likely misspelt."""
    environ = given_or_own(environ)
    readers = (*SERVICES, ClientSettings)
    known = {variable.name for reader in readers for variable in reader.variables()}
    return tuple(
        name
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known and not _is_service_link(name, environ)
    )


def _is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    if name.endswith("_PORT") and "://" in environ[name]:
        return True
    return _SERVICE_LINK.fullmatch(name) is not None
