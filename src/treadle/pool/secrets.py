"""Where secrets and personal data stand in a text: by name, by shape, by entropy.

Plain hexadecimal digests are left alone unless something names them: logs are full of commit ids and fingerprints.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

import msgspec
from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
from detect_secrets.plugins.pypi_token import PypiTokenDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.stripe import StripeDetector


class Hit(msgspec.Struct, frozen=True, order=True):
    start: int
    end: int
    category: str


_PLUGINS = (
    *(AWSKeyDetector, DiscordBotTokenDetector, GitHubTokenDetector, GitLabTokenDetector),
    *(PypiTokenDetector, SendGridDetector, SlackDetector, StripeDetector),
)
# Category, a lower-case piece of text without which the pattern can't match (looking for it is cheap), the pattern.
_SHAPES = [
    (
        "private_key",
        "private key",
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
    ),
    ("url_credentials", "://", re.compile(r"://(?P<value>[^\s/:@\"'<>]+:[^\s/@\"'<>]+)@")),
    (
        "bearer",
        "authorization",
        re.compile(
            r"(?i:authorization)\\?[\"']?[ \t]*:[ \t]*\\?[\"']?"
            r"(?:(?i:basic|bearer|digest|token|apikey)[ \t]+|(?=\S{0,200}[0-9]))(?P<value>[\w.~+/=-]{8,})"
        ),
    ),
    ("bearer", "bearer", re.compile(r"\b(?i:bearer)\s+(?P<value>(?=\S{0,200}[0-9])[\w.~+/-]{8,}=*)")),
    ("email", "@", re.compile(r"(?<![\w.+-])[\w.+-]+@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}(?![\w(\[]|\.\w)")),
    ("token", "eyj", re.compile(r"(?<![\w-])eyJ[\w=-]{8,1000}\.[\w=-]+(?:\.[\w.+/=-]*)?")),
    ("token", "sk-", re.compile(r"\bsk-[\w-]{20,}")),
    *(("token", "", pattern) for plugin in _PLUGINS for pattern in plugin.denylist),
]
_SURE = {
    "password": r"passwd|password|passphrase|pwd",
    "api_key": r"(?:api|access|secret|private|auth|encryption)[_-]?key|(?<=[A-Z0-9]_)(?-i:KEY)",
    "secret": r"secret",
}
_UNSURE = r"token|credentials?|auth"  # ordinary words in code: the value must look random besides
_WORD = "|".join(f"(?P<{category}>{words})" for category, words in _SURE.items()) + f"|(?P<token>{_UNSURE})"
_NEEDLES = ("pass", "pwd", "key", "secret", "token", "credential", "auth")
_ASSIGNED = re.compile(
    rf"(?i:{_WORD})\\*[\"']?(?P<between>\s*(?:=>|:=|:|=(?!=))\s*)"
    r"(?:[bru]?(?P<quote>\\*[\"'])(?P<quoted>[^\s\"'\\<>]{4,})(?:\\*[\"']|$)"
    r"|(?P<bare>[^\s\"'\\,;<>(){}\[\]]{4,})(?P<after>.?))"
)
_KEY = re.compile(rf"(?i:.*(?:{_WORD}))")
_LONG = re.compile(r"(?<![\w+/=-])[A-Za-z0-9+/_-]{24,128}={0,2}(?![\w+/=-])")
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|[A-Za-z_]+\d{0,2}|\w*_\w*")
_RECORD_ID = re.compile(r"(?:call|toolu|chatcmpl|resp|msg|fc|rs|run|thread)[_-]")
_STAND_IN = re.compile(
    r"[*x.•-]+|\$.*|.*\{.*|.*%[(sr].*|(?:your|example|dummy)[\w-]*|none|null|true|false|str|bytes|[/~][\w./-]*",
    re.IGNORECASE,
)
PLACEHOLDER = re.compile(r"<secret:[a-z_]+:[0-9a-f]{4}>")


def find(text: str) -> list[Hit]:
    """All secrets of a text, in order, without overlaps. What was replaced before is not found again."""
    hits = sorted(_all(text), key=lambda hit: (hit.start, -hit.end))
    if not hits:
        return []
    replaced = [match.span() for match in PLACEHOLDER.finditer(text)]
    kept: list[Hit] = []
    for hit in hits:
        covered = any(start < hit.end and hit.start < end for start, end in replaced)
        if not covered and (not kept or hit.start >= kept[-1].end):
            kept.append(hit)
    return kept


def named(name: str, value: str) -> str | None:
    """The category of a value that stands under a key of this name; None when it is no secret."""
    match = _KEY.fullmatch(name)
    if match is None or len(value) < 4 or PLACEHOLDER.search(value) or _STAND_IN.fullmatch(value):
        return None
    category = match.lastgroup or "secret"
    random = {"token": _looks_random, "api_key": _mixes}.get(category)
    if re.search(r"\s", value) or (random is not None and not random(value)):
        return None
    return category


def _all(text: str) -> Iterator[Hit]:
    lower = text.lower()
    if any(needle in lower for needle in _NEEDLES):
        for match in _ASSIGNED.finditer(text):
            value = "quoted" if match["quote"] else "bare"
            category = next(name for name in (*_SURE, "token") if match[name])
            if _assigns_secret(match, category, match[value]):
                start, end = match.span(value)
                yield Hit(start, end, category)
    for category, needle, pattern in _SHAPES:
        if needle in lower:
            for match in pattern.finditer(text):
                start, end = match.span("value" if "value" in pattern.groupindex else 0)
                yield Hit(start, end, category)
    for match in _LONG.finditer(text):
        if _is_dense(match.group()):
            yield Hit(match.start(), match.end(), "high_entropy")


def _assigns_secret(match: re.Match[str], category: str, value: str) -> bool:
    """Tell `API_KEY=zz-9f31` and `password: "hunter2"` from `token = tokens[0]`, `password: str` and `key=key1`."""
    if _STAND_IN.fullmatch(value) or (match["after"] and match["after"] in "(["):
        return False
    if category == "token":
        return _looks_random(value)
    if match["quote"]:
        return category != "api_key" or _mixes(value)
    if match["between"] == "=" and match[category].isupper():
        return True  # as in a .env file
    return _mixes(value) and (match["between"].strip() == ":" or not _IDENTIFIER.fullmatch(value))


def _mixes(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _looks_random(value: str) -> bool:
    return len(value) >= 12 and _mixes(value) and len(_PIECES.findall(value)) >= 3


def _is_dense(word: str) -> bool:
    """Random characters change class every one or two; identifiers and paths are made of words."""
    kinds = (str.isupper, str.islower, str.isdigit)
    if not all(any(kind(c) for c in word) for kind in kinds) or _RECORD_ID.match(word):
        return False
    pieces = _PIECES.findall(word)
    return sum(map(len, pieces)) / len(pieces) < 2.2 and _entropy(word) > 3.8


def _entropy(word: str) -> float:
    """Shannon entropy of the characters, in bits a character."""
    counts = Counter(word).values()
    return -sum(n / len(word) * math.log2(n / len(word)) for n in counts)
