"""Takes secrets out of what is about to be shown or stored."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

__all__ = ["redacted", "redacted_command", "redacted_text"]


def redacted(tree: Any) -> Any:
    """A copy of nested mappings, sequences, dataclasses and text in which `***` stands for every secret.

    A secret is what a class with `get_secret_value` guards; what has a name that says so, be it a number or a whole
    branch; and what `redacted_text` finds in a text. None, booleans and empty text hide nothing and stay. Dataclasses
    become dicts and sets lists. An object of any other kind is given back as it is: make a text of it first.

    A name says so if it contains `secret`, `password`, `passwd`, `passphrase`, `credential`, `authorization`, `cookie`
    or a kind of key or token (`api_key`, `accessKeyId`, `auth_tokens`, ...); if it ends with `token`, `_auth` or
    `_pwd`; if it is in capitals and ends with `_KEY`; if it is `key` or `auth` alone. So `eos_token` is hidden, and
    `tokenizer`, `max_tokens`, `eos_token_id`, `state_key` and `key_metric` are shown.

    >>> redacted({"tokenizer": "bpe", "hub_token": "hf_x", "state_key": "a", "wandb": {"apiKey": "x", "mode": "on"}})
    {'tokenizer': 'bpe', 'hub_token': '***', 'state_key': 'a', 'wandb': {'apiKey': '***', 'mode': 'on'}}
    """
    if hasattr(type(tree), "get_secret_value") or not _GUARDS.isdisjoint(base.__name__ for base in type(tree).__mro__):
        return "***"
    match tree:
        case str():
            return redacted_text(tree)
        case bytes():
            return redacted_text(tree.decode("latin-1")).encode("latin-1")
        case Mapping():
            return {redacted(name) if isinstance(name, str) else name: _under(name, tree[name]) for name in tree}
        case tuple() if names := getattr(tree, "_fields", ()):
            named: Any = type(tree)
            return named(*map(_under, names, tree))
        case tuple():
            return tuple(_row(tree))
        case list() | Set():
            return _row(tree)
        case _ if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            return {field.name: _under(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    return tree


def redacted_command(argv: Iterable[str]) -> list[str]:
    """The words of a command line, without the values of options like `--token` and without secrets in the others.

    >>> redacted_command(["train.py", "--token", "hf_x", "logger.api_key=x", "--data=https://me:pw@host/x"])
    ['train.py', '--token', '***', 'logger.api_key=***', '--data=https://***@host/x']
    """
    return _row(argv)


def redacted_text(text: str) -> str:
    """A text without the secrets that can be told by what stands before them.

    These are the user and password of a URL; its signature and secret parameters; what follows `Authorization:`,
    `Cookie:` or `Bearer`; and values in `name=value`, `name: value` and `--name value`. Here `key` alone says something
    only as an option, in quotes or in a URL: `sorted(key=len)` stays.

    >>> redacted_text("GET https://me:pw@host/x?page=2&X-Amz-Signature=abc with HF_TOKEN=hf_x and --api-key x")
    'GET https://***@host/x?page=2&X-Amz-Signature=*** with HF_TOKEN=*** and --api-key ***'
    """
    text = _BEARER.sub(r"\1***", _USER.sub("***@", text))
    shown, done = "", 0
    for name in _NAME.finditer(text):
        if name.start() >= done and _says_so(name) and (value := _value(name)):
            quote = value["quote"] or ""
            shown += f"{text[done : name.end()]}{quote}***{quote}"
            done = value.end()
    return shown + text[done:]


def _under(name: object, value: object) -> object:
    """What may be shown under a name."""
    if value is None or isinstance(value, bool) or (isinstance(value, str | bytes) and not value):
        return value
    return "***" if isinstance(name, str) and _is_secret(name) else redacted(value)


def _row(items: Iterable[Any]) -> list[Any]:
    """Items one after the other. They may be words of a command: what follows `--token` is its value."""
    shown: list[Any] = []
    awaited = False
    for item in items:
        word = _WORD.fullmatch(item) if isinstance(item, str) else None
        if awaited and isinstance(item, str) and not item.startswith("--"):
            shown.append(item and "***")
            awaited = False
        elif word and word["value"] is not None:
            value = _under(word["name"], word["value"])
            shown.append(f"{word['name']}={value}")
            awaited = False
        else:
            shown.append(redacted(item))
            awaited = bool(word) and item.startswith("-") and _is_secret(item)
    return shown


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(_words(name)) or _CAPITALS.search(name))


def _words(name: str) -> str:
    return _EDGE.sub("_", name).lower().strip("_")


def _says_so(name: re.Match[str]) -> bool:
    """Whether a name that was found in a text says that a secret follows."""
    before = name.string[max(name.start() - 1, 0) : name.start()]
    words = _words(name["name"])
    if words == "key":
        return bool(name["dashes"] or name["shut"]) or before in ("?", "&")
    return _is_secret(name["name"]) or (words in _SIGNED and before in ("?", "&"))


def _value(name: re.Match[str]) -> re.Match[str] | None:
    """What follows a name in a text, if it hides something."""
    value = _VALUE.match(name.string, name.end())
    quoted = name["shut"] or (value and value["quote"])
    if name["name"].lower().endswith(("authorization", "cookie")) and not quoted:
        opened = name.string[max(name.start() - 1, 0) : name.start()]
        return _LINES.get(opened, _LINE).match(name.string, name.end())  # a header's value has spaces
    return value if value and value[0] not in _NOTHING and value["quoted"] != "" else None


_GUARDS = frozenset({"SecretBytes", "SecretStr"})  # what pydantic and others call them
_NOTHING = frozenset({"None", "null", "True", "true", "False", "false"})
_SIGNED = frozenset({"sig", "signature", "google_access_id"})  # parameters of a URL
_KINDS = "access|account|api|auth|client|deploy|encryption|license|master|private|secret|service|session|shared"

# in names whose words are small and joined by "_"
_SECRET = re.compile(
    rf"""secret|password|passwd|passphrase|credential|authorization|cookie
    |(?:{_KINDS}|signing|ssh|storage)_?key|(?:{_KINDS}|bearer|refresh)_?token|x_(?:amz|goog)_signature
    |token_?\d*$|(?:^|_)auth$|_pwd$|^key$""",
    re.VERBOSE,
)
_CAPITALS = re.compile(r"(?<!\w)[A-Z\d_]+_KEY$")
_EDGE = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W_]+")

_USER = re.compile(
    r"""(?<=://)(?:
    # in these a name without a password is a container or a login, and shown
    (?<!abfs://)(?<!abfss://)(?<!wasb://)(?<!wasbs://)(?<!ssh://)(?<!sftp://)[^\s/?#"<>]{0,1024}@
    |[^\s/?#:@"<>]{0,256}:[^\s/?#"<>]{0,1024}@
    # a password may have a bare "/", and a port is no password
    |[^\s/?#:@"<>\[]{0,256}:(?!\d*[/?#])[^\s@"<>]{0,1024}@
    )""",
    re.VERBOSE,
)
_BEARER = re.compile(r"""(\bBearer\s+)[^\s"'<>]+""")
_WORD = re.compile(r"(?P<name>[-+~]*\w[\w./\[\]-]*)(?:=(?P<value>.*))?", re.DOTALL)
_NAME = re.compile(
    r"""(?<![\w.-])(?P<dashes>--?)?(?P<name>\w[\w.-]*+)(?P<shut>\\*["'])?\]?
    (?:[^\S\n]*+(?:=>|[:=]=?)[^\S\n]*+|(?(dashes)[^\S\n]++(?!--)|(?!)))""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""[bBfFrRuU]{0,2}(?P<quote>\\*(?:\"{3}|'{3}|["']))(?:(?P<quoted>(?s:.*?))(?<!\\)(?P=quote)|[^\n]+)
    |[\w.]*[(\[{][^()\[\]{}]*[)\]}]
    |[^\s&"'<>]*[^\s&"'<>,;)\]}]""",
    re.VERBOSE,
)
_LINE = re.compile(r"(?P<quote>)[^\r\n]+")
_LINES = {'"': re.compile(r'(?P<quote>)[^\r\n"]+'), "'": re.compile(r"(?P<quote>)[^\r\n']+")}
