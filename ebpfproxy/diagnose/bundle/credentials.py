"""Removes from free text what looks like a credential. Pure.

It covers values behind names of credentials in `name=value`, YAML, JSON, flags, headers and URLs, and known
forms of keys and tokens anywhere.
"""

import re

REDACTED = "REDACTED"

_NAME = (
    r"(?>[\w.-]*?(?:token|passw|passphrase|secret|api[-_]?key|access[-_]?key|private[-_]?key|credential)[\w.-]*"
    r"|(?:[\w.-]*[_.-])?(?:auth|pass|pwd|signature)(?![\w.-])|client-key-data|client-certificate-data"
    r"|certificate-authority-data|idp-[\w-]+|[\w.-]*authorization|(?:set-)?cookie2?)"
)
"""Without backtracking (`(?>`), so that the time is linear in the length of a word."""
_CONTENT = r"(?:annotations|data|binaryData|stringData)"
"""Members of API objects with any content."""
_IS_NAME = re.compile(_NAME, re.IGNORECASE)

_LINE = re.compile(
    rf"^(?P<indent>[ \t]*(?:-[ \t]+)*)(?P<key>{_NAME}|(?P<other>[\"']{_NAME}[\"']|{_CONTENT}))[ \t]*:"
    r"(?=[ \t\r\n]|\Z)(?P<value>[^\r\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_NEXT_LINES = re.compile(r"[ \t]*(?:[&!]\S*[ \t]*)*(?:[|>][-+\d]*)?[ \t]*(?:#.*)?")
"""What follows the colon in YAML if the value is on the next lines."""
_HEADER = re.compile(
    r"(?<![\w-])((?:(?:proxy-)?authorization|(?:set-)?cookie)[ \t]*[:=][ \t]*)(?![\"'\\])[^\r\n]+",
    re.IGNORECASE,
)
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_TOKENS = re.compile(
    r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*"  # JWT
    r"|\b[a-z0-9]{6}\.[a-z0-9]{16}\b"  # bootstrap token of Kubernetes
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:gh[oprsu]|glpat|github_pat|xox[abeprs])[_-][\w-]{20,}"
)
_BEARER = re.compile(r"\b(bearer|basic|negotiate)\s+[\w.~+/-]{8,}=*", re.IGNORECASE)
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@", re.IGNORECASE)
_PARAMETER = re.compile(r"([?&#;])([\w.~%\[\]-]+)=([^\s&#;\"'<>\\]+)")
_PARAMETERS = """
    allowWatchBookmarks continue dryRun exclude fieldManager fieldSelector fieldValidation force labelSelector
    limit pretty resourceVersion resourceVersionMatch sendInitialEvents timeout timeoutSeconds verbose watch
"""
"""Query parameters of the Kubernetes API and of health checks that have no credentials."""
_HARMLESS_PARAMETERS = frozenset(_PARAMETERS.split())

_MEMBER = re.compile(
    rf"(?<![\w./-])(?P<quote>\\*[\"'])?(?:{_NAME}|{_CONTENT}(?=\\*[\"']?[ \t]*[:=]\s*{{))(?(quote)(?P=quote))"
    r"[ \t]*[:=][ \t]*",
    re.IGNORECASE,
)
_VARIABLE = re.compile(
    rf"\bname\\*[\"']?[ \t]*[:=][ \t]*\\*[\"']?{_NAME}\\*[\"']?,?\s+\\*[\"']?value\\*[\"']?[ \t]*[:=][ \t]*",
    re.IGNORECASE,
)
"""A variable in the `env` of a container."""
_BETWEEN = r"(?:[ \t]+|=|[\"'][ \t]*,\s*|[\"']?[ \t]*\r?\n[ \t]*-[ \t]+)"
"""Between a flag and its value: in a command line, or in a list of JSON or YAML."""
_FLAG = re.compile(
    rf"(?<![\w.-])--?{_NAME}{_BETWEEN}(?![\"']?(?-i:--?[a-z][a-z0-9-]*(?:[=\s\"']|\Z)))", re.IGNORECASE
)
"""A value may begin with a hyphen, as base64 for URLs does. Another flag is no value."""
_USER = re.compile(
    rf"(?<![\w-])(?:-[uU]{_BETWEEN}?|--(?:proxy-)?user{_BETWEEN})(?=[\"']?[^\s\"':,\]]+:[^\s\"',\]])"
)
_PASSWORD = re.compile(
    r"\b(?:sshpass|mysql\w*|mariadb\w*|redis-cli|ldap\w+|(?:docker|podman|helm)\b[^\n;|&]{0,100}?\blogin)\b"
    rf"[^\n;|&]{{0,200}}?[\s\"']-[apwW]{_BETWEEN}?(?=\S)"
)
_OPTION_HEADER = re.compile(
    rf"(?<![\w-])(?:-H|--header|--proxy-header){_BETWEEN}?[\"']?(?P<header>[\w-]+)[ \t]*:[ \t]*(?P<to_quote>)"
)
_COOKIE = re.compile(rf"(?<![\w-])-b{_BETWEEN}?(?=[\"']?[\w-]+=)")
_OPENSSL = re.compile(r"\bpass:")
_HEADERS = """
    accept accept-encoding accept-language cache-control connection content-length content-type date host
    if-none-match range user-agent
"""
_HARMLESS_HEADERS = frozenset(_HEADERS.split())
_BEHIND = (_MEMBER, _VARIABLE, _FLAG, _USER, _PASSWORD, _OPTION_HEADER, _COOKIE, _OPENSSL)
"""What is in front of a credential."""
_QUOTED = re.compile(
    r"(?P<quote>\\+[\"'])(?:(?!(?P=quote)).)*(?:(?P=quote))?|\"(?:[^\"\\]|\\.)*\"?|'[^']*'?", re.DOTALL
)
_WORD = re.compile(r"[^\s\"'\\]*")
_TO_QUOTE = re.compile(r"[^\r\n\"']*")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')
_TRACES = re.compile(
    r"-----begin|eyj|annotations|data\b|auth|bearer|basic|negotiate|://|[?&#;][\w.~%\[\]-]+=|cookie|token|pass"
    r"|pwd|secret|key|credential|signature|client-cert|idp-|-u|-b|-h|user|header|login|mysql|maria|redis|ldap"
    r"|akia|asia|gh[oprsu]_|glpat|github_pat|xox|\b[a-z0-9]{6}\.[a-z0-9]{16}",
    re.IGNORECASE,
)
"""One of these is in each text with a credential. The search takes a tenth of the time of replacements."""
_HARMLESS = frozenset(
    {"", "null", "none", "true", "false", '""', "''", "{}", "[]", REDACTED, f'"{REDACTED}"'}
)


def is_credential(name: str) -> bool:
    """Whether a member or variable of this name has a credential.

    >>> is_credential("access_token"), is_credential("mode")
    (True, False)
    """
    return bool(_IS_NAME.fullmatch(name))


def without_credentials(text: str) -> str:
    """Replace credentials: keys and certificates, tokens, passwords, Authorization headers, credentials in
    URLs and in command lines, and members of API objects that may have any content, such as annotations.

    >>> without_credentials("token: abc"), without_credentials("https://me:pw@api:6443/?access_token=abc")
    ('token: REDACTED', 'https://REDACTED@api:6443/?access_token=REDACTED')
    >>> without_credentials("Authorization: Bearer abc"), without_credentials("curl -u me:pw http://a")
    ('Authorization: REDACTED', 'curl -u REDACTED http://a')
    """
    if not _TRACES.search(text):
        return text
    text = _PEM.sub(REDACTED, text)
    text = _without_lines(text)
    text = _HEADER.sub(rf"\1{REDACTED}", text)
    text = _TOKENS.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _USER_INFO.sub(rf"\1{REDACTED}@", text)
    text = _PARAMETER.sub(_parameter, text)
    for pattern in _BEHIND:
        text = _without_values(pattern, text)
    return text


def _without_lines(text: str) -> str:
    """Replace members of YAML at the beginning of a line, with the lines of a value in several lines."""
    pieces: list[str] = []
    at = 0
    for match in _LINE.finditer(text):
        value = match["value"]
        goes_on = bool(_NEXT_LINES.fullmatch(value))
        if match.start() < at or (match["other"] and not goes_on):
            continue
        end = _end_of_lines(text, match.end(), len(match["indent"]), is_list=not value.strip())
        if end == match.end() and (goes_on or value.strip().rstrip(",").lower() in _HARMLESS):
            continue
        pieces += [text[at : match.start("value")], f' "{REDACTED}"' if goes_on else f" {REDACTED}"]
        at = end
    return "".join((*pieces, text[at:]))


def _end_of_lines(text: str, at: int, indent: int, is_list: bool) -> int:
    """The end of the lines from `at` on, the end of a line, that are indented by more than `indent`. With
    `is_list`, items with the same indentation count."""
    item = rf"|[ \t]{{{indent}}}-[ \t]" if is_list else ""
    lines = re.compile(rf"(?:(?:\r?\n[ \t]*(?=\r?\n))*\r?\n(?:[ \t]{{{indent + 1}}}{item})[^\r\n]*)*")
    found = lines.match(text, at)
    return found.end() if found else at


def _without_values(pattern: re.Pattern[str], text: str) -> str:
    """Replace the value behind each match. Quotes stay."""
    pieces: list[str] = []
    at = 0
    for match in pattern.finditer(text):
        groups = match.groupdict()
        if match.start() < at or (groups.get("header") or "").lower() in _HARMLESS_HEADERS:
            continue
        start, end = match.end(), _end_of_value(text, match.end(), "to_quote" in groups)
        value = text[start:end]
        if value.lower() in _HARMLESS or value.startswith(f"{REDACTED}&"):  # a parameter of a URL
            continue
        quote = re.match(r"\\*[\"']|", value)[0] if value[0] not in "[{" else '"'  # type: ignore[index]
        pieces += [text[at:start], f"{quote}{REDACTED}{quote}"]
        at = end
    return "".join((*pieces, text[at:]))


def _end_of_value(text: str, at: int, to_quote: bool) -> int:
    first = text[at : at + 1]
    if to_quote and first not in ("", '"', "'", "\\"):
        return at + len(_TO_QUOTE.match(text, at)[0])  # type: ignore[index]
    if first and first in "[{":
        return _end_of_brackets(text, at)
    if quoted := _QUOTED.match(text, at):
        return quoted.end()
    if first and first in "|>":
        return at + len(_TO_QUOTE.match(text, at)[0])  # type: ignore[index]
    return at + len(_WORD.match(text, at)[0].rstrip(",}])"))  # type: ignore[index]


def _end_of_brackets(text: str, at: int) -> int:
    """The position after the bracket that closes the one at `at`; the end of the text if it is truncated."""
    depth = 0
    for match in _BRACKETS.finditer(text, at):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(text)


def _parameter(match: re.Match[str]) -> str:
    return match[0] if match[2] in _HARMLESS_PARAMETERS else f"{match[1]}{match[2]}={REDACTED}"
