"""Removes secrets from text. Pure.

The agent logs no secrets. But a flag, a URL or an object that someone pasted into a file may have one.
"""

import re

REDACTED = "REDACTED"

_SECRET = (
    r"(?:[\w.-]*(?:token|password|passwd|secret|api-?key|credential|private-?key)[\w.-]*"
    r"|client-key-data|client-certificate-data|certificate-authority-data|idp-[\w-]+|proxy-authorization"
    r"|authorization|cookie|set-cookie)"
)
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_JWT = re.compile(r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*")
_HEADER = re.compile(
    r"^(?P<before>.*?\b(?:proxy-)?authorization[\"']?\s*[:=]\s*)(?P<value>[^\r\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/-]{8,}=*", re.IGNORECASE)
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@", re.IGNORECASE)
_QUOTED = re.compile(
    rf"([\"']{_SECRET}[\"']\s*[:=]\s*)(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,}}\]]+)", re.IGNORECASE
)
_PLAIN = re.compile(
    rf"((?:(?<=\s)|(?<=^)|(?<=-))(?:--)?{_SECRET}\s*[:=] ?)(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,}}\]]+)",
    re.IGNORECASE | re.MULTILINE,
)
_FLAG = re.compile(rf"(--{_SECRET}\s+)(?!(?-i:--[a-z][a-z0-9-]*(?:[=\s]|\Z)))(\S+)", re.IGNORECASE)
"""A value may begin with a hyphen, as base64 for URLs does. Another flag is no value."""
_ANNOTATIONS = re.compile(r"(?P<key>[\"']?annotations[\"']?\s*[:=]\s*)(?=[{\n\r])", re.IGNORECASE)
_TRACES = re.compile(
    r"-----begin|eyj|annotations|authorization|bearer|basic|://|cookie|token|passw|secret|key|credential"
    r"|client-cert|certificate-auth|idp-",
    re.IGNORECASE,
)
"""One of these is in each text with a secret. The search takes a tenth of the time of the replacements."""
_HARMLESS = frozenset({"", "null", "none", "true", "false", '""', "''", REDACTED})


def redact(text: str) -> str:
    """Replace secrets: keys and certificates, tokens, passwords, Authorization headers, credentials in URLs,
    and annotations, which may have any content.

    >>> redact("token: abc"), redact('"password": "x", "mode": "ebpf"'), redact("https://me:pw@api:6443")
    ('token: REDACTED', '"password": "REDACTED", "mode": "ebpf"', 'https://REDACTED@api:6443')
    >>> redact("Authorization: Bearer abc"), redact("--kubeconfig=/etc/a --token=b")
    ('Authorization: REDACTED', '--kubeconfig=/etc/a --token=REDACTED')
    """
    if not _TRACES.search(text):
        return text
    text = _PEM.sub(REDACTED, text)
    text = _without_annotations(text)
    text = _HEADER.sub(_redact_header, text)
    text = _JWT.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _USERINFO.sub(rf"\1{REDACTED}@", text)
    text = _QUOTED.sub(_redact_value, text)
    text = _PLAIN.sub(_redact_value, text)
    return _FLAG.sub(rf"\1{REDACTED}", text)


def _redact_header(match: re.Match[str]) -> str:
    """Within quotes, replace the quoted value only, so that JSON stays valid."""
    value = match["value"]
    if value[0] in "\"'":
        end = value.find(value[0], 1)
        return f"{match['before']}{value[0]}{REDACTED}{value[end:] if end > 0 else ''}"
    return match["before"] + REDACTED


def _redact_value(match: re.Match[str]) -> str:
    key, value = match[1], match[2]
    if value.lower() in _HARMLESS or value[0] in "[{":
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{key}{quote}{REDACTED}{quote}"


def _without_annotations(text: str) -> str:
    pieces: list[str] = []
    at = 0
    for match in _ANNOTATIONS.finditer(text):
        if match.start() < at:
            continue
        end = _end_of_value(text, match)
        if end is None:
            continue
        pieces += [text[at : match.end()].rstrip(), f' "{REDACTED}"']
        at = end
    return "".join((*pieces, text[at:]))


def _end_of_value(text: str, match: re.Match[str]) -> int | None:
    """The end of a mapping: of braces, or of the lines with more indentation. None if there is no value."""
    start = match.end()
    opening = re.compile(r"\s*\{").match(text, start)
    if opening:
        return _end_of_braces(text, opening.end() - 1)
    line = text.rfind("\n", 0, match.start()) + 1
    indent = match.start() - line
    deeper = re.compile(rf"(?:\r?\n {{{indent + 1}}}[^\n]*|\r?\n[ \t]*(?=\r?\n))+").match(
        text, text.find("\n", match.start())
    )
    return deeper.end() if deeper and not text[line : match.start()].strip() else None


def _end_of_braces(text: str, at: int) -> int:
    """The position after the brace that closes the one at `at`; the end of the text if it is truncated."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[{}]').finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(text)
