"""What is taken out of configurations, command lines and text before they are shown, and what is left in."""

import json
import shlex
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loopline.core import redact
from loopline.core.redact import redacted, redacted_command, redacted_text

CANARY = "c4n4ry"

SECRET_NAMES = [
    "token", "TOKEN", "hf_token", "HF_TOKEN", "hubToken", "hub-token", "token2", "auth_tokens", "accessToken",
    "eos_token",
    "secret", "client_secret", "secrets", "AWS_SECRET_ACCESS_KEY", "secretAccessKey",
    "password", "PGPASSWORD", "db.password", "password1", "passwd", "db_pwd", "passphrase",
    "key", "api_key", "apikey", "API-KEY", "apiKey", "WANDB_API_KEY", "OPENAI_KEY", "env.OPENAI_KEY", "accessKeyId",
    "private_key", "AccountKey", "ssh_key_path",
    "credential", "credentials", "X-Amz-Credential", "X-Amz-Signature", "x_goog_signature",
    "authorization", "Proxy-Authorization", "auth", "basic_auth", "cookie", "Set-Cookie", "cookies",
]  # fmt: skip

PLAIN_NAMES = [
    "monkey", "key_metric", "state_key", "sort_key", "keys", "keyboard", "image_key", "keynote",
    "tokenizer", "tokens", "max_tokens", "token_count", "eos_token_id", "tokens_per_second", "tokenize",
    "author", "authors", "authored", "passed", "compass", "signature", "sig", "pwd", "lr", "name", "hockey",
]  # fmt: skip

LAST_WORDS = ["token", "secret", "password", "passwd", "api_key", "apikey", "credential", "authorization", "cookie"]

words = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
secret_names = st.sampled_from(SECRET_NAMES) | st.builds(
    lambda first, last, join, change: change(join.join([*first, last])),
    st.lists(words, max_size=2),
    st.sampled_from(LAST_WORDS),
    st.sampled_from(["_", "-", "."]),
    st.sampled_from([str, str.upper, str.title]),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "bf16", "a b"])
plain_trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(PLAIN_NAMES), inner, max_size=3)
    ),
    max_leaves=12,
)


@dataclass
class Login:
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Settings:
    login: Login
    url: str
    lr: float = 0.1


class SecretStr:
    """As pydantic has it."""

    def __init__(self, value):
        self.value = value


class Guarded:
    def __init__(self, value):
        self.value = value

    def get_secret_value(self):
        return self.value


class SubSecret(SecretStr, str):
    __slots__ = ("value",)

    def __new__(cls, value):
        return str.__new__(cls, value)


Pair = namedtuple("Pair", ["user", "password"])


def shows(tree):
    """Whether the canary is anywhere in what is left; classes that guard it by themselves have been replaced."""
    return CANARY in repr(tree)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_what_stands_under_a_secret_name_is_hidden(name):
    assert redacted({name: CANARY}) == {name: "***"}


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_a_name_that_only_looks_like_one_is_shown(name):
    assert redacted({name: CANARY}) == {name: CANARY}


@pytest.mark.parametrize("value", [123456, 1.5, b"abc", ["a", "b"], {"user": "me", "pin": 1}, ("a",), object()])
def test_under_a_secret_name_numbers_and_whole_branches_are_hidden(value):
    assert redacted({"api_key": value}) == {"api_key": "***"}


@pytest.mark.parametrize("value", [None, True, False, "", b""])
def test_what_hides_nothing_is_shown_under_any_name(value):
    assert redacted({"token": value}) == {"token": value}


@pytest.mark.parametrize("guard", [SecretStr, Guarded, SubSecret], ids=lambda guard: guard.__name__)
def test_a_guarded_value_is_hidden_wherever_it_is(guard):
    assert redacted([guard(CANARY), {"x": guard(CANARY)}, (guard(CANARY),)]) == ["***", {"x": "***"}, ("***",)]


def test_dataclasses_named_tuples_and_other_mappings_are_looked_into():
    tree = [
        Settings(Login("me", CANARY), f"https://me:{CANARY}@host/x"),
        Pair("me", CANARY),
        MappingProxyType({"inner": OrderedDict(hub_token=CANARY)}),
        {f"https://me:{CANARY}@host"},
    ]
    assert redacted(tree) == [
        {"login": {"user": "me", "password": "***"}, "url": "https://***@host/x", "lr": 0.1},
        Pair("me", "***"),
        {"inner": {"hub_token": "***"}},
        ["https://***@host"],
    ]


def test_what_is_given_is_not_changed():
    tree = {"token": CANARY, "deep": [{"password": CANARY}]}
    redacted(tree)
    assert tree == {"token": CANARY, "deep": [{"password": CANARY}]}


@given(plain_trees)
def test_a_tree_without_secrets_is_unchanged(tree):
    assert redacted(tree) == tree


@given(st.data(), plain_trees, secret_names)
def test_a_canary_under_a_secret_name_never_survives_at_any_depth(data, tree, name):
    value = data.draw(st.sampled_from([CANARY, [CANARY], {"x": CANARY}, CANARY.encode(), f"a {CANARY}"]))
    tree = {name: value, "beside": tree}
    for _ in range(data.draw(st.integers(0, 4))):
        wrap = data.draw(st.sampled_from([lambda t: [t], lambda t: (1, t), lambda t: {"in": t}, lambda t: Pair(t, 1)]))
        tree = wrap(tree)
    assert not shows(redacted(tree))


user_texts = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), max_size=8).map(
    lambda text: quote(text, safe="!$&'()*+,;=-._~")
)


@given(
    st.sampled_from(["https", "http", "postgresql+psycopg2", "redis", "s3", "git+https", "ssh", "abfs", "HTTPS"]),
    user_texts,
    user_texts,
    user_texts,
    st.sampled_from(["", " now", '"', ")", "/x", "/a@b?c=d", "?x=1#f", ":8080/x"]),
)
def test_a_password_in_a_url_never_survives_in_text(scheme, user, before, after, end):
    text = f"could not reach ({scheme}://{user}:{before}{CANARY}{after}@host{end} again"
    assert not shows(redacted({"why": [text]}))


@given(
    st.sampled_from(["token", "access_token", "sig", "Signature", "X-Amz-Signature", "X-Amz-Credential", "key",
                     "api_key", "X-Amz-Security-Token", "X-Goog-Signature", "AWSAccessKeyId", "GoogleAccessId",
                     "password"]),
    st.lists(st.tuples(words, words), max_size=3),
    st.lists(st.tuples(words, words), max_size=3),
    st.from_regex(r"[A-Za-z0-9%/+=._~-]{0,12}", fullmatch=True),
)  # fmt: skip
def test_a_secret_parameter_of_a_url_never_survives_and_the_others_stay(name, before, after, more):
    assume(not any(redact._is_secret(n) or n in redact._SIGNED for n, _ in before + after))
    parameters = [f"{n}={v}" for n, v in before], [f"{n}={v}" for n, v in after]
    secret = "&".join([*parameters[0], f"{name}={CANARY}{more}", *parameters[1]])
    hidden = "&".join([*parameters[0], f"{name}=***", *parameters[1]])
    assert redacted_text(f"GET https://host/x?{secret} 403") == f"GET https://host/x?{hidden} 403"


@given(secret_names, st.text(max_size=5), st.text(max_size=5), st.booleans())
def test_a_secret_option_of_a_command_never_survives(name, before, after, joined):
    assume(not before.startswith("--"))
    value = before + CANARY + after
    argv = ["train.py", *([f"--{name}={value}"] if joined else [f"--{name}", value]), "--lr", "0.1"]
    hidden = [f"--{name}=***"] if joined else [f"--{name}", "***"]
    assert redacted_command(argv) == ["train.py", *hidden, "--lr", "0.1"]


@given(st.lists(st.sampled_from(["train.py", "--lr", "0.1", "--tokenizer", "bpe", "optim.lr=3", "--verbose", "-v"])))
def test_a_command_without_secrets_is_unchanged(argv):
    assert redacted_command(argv) == argv


def test_an_option_without_a_value_hides_nothing_of_the_next_option():
    assert redacted_command(["--use-token", "--lr", "0.1"]) == ["--use-token", "--lr", "0.1"]


def test_a_command_inside_a_tree_is_a_command():
    assert redacted({"argv": ["train.py", "--token", CANARY]}) == {"argv": ["train.py", "--token", "***"]}


@given(
    secret_names.filter(lambda name: name != "key"),
    st.from_regex(r"[A-Za-z0-9!#$%*+./:;?@^_`|~=-]{0,6}", fullmatch=True),
)
def test_a_canary_after_a_secret_name_never_survives_in_text(name, more):
    value = CANARY + more
    texts = [
        f"{name}={value}",
        f"export {name}={value} && run",
        f"run --{name} {value} now",
        f"run --{name}={value} now",
        f"{name}: {value}",
        f"Login({name}='{value}', x=1)",
        f'x["{name}"] = "{value}"',
        repr({"x": {name: value}, "y": 1}),
        repr({"x": {name: value.encode()}}),
        repr({name: [value, value]}),
        json.dumps({"x": {name: value}}),
        json.dumps(json.dumps({"x": {name: value}})),
        shlex.join(["run", f"--{name}", f"a {value}"]),
    ]
    assert [text for text in texts if shows(redacted_text(text))] == []


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Basic bWU6cHc=", "Authorization: ***"),
        ("authorization: Bearer a.b-c", "authorization: ***"),
        ("sent Bearer a.b-c, got 403", "sent Bearer *** got 403"),
        ("curl -H 'Authorization: Basic bWU6' https://x", "curl -H 'Authorization: ***' https://x"),
        ('Authorization: Digest user="me", response="6629"', "Authorization: ***"),
        ("{'Authorization': 'Basic bWU6', 'Accept': '*/*'}", "{'Authorization': '***', 'Accept': '*/*'}"),
        ("Cookie: a=b; c=d\nHost: x", "Cookie: ***\nHost: x"),
        ("AUTHORIZATION=Basic bWU6", "AUTHORIZATION=***"),
    ],
)
def test_headers_that_prove_who_one_is_are_hidden(text, hidden):
    assert redacted_text(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "sorted(names, key=len)",
        "the key: use bf16",
        "state_key=3 key_metric=1 monkey=2 max_tokens: 5",
        "https://host:8080/a@b and https://host/@me?page=2",
        "http://[::1]:80/x@y",
        "abfs://container@account.dfs.core.windows.net/x",
        "ssh://git@github.com/x/y",
        "me@example.org said sig=3",
        "token=None, api_key=null, password=''",
        "loss 0.1 at step 5, C:/data, 12:30:05",
        "a Basic course for the bearer of tokens",
    ],
)
def test_a_text_without_secrets_is_unchanged(text):
    assert redacted_text(text) == text


@given(
    st.lists(
        st.sampled_from(
            ["loss", "0.5", "lr=0.1", "step:", "3", "(x)", "'a'", '"b": 2', "\n", "--lr 1", "https://h/x?a=b", "@", "&"]
        )
    )
)
def test_any_mixture_of_harmless_words_is_unchanged(words):
    text = " ".join(words)
    assert redacted_text(text) == text


@given(
    st.text()
    | st.lists(st.sampled_from(["token", "=", ":", "'", '"', "\\", " ", "https://", "@", "abc", "--", "(", "\n"])).map(
        "".join
    )
)
def test_what_is_hidden_once_stays_as_it_is(text):
    once = redacted_text(text)
    assert redacted_text(once) == once


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    ["a", "a-", "token=", "token='", "://", "https://a:", "--token ", "token=(", '\\"', "Bearer ", "_token", "a.b="],
)
def test_long_texts_are_read_in_good_time(piece):
    redacted_text(piece * (200_000 // len(piece)))


def test_the_environment_is_never_read(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    assert not shows([redacted({"HF_TOKEN": "$HF_TOKEN", "x": "${HF_TOKEN}"}), redacted_text("$HF_TOKEN is not set")])


def test_a_redaction_that_knows_no_names_is_caught_by_the_canary(monkeypatch):
    """The checks above can fail."""
    monkeypatch.setattr(redact, "_is_secret", lambda name: False)
    trees = [{"token": CANARY}, {"x": f"password={CANARY}"}, ["--api-key", CANARY]]
    assert [shows(redacted(tree)) for tree in trees] == [True, True, True]


def test_a_redaction_that_knows_no_urls_is_caught_by_the_canary(monkeypatch):
    monkeypatch.setattr(redact, "_USER", redact._BEARER)
    assert shows(redacted_text(f"https://me:{CANARY}@host"))
