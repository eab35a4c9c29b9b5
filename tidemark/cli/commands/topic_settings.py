"""The settings of a topic on the command line, listed once.

`with_settings` adds an option for each to a command; `tidemark topic get` shows a line for each.
`tidemark.topics` defines their meaning and ranges.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from tidemark.cli.command import Call, Command
from tidemark.cli.display import units
from tidemark.cli.options import duration_ms, duration_s, key_value, parser_of, size_bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """A topic setting as a command-line option."""

    name: str
    option: str
    doc: str
    type: Any
    parser: Callable[[Any], Any] | None = None
    metavar: str | None = None
    show: Callable[[Any], str] = str


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parser_of(parse)


def _weight(text: str) -> tuple[str, int]:
    key, value = key_value(text)
    if not value.isdecimal():
        raise ValueError(f"{text!r}: a weight is a number")
    return key, int(value)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a number")
    return number


def _off_or(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: show(value) if value else "off"


def seconds_text(value: int) -> str:
    return units.duration(value * 1000)


_WHOLE_MAX: Final = 2**32 - 1
_DURATION: Final = "DURATION"
_YES_NO: Final = {True: "yes", False: "no"}

SETTINGS: Final = (
    Setting(
        "subscription",
        "--subscription",
        "Who may consume a queue: shared or exclusive.",
        str,
        _choice("shared", "exclusive"),
        "KIND",
    ),
    Setting("partitions", "--partitions", "Number of partitions of the plain queue.", int),
    Setting(
        "visibility_timeout_ms",
        "--visibility-timeout",
        "How long messages stay reserved.",
        int,
        duration_ms,
        _DURATION,
        units.duration,
    ),
    Setting(
        "max_attempts",
        "--max-attempts",
        "Failed deliveries after which a message is dead; 0 for no limit.",
        int,
        show=_off_or(str),
    ),
    Setting(
        "dead_letter_topic",
        "--dead-letter-topic",
        "Topic for dead letters.",
        str,
        show=_off_or(str),
    ),
    Setting(
        "retention_enabled",
        "--retention/--no-retention",
        "Keep settled messages until retention removes them.",
        bool,
        show=_YES_NO.__getitem__,
    ),
    Setting(
        "retention_seconds",
        "--retention-age",
        "Age at which messages are removed; 0 for never.",
        int,
        duration_s,
        _DURATION,
        _off_or(seconds_text),
    ),
    Setting(
        "completed_retention_seconds",
        "--completed-retention-age",
        "Age at which settled messages are removed; 0 for never.",
        int,
        duration_s,
        _DURATION,
        _off_or(seconds_text),
    ),
    Setting(
        "max_wait_time_seconds",
        "--max-wait",
        "Age at which unsettled messages are removed; 0 for never.",
        int,
        duration_s,
        _DURATION,
        _off_or(seconds_text),
    ),
    Setting(
        "max_wait_action",
        "--max-wait-action",
        "What happens at --max-wait: delete or dead_letter.",
        str,
        _choice("delete", "dead_letter"),
        "ACTION",
    ),
    Setting(
        "idle_after_ms",
        "--idle-after",
        "How long a queue stays loaded after its last use.",
        int,
        duration_ms,
        _DURATION,
        units.duration,
    ),
    Setting(
        "queue_messages_max",
        "--queue-messages-max",
        "Maximum messages of one queue; 0 for no limit.",
        int,
        show=_off_or(units.count),
    ),
    Setting(
        "queue_bytes_max",
        "--queue-bytes-max",
        "Maximum bytes of one queue; 0 for no limit.",
        int,
        size_bytes,
        "SIZE",
        _off_or(units.size),
    ),
    Setting(
        "fairness_weights",
        "--weight",
        "Weight of a fairness key, 1 to 100; repeatable.",
        list[str],  # repeatable; the parser makes pairs
        parser_of(_weight),
        "KEY=N",
        _off_or(lambda weights: " ".join(f"{key}={weights[key]}" for key in sorted(weights))),
    ),
    Setting(
        "default_ttl_ms",
        "--default-ttl",
        "Default time to live of messages; 0 for no limit.",
        int,
        duration_ms,
        _DURATION,
        _off_or(units.duration),
    ),
    Setting(
        "consumption_records",
        "--consumption-records",
        "Whether each settlement is recorded: on, off or default, which depends on the engine.",
        str,
        _choice("on", "off", "default"),
        "CHOICE",
    ),
    Setting(
        "retry_delay_ms",
        "--retry-delay",
        "Delay after a failed delivery; 0 for none.",
        int,
        duration_ms,
        _DURATION,
        _off_or(units.duration),
    ),
    Setting(
        "retry_delay_ms_max",
        "--retry-delay-max",
        "Longest delay after failed deliveries; 0 for 12h.",
        int,
        duration_ms,
        _DURATION,
        _off_or(units.duration),
    ),
    Setting(
        "retry_multiplier",
        "--retry-multiplier",
        "Factor by which --retry-delay grows with each failure, 1 to 100.",
        float,
        parser_of(_number),
        "NUMBER",
        "{:g}".format,
    ),
    Setting(
        "retry_jitter",
        "--retry-jitter",
        "Share of the delay that chance may take off, 0 to 1.",
        float,
        parser_of(_number),
        "SHARE",
        _off_or("{:g}".format),
    ),
    Setting(
        "retry_place",
        "--retry-place",
        "Where a message goes after a failed delivery: first, behind or default.",
        str,
        _choice("first", "behind", "default"),
        "PLACE",
    ),
    Setting(
        "group_expiry_seconds",
        "--group-expiry",
        "Time after which an unused group is removed; 0 for never.",
        int,
        duration_s,
        _DURATION,
        _off_or(seconds_text),
    ),
)


def with_settings(function: Callable[..., Any]) -> Command:
    """Add an option per setting to a command; the given ones are passed as `settings`."""

    async def run(call: Call, **arguments: Any) -> None:
        named = {each.name: arguments.pop(each.name) for each in SETTINGS}
        settings = {name: value for name, value in named.items() if value not in (None, [])}
        if "fairness_weights" in settings:
            settings["fairness_weights"] = dict(settings["fairness_weights"])
        await function(call, settings=settings, **arguments)

    own = list(inspect.signature(function, eval_str=True).parameters.values())
    parameters = [each for each in own if each.name != "settings"]
    for each in SETTINGS:
        whole = each.type is int and each.parser is None
        option = typer.Option(
            each.option,
            parser=each.parser,
            metavar=each.metavar,
            min=0 if whole else None,
            max=_WHOLE_MAX if whole else None,
            help=each.doc,
        )
        parameters.append(
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[each.type | None, option],
                default=None,
            )
        )
    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
