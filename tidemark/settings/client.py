"""Settings of the command line: the addresses of the services."""

from dataclasses import dataclass

from tidemark.settings.declaration import Settings, setting
from tidemark.settings.service import address_of_lifecycle, addresses_of_storage
from tidemark.settings.variables import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(Settings):
    """The command line, `tidemark ...`."""

    address: str = setting(
        "TIDEMARK_ADDRESS",
        Address(),
        default="127.0.0.1:7400",
        doc="Address of a broker.",
    )
    storage_addresses: tuple[str, ...] = addresses_of_storage()
    lifecycle_address: str = address_of_lifecycle()
    jobs_address: str = setting(
        "TIDEMARK_JOBS_ADDRESS",
        Address(),
        default="127.0.0.1:7430",
        doc="Address of the retention and eviction scheduler.",
    )
