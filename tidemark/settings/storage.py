"""Settings of the storage service: disk, memory, and how it depends on lifecycle."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from tidemark.settings.declaration import setting
from tidemark.settings.service import (
    ServiceSettings,
    address_of_lifecycle,
    addresses_of_storage,
    is_wildcard,
    url_of_registry,
)
from tidemark.settings.variables import (
    LISTEN,
    Address,
    Choice,
    Directory,
    File,
    Integer,
    RedisUrl,
    SettingsError,
    Switch,
    Text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings(ServiceSettings):
    """The storage service, `python -m storage_svc`."""

    listen: str = setting(
        "TIDEMARK_STORAGE_LISTEN",
        LISTEN,
        default="127.0.0.1:7410",
        doc="Address that the storage service listens on; port 0 picks a free port.",
    )
    data_dir: Path = setting(  # noqa: RUF009 - a field
        "TIDEMARK_STORAGE_DATA_DIR",
        Directory(),
        default=Path("tidemark-data"),
        doc="Data directory; created if missing.",
    )
    engine: str = setting(
        "TIDEMARK_STORAGE_ENGINE",
        Choice(("rocksdb", "redis")),
        default="rocksdb",
        doc="Where partitions are stored: `rocksdb` in the data directory, `redis` on the servers "
        "of `TIDEMARK_REDIS_URL`. See ENGINES.md.",
    )
    redis_url: str = setting(
        "TIDEMARK_REDIS_URL",
        RedisUrl(),
        default="",
        secret=True,
        doc="Redis or Valkey servers of the engine `redis`: one, several Sentinels and the name of "
        "the master, or several servers of a cluster.",
    )
    redis_username: str = setting(
        "TIDEMARK_REDIS_USERNAME",
        Text(),
        default="",
        doc="ACL user of the engine `redis`, in place of one in `TIDEMARK_REDIS_URL`; empty: the "
        "default user.",
    )
    redis_password: str = setting(
        "TIDEMARK_REDIS_PASSWORD",
        Text(),
        default="",
        secret=True,
        doc="Password of that user, as it is: not encoded as in a URL.",
    )
    redis_ca_file: str = setting(
        "TIDEMARK_REDIS_CA_FILE",
        File(),
        default="",
        doc="Certificates of the authorities by which servers of the engine `redis` are verified; "
        "empty: those of the system. For URLs that begin with `rediss`, like the next two.",
    )
    redis_cert_file: str = setting(
        "TIDEMARK_REDIS_CERT_FILE",
        File(),
        default="",
        doc="Client certificate for servers that ask for one.",
    )
    redis_key_file: str = setting(
        "TIDEMARK_REDIS_KEY_FILE",
        File(),
        default="",
        doc="Private key of the client certificate.",
    )
    redis_durability: str = setting(
        "TIDEMARK_REDIS_DURABILITY",
        Choice(("local", "replicated", "as-is")),
        default="local",
        doc="What a commit to the engine `redis` waits for: `local` for the synced append-only "
        "file of the master, `replicated` also for that of a replica, `as-is` only for the answer "
        "of the server. The first two are checked when a partition is opened.",
    )
    registry_url: str = url_of_registry()
    block_cache_bytes: int = setting(
        "TIDEMARK_STORAGE_BLOCK_CACHE_BYTES",
        Integer(1024 * 1024, 1024**4, unit="bytes"),
        default=64 * 1024 * 1024,
        doc="RocksDB block cache, indexes and filters included, shared by all partitions.",
    )
    write_buffer_bytes: int = setting(
        "TIDEMARK_STORAGE_WRITE_BUFFER_BYTES",
        Integer(1024 * 1024, 1024**4, unit="bytes"),
        default=64 * 1024 * 1024,
        doc="RocksDB write buffers, shared by all partitions.",
    )
    disk_free_bytes_min: int = setting(
        "TIDEMARK_STORAGE_DISK_FREE_BYTES_MIN",
        Integer(0, 1024**5, unit="bytes"),
        default=256 * 1024 * 1024,
        doc="Disk watermark: with less free space, publishes are rejected; settles and deletions "
        "continue.",
    )
    advertise: str = setting(
        "TIDEMARK_STORAGE_ADVERTISE",
        Address(),
        default="",
        doc="Address at which lifecycle and other nodes reach this process; empty: the listen "
        "address.",
    )
    storage_addresses: tuple[str, ...] = addresses_of_storage()
    create_lost: bool = setting(
        "TIDEMARK_STORAGE_CREATE_LOST",
        Switch(),
        default=False,
        doc="Whether partitions that are reported as DATA_LOST are created again, empty. For one "
        "start, once it is certain that their volume will not come back.",
    )
    lifecycle_address: str = address_of_lifecycle()
    await_sweep: bool = setting(
        "TIDEMARK_STORAGE_AWAIT_SWEEP",
        Switch(),
        default=True,
        doc="Whether an opened partition rejects publishes until its first sweep. Turn it off to "
        "run without a lifecycle service; partitions are then not announced.",
    )
    lifecycle_silent_after_ms: int = setting(
        "TIDEMARK_STORAGE_LIFECYCLE_SILENT_AFTER_MS",
        Integer(0, 86_400_000, unit="ms"),
        default=60_000,
        doc="Silence of the lifecycle service after which an alarm is raised; 0: never.",
    )
    lifecycle_silent_is_fault: bool = setting(
        "TIDEMARK_STORAGE_LIFECYCLE_SILENT_IS_FAULT",
        Switch(),
        default=False,
        doc="Whether partitions stop serving while the lifecycle service is silent.",
    )

    def __post_init__(self) -> None:
        if self.engine == "redis" and not self.redis_url:
            raise SettingsError("TIDEMARK_REDIS_URL: must be set for TIDEMARK_STORAGE_ENGINE=redis")
        if self.engine == "redis":
            self._check_redis_login()
            self._check_sharing()
        elif len(self.storage_addresses) > 1 and self.own_address not in self.storage_addresses:
            raise SettingsError(
                f"TIDEMARK_STORAGE_ADDRESSES={','.join(self.storage_addresses)!a}: must contain "
                f"the address of this node, {self.own_address} (TIDEMARK_STORAGE_ADVERTISE)"
            )

    def _check_sharing(self) -> None:
        if not self.registry_url and len(self.storage_addresses) > 1:
            raise SettingsError(
                "TIDEMARK_STORAGE_ADDRESSES: must name one node with TIDEMARK_STORAGE_ENGINE=redis "
                "unless the nodes share the partitions through TIDEMARK_REGISTRY_URL"
            )
        if self.registry_url and not self.advertise and is_wildcard(self.listen):
            raise SettingsError(
                "TIDEMARK_STORAGE_ADVERTISE: must be set beside TIDEMARK_REGISTRY_URL if "
                f"TIDEMARK_STORAGE_LISTEN is {self.listen}: other services cannot reach that "
                "address"
            )

    @property
    def shares_partitions(self) -> bool:
        """Whether the registry assigns partitions to this node, and not its data."""
        return self.engine == "redis" and bool(self.registry_url)

    def _check_redis_login(self) -> None:
        parts = urlsplit(self.redis_url)
        if self.redis_username and not self.redis_password:
            raise SettingsError("TIDEMARK_REDIS_USERNAME: needs TIDEMARK_REDIS_PASSWORD")
        if self.redis_password and "@" in parts.netloc:
            raise SettingsError(
                "TIDEMARK_REDIS_PASSWORD: must not be set, because TIDEMARK_REDIS_URL has a user "
                "or a password as well"
            )
        if bool(self.redis_cert_file) != bool(self.redis_key_file):
            raise SettingsError(
                "TIDEMARK_REDIS_CERT_FILE and TIDEMARK_REDIS_KEY_FILE: must be set together"
            )
        if self._redis_files and not parts.scheme.startswith("rediss"):
            raise SettingsError(
                "TIDEMARK_REDIS_CA_FILE, TIDEMARK_REDIS_CERT_FILE: need a TIDEMARK_REDIS_URL that "
                "begins with rediss"
            )

    @property
    def redis_server_url(self) -> str:
        """The URL with the user, the password and the files of the other settings in it."""
        parts = urlsplit(self.redis_url)
        netloc, query = parts.netloc, parts.query
        if self.redis_password:
            login = f"{quote(self.redis_username, safe='')}:{quote(self.redis_password, safe='')}"
            netloc = f"{login}@{netloc}"
        files = urlencode(self._redis_files)
        return urlunsplit(
            parts._replace(netloc=netloc, query="&".join(filter(None, (query, files))))
        )

    @property
    def _redis_files(self) -> dict[str, str]:
        """By the options of redis-py."""
        named = {
            "ssl_ca_certs": self.redis_ca_file,
            "ssl_certfile": self.redis_cert_file,
            "ssl_keyfile": self.redis_key_file,
        }
        return {option: file for option, file in named.items() if file}

    @property
    def own_address(self) -> str:
        """The address of this node as the others name it; its port may be 0 in a lone node."""
        return self.advertise or self.listen
