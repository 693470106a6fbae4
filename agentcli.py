#!/usr/bin/env python3
# agentcli 0.1.0 - one safe door to a repository's tools, for an AI agent and the person beside it.
#
# MIT License. Copyright (c) 2026 the agentcli authors.
#
# Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
# associated documentation files (the "Software"), to deal in the Software without restriction,
# including without limitation the rights to use, copy, modify, merge, publish, distribute,
# sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
#
# The above copyright notice and this permission notice shall be included in all copies or
# substantial portions of the Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
# NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
# NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
# DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
# OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""One safe door to a repository's tools, for an AI agent and the person beside it.

A manifest (manifest.json beside this file) names the commands; a call is

    python agentcli.py [global options] COMMAND PATH [options, positionals or the tool's tokens]

and ends with exactly one JSON envelope that says how it ended. The file is read in the order in
which a call's data flows: parse, admit (the journal), perform, report.
"""

import _signal  # type: ignore[import-not-found]  # built in, but typeshed has only `signal`
import sys


def _forget_visited_folders() -> None:
    """Take this file's folder and the current one off sys.path, the standard library's excepted.

    A json.py that lies in a visited repository must not run (CWE-427), nor an os.py.
    """
    stat = sys.modules["posix" if "posix" in sys.modules else "nt"].stat

    def identity(folder: str) -> object:
        try:
            info = stat(folder or ".")
            return info.st_dev, info.st_ino
        except (OSError, ValueError):
            return folder

    visited = {identity(__file__.rpartition("/")[0]), identity(".")}
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        visited.add(identity(sys.path[0]))  # what Python itself put there: a resolved symlink, say
    library = sys.modules["encodings"].__path__[0].rpartition("/")[0]
    visited -= {identity(library), identity(library + "/lib-dynload")}
    sys.path[:] = [folder for folder in sys.path if identity(folder) not in visited]


if __name__ == "__main__":
    if hasattr(_signal, "pthread_sigmask"):  # from here on a signal waits until somebody looks
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    _forget_visited_folders()
    import gc

    gc.disable()  # the process ends before a cycle of references could matter

import errno
import json
import os
import re
import stat
import time

TYPE_CHECKING = False  # importing `typing` costs more than a call may, so only a checker reads it
if TYPE_CHECKING:
    import signal  # noqa: I001  # a name a line would say no more
    from typing import (Any, Callable, Dict, Iterable, Iterator, List, NoReturn, Optional,
                        Sequence, Set, Tuple, TypeVar)

    Json = Dict[str, Any]
    Rule = Tuple[Callable[[Any], bool], str]  # what a value must pass, and how to say it
    Ending = Tuple[int, Optional[int], List[int]]  # wait status, cause, survivors
    Place = Tuple[str, str, Json]  # a journal file, a run's id in it, what its records add
    Handler = TypeVar("Handler", bound=Callable[[Json, "Context"], Any])
else:
    signal = _signal  # its numbers are plain ints, and no folder can stand in for it

__all__ = ["App", "Context", "ExitCode", "Failure", "RegistrationError", "load", "main",
           "read_input", "resolve_exit_code"]

# ---- Constants and exit codes --------------------------------------------------------------------

VERSION = "0.1.0"
GRACE = 5.0  # seconds between asking a process to end and KILL
KILL_PATIENCE = 2.0  # seconds that a process may resist KILL before it is reported instead
LOOK = 0.05  # seconds between two looks at what sends no signal: a killed group, a lock, a pipe
LONGEST_TIMEOUT = 10 ** 9  # seconds
TIMEOUTS = {"passthrough": 300, "http": 30, "declared": 60, "builtin": 60}  # seconds, by kind
ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
                       if hasattr(signal, name))
INPUT_LIMIT = 1 << 20  # bytes of a request's body
REPLY_LIMIT = 16 << 20  # bytes of a reply's body
TOKEN_LIMIT = 8192  # bytes of a token
EFFECTS = ("created", "updated", "deleted", "noop")  # of a mutating command (REQ-C-003)
KEY_SECONDS = 86400  # how long an idempotency key is remembered
JOURNAL_DAYS = 30  # after which a journal file that nothing used goes
LARGEST_RESULT = 65536  # bytes of a declared command's data that the journal keeps for a repeat
LARGEST_ENTRY = 16384  # bytes of an audit log entry
LONGEST_TRACE = 256  # characters of a trace id in it
PAGE_SIZE = 64 << 20  # bytes of the answer of a forked child, its mark included

if TYPE_CHECKING or __name__ != "__main__":
    from enum import IntEnum
else:  # nobody can ask the main program for it, and an enumeration costs 2 % of a call
    IntEnum = object


class ExitCode(IntEnum):
    """The exit codes of the CLI Agent Spec (REQ-F-001), 0 to 13, by name."""

    (SUCCESS, GENERAL_ERROR, ARG_ERROR, PARTIAL_FAILURE, PRECONDITION, NOT_FOUND, CONFLICT,
     PERMISSION_DENIED, AUTH_REQUIRED, PAYMENT_REQUIRED, TIMEOUT, RATE_LIMITED, UNAVAILABLE,
     REDIRECTED) = range(14)


def _by_word(table: "Dict[int, str]") -> "Dict[str, int]":
    """`{2: "a b"}` turned round: {"a": 2, "b": 2}."""
    return {word: number for number, words in table.items() for word in words.split()}


_EXIT_OF_FAILURE = _by_word({  # what agentcli's own failures exit with
    1: "INTERNAL_ERROR",
    2: "ARG_ERROR INVALID_MANIFEST INVALID_AUDIT_LOG_SETTING INVALID_CURSOR CONFIRMATION_REQUIRED "
       "CONFIGURATION_INVALID",
    3: "OUTCOME_UNKNOWN APPROVAL_REQUIRED",
    4: "TOOL_NOT_FOUND TOOL_NOT_EXECUTABLE STATE_UNAVAILABLE AUDIT_LOG_DISABLED NO_HANDLER "
       "UNSUPPORTED_PLATFORM CHECKS_FAILED",
    6: "IDEMPOTENCY_CONFLICT IN_PROGRESS",
    10: "TIMEOUT"})
# Of an OperationEnvelope's error. Every other code (`not_found`, `conflict` ...) ends as the HTTP
# status says.
_EXIT_OF_CODE = _by_word({
    1: "unauthenticated forbidden internal_error",
    2: "invalid_input configuration_invalid calendar_unsupported limit_exceeded cursor_expired "
       "proposal_expired",
    3: "approval_required clarification_required",
    4: "etag_conflict idempotency_conflict",
    5: "dependency_unavailable journal_unavailable judgment_unavailable judgment_invalid",
    6: "operation_unknown partial_apply needs_reconciliation context_pending"})
_EXIT_OF_STATUS = {200: 0, 201: 0, 202: 6, 400: 2, 413: 2, 422: 2, 409: 4, 412: 4, 503: 5}

# ---- Outcomes and failures -----------------------------------------------------------------------


class Outcome:
    """How a call ended: what `report` needs to know of it, and nothing else."""

    ran = False  # a tool has, and may have left half a line on the terminal
    text: "Optional[str]" = None  # what a person reads instead of `data`
    note = ""  # and what beside it, on stderr
    reply: "Optional[Json]" = None  # an OperationEnvelope, which then is the whole answer
    final = False  # the reply is the service's own, so nothing is added to it

    def __init__(self, exit_code: int, data: "Any" = None, error: "Optional[Json]" = None,
                 **more: "Any") -> None:
        self.exit_code, self.data, self.error = int(exit_code), data, error
        self.meta: Json = {}
        vars(self).update(more)


class Failure(Outcome, Exception):
    """An end other than success, with all that its envelope tells.

    exit_code: 1 to 255, an ExitCode where one fits. code: `^[A-Z][A-Z0-9_]+$`. message: what is
    wrong, where, and what to do. data: the envelope's data. fields: the ResponseEnvelope's
    optional error fields: phase, fix_required, fix_command, suggestion, retry_after_ms, context.
    Raises ValueError when one of them is not of that kind.
    """

    def __init__(self, exit_code: int, code: str, message: str, data: "Any" = None,
                 retryable: bool = False, **fields: "Any") -> None:
        Exception.__init__(self, message)
        error = {"code": code, "message": message, "retryable": retryable}
        error.update((key, value) for key, value in fields.items() if value is not None)
        faults = shape_faults(error, _ERROR_KEYS)
        if not isinstance(exit_code, int) or not 1 <= exit_code <= 255:
            faults.append(f"exit_code must be 1 to 255, not {exit_code!r}")
        if not isinstance(data, (dict, list, type(None))):
            faults.append("data must be a dict, a list or None")
        if faults:
            raise ValueError(f"this is no Failure: {'; '.join(faults)}")
        Outcome.__init__(self, exit_code, data, error)

    def __reduce__(self) -> "Any":  # a pool's worker hands it over
        return Exception.__new__, (type(self), *self.args), vars(self)


class RegistrationError(ValueError):
    """What `App.register` or App itself declares breaks the rules (REQ-C-002 and others).

    faults: a sentence for each breach; a faulty manifest file is told by `App.run` instead.
    """

    def __init__(self, faults: "Sequence[str]") -> None:
        super().__init__(faults)
        self.faults = list(faults)

    def __str__(self) -> str:
        return "; ".join(self.faults)


_LOOK_FIRST = "Look at what it has done before you run it again"


class Cancelled(Failure):
    """A signal asked agentcli to end; what names the child that it stopped, if one had begun."""

    def __init__(self, signo: int, what: str = "") -> None:
        context = {"signal": signo} if what else {"signal": signo, "started": False}
        super().__init__(
            128 + signo, "CANCELLED", f"agentcli was told to stop by {signal_name(signo)} (signal "
            f"{signo}) " + (f"and stopped the {what}" if what else "before anything was started"),
            {"partial": True}, phase="execution", context=context,
            suggestion=_LOOK_FIRST if what else None)


def failure(code: str, message: str, data: "Any" = None, **fields: "Any") -> Failure:
    """A failure of agentcli's own, whose code says what it exits with."""
    phase = "validation" if _EXIT_OF_FAILURE[code] in (2, 4, 6) else "execution"
    return Failure(_EXIT_OF_FAILURE[code], code, message, data, **dict({"phase": phase}, **fields))


def argument_error(message: str, **fields: "Any") -> Failure:
    return failure("ARG_ERROR", message, **fields)


def refuse(code: str, rules: "Iterable[Tuple[Any, str]]") -> None:
    """Raise Failure for the first (broken, message) whose broken is true."""
    for broken, message in rules:
        if broken:
            raise failure(code, message)


def internal_error(message: str = "A fault of agentcli's own; the traceback is on stderr",
                   ) -> Failure:
    """A failure for what must not happen; first prints the exception's traceback, if there is one.
    """
    error = sys.exc_info()[1]
    if error:
        try:
            import traceback

            text = traceback.format_exc()
        except (ImportError, OSError):  # no descriptor is left to load it
            text = f"{error!r}\n"
        write_all(2, text.encode("utf-8", "backslashreplace"))
    return failure("INTERNAL_ERROR", message)


def nearest(word: str, known: "Iterable[str]", cutoff: float = 0.6) -> "Optional[str]":
    """A sentence that offers the known names nearest to a mistyped one, or None."""
    import difflib

    known = list(known)
    near = [name for name in known if word and name.startswith(word)][:3] \
        or difflib.get_close_matches(word, known, cutoff=cutoff)
    return f"Did you mean {' or '.join(near)}?" if near else None


def reason_of(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def signal_name(signo: int) -> str:
    """`SIGTERM` for 15; `signal 40` for one without a name."""
    return next((name for name in dir(signal) if name[:3] == "SIG" and "_" not in name
                 and getattr(signal, name) == signo), f"signal {signo}")


# ---- Envelopes -----------------------------------------------------------------------------------


def new_id(prefix: str) -> str:
    """`prefix` and a UUIDv7 (RFC 9562, 5.7): 48 bits of milliseconds, 74 of randomness."""
    random = int.from_bytes(os.urandom(10), "big")
    value = (time.time_ns() // 1000000) << 80 | 7 << 76 | (random >> 68) << 64
    digits = f"{value | 2 << 62 | random & (1 << 62) - 1:032x}"
    return prefix + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def response_envelope(call: "Call", outcome: Outcome) -> "Json":
    """The ResponseEnvelope of the CLI Agent Spec (REQ-F-004) for one ended call."""
    meta: Json = {
        "exit_code": outcome.exit_code, "duration_ms": call.milliseconds(),
        "timeout_ms": call.timeout_ms, "request_id": call.request_id,
        "timestamp": timestamp(time.time()), "tool_version": call.app.version,
        "command": call.command.path if call.command else ""}
    for key, value in (("trace_id", os.environ.get("TOOL_TRACE_ID")),
                       ("audit_log_path", call.audit and call.audit.path)):
        meta.update({key: value} if value else {})
    meta.update(outcome.meta)
    return {"ok": outcome.exit_code == 0, "data": outcome.data, "error": outcome.error,
            "warnings": call.warnings, "meta": meta}


def operation_envelope(request_id: str, status: str, data: "Any" = None, code: str = "",
                       message: str = "", retryable: bool = False, **more: "Any") -> "Json":
    """An OperationEnvelope (schema version 1) of agentcli's own."""
    error = dict(code=code, message=message, retryable=retryable, **more) if code else None
    return {"schema_version": 1, "request_id": request_id, "status": status, "data": data,
            "warnings": [], "error": error}


def is_operation_envelope(value: "Json") -> bool:
    """Whether a JSON object is a whole and valid OperationEnvelope."""
    def texts(item: "Any", needed: str, optional: str = "") -> bool:
        return isinstance(item, dict) and all(
            isinstance(item.get(key), str) for key in needed.split()) and all(
            isinstance(item.get(key, ""), str) for key in optional.split())

    if not texts(value, "request_id status") or set(value) != set(operation_envelope("", "")):
        return False
    version, status, error = value["schema_version"], value["status"], value["error"]
    told = texts(error, "code message", "operation_id") and type(error.get("retryable")) is bool \
        and bool(re.fullmatch("[a-z][a-z0-9_]*", error["code"]))
    fits = {"ok": error is None, "error": told, "partial": told or error is None,
            "needs_clarification": told or error is None}
    return (version == 1 and version is not True and value["request_id"] != ""
            and fits.get(status, False) and isinstance(value["warnings"], list) and all(
                texts(item, "code message", "collection_id item_id") for item in value["warnings"]))


def is_near_envelope(value: "Json") -> bool:
    """Whether a JSON object that is no OperationEnvelope was meant to be one."""
    status = value.get("status")
    if len(set(value) & set(operation_envelope("", ""))) > 4 or status == "needs_clarification":
        return True
    if status not in ("ok", "partial", "error"):
        return False
    return "schema_version" in value or status != "ok" and isinstance(value.get("error"), dict)


def meant_code(value: "Json") -> str:
    """The error code that such an object means, "" if it is none of those that decide."""
    error = value.get("error")
    code = str(error.get("code")) if isinstance(error, dict) else ""
    code = {"partial": "partial_apply", "needs_clarification": "clarification_required"}.get(
        str(value.get("status")), code)
    return code if code in _EXIT_OF_CODE else ""


def resolve_exit_code(envelope: "Json", http_status: "Optional[int]") -> int:
    """The exit code of an OperationEnvelope: its meaning first, the HTTP status (RFC 9110) second.

    http_status: None where no reply came. Returns 0 to 6. Raises nothing and changes nothing.
    >>> resolve_exit_code({"status": "partial", "error": None}, 200)
    6
    """
    status, error = envelope.get("status"), envelope.get("error")
    if status in ("needs_clarification", "partial"):
        return 3 if status == "needs_clarification" else 6
    if status == "ok":
        return 6 if http_status == 202 else 0
    code = error.get("code") if isinstance(error, dict) else None
    by_status = _EXIT_OF_STATUS.get(http_status or 0, 1)
    return _EXIT_OF_CODE.get(code, by_status) if isinstance(code, str) else by_status


def json_line(document: "Any") -> bytes:
    """One line of JSON (RFC 8259) in ASCII; lone surrogates become U+FFFD."""
    text = json.dumps(document)
    if "\\ud" in text:  # a surrogate, perhaps without its other half
        wide = json.dumps(document, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
        text = json.dumps(json.loads(wide.decode("utf-16-le", "replace")))
    return text.encode("ascii") + b"\n"


def parse_json(data: bytes, huge: bool = False, twice: bool = False) -> "Any":
    """One JSON value (RFC 8259) from UTF-8 bytes, strictly. Raises ValueError, saying where.

    Refused beyond the grammar: a byte-order mark, NaN and Infinity, a key twice in one object, a
    number too large for a double (huge: but not an integer, up to 100,000 digits), and nesting too
    deep to be read.
    twice: a key that occurs again is kept, under a name that says so and breaks any table's rules.
    """
    text = data.decode("utf-8")
    digits = 0  # of long integers: to read and write one takes time that grows with its square

    def reject(token: str, what: str = "is not JSON") -> "NoReturn":
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)  # a string may hold the token too
        at = re.search(rf"(?<![^\s,:\[]){re.escape(token)}(?![^\s,\]}}])", bare)
        line = bare.count("\n", 0, at.start()) + 1 if at else 1
        raise ValueError(f"{token[:20]} {what}: line {line}")

    def number(token: str) -> float:
        if abs(float(token)) == float("inf"):
            reject(token, "is too large for a double")
        return float(token)

    def integer(token: str) -> int:
        nonlocal digits
        digits += len(token) if len(token) > 4300 else 0
        if digits > 100000:
            reject(token, "is too large")
        if not huge:
            number(token)
        return int(token)

    def unique(pairs: "List[Tuple[str, Any]]") -> "Json":
        found: Json = {}
        for name, value in pairs:
            if name in found and not twice:
                raise ValueError(f"the key {json.dumps(name)} occurs twice in one object")
            found[f'{name}" = "given twice' if name in found else name] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=reject,
                          parse_float=number, parse_int=integer)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


# ---- Waiting on a descriptor while signals are blocked -------------------------------------------


def heed_signals(deadline: "Optional[float]" = None) -> float:
    """Seconds until the next look, 0 when the deadline (monotonic; None: none) has passed.

    With its signals blocked, a process in a plain read or a lock is deaf; between short waits,
    and before it starts anything, it looks for them here. Raises Cancelled on one that ends it.
    """
    pending = set(signal.sigpending())
    for signo in set(ENDING_SIGNALS) & pending:
        if signal.getsignal(signo) != signal.SIG_IGN:
            raise Cancelled(int(signal.sigwait([signo])))
    if signal.SIGTSTP in pending:
        stop_here()
    return LOOK if deadline is None else max(0, min(LOOK, deadline - time.monotonic()))


def stop_here(signo: int = 0) -> None:
    """Stop of SIGTTIN or SIGTTOU, else as Ctrl-Z stops a program.

    Where nobody is there to resume it the kernel lets it run on, as it would not after SIGSTOP.
    """
    signo = signo if signo in (signal.SIGTTIN, signal.SIGTTOU) else signal.SIGTSTP
    os.kill(os.getpid(), signo)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signo})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signo})


def in_background(descriptor: int) -> bool:
    """Whether it is the controlling terminal, and another process group is in its foreground."""
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:
        return False


def load_select() -> "Any":
    """The module `select`, or None: on Windows, or when no descriptor is left to load it."""
    try:
        import select

        return select if hasattr(select, "poll") else None
    except (ImportError, OSError):
        return None


def wait_ready(descriptor: int, event: str, deadline: "Optional[float]") -> bool:
    """Whether a descriptor is ready to "read" or "write" before the deadline. Or Cancelled."""
    select, left = load_select(), 0.0
    if not select:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN if event == "read" else select.POLLOUT)
    while not poll.poll(left * 1000):
        left = heed_signals(deadline)
        if not left:
            return False
    return True


def write_all(descriptor: int, data: bytes, told: bool = False) -> "Optional[OSError]":
    """Write to a descriptor that is shared with others; return the error that ended it, if any.

    The reader may be slow (a full pipe) and a tool may have left O_NONBLOCK on the open file that
    both share. Once agentcli is told to end, before (told) or by a signal, the reader gets GRACE
    seconds more.
    """
    give_up = time.monotonic() + GRACE if told else None
    rest = memoryview(data)
    try:
        piece = len(data) if stat.S_ISREG(os.fstat(descriptor).st_mode) else \
            getattr(load_select(), "PIPE_BUF", 512)  # for which a pipe that is ready has room
        while rest:
            try:
                if not wait_ready(descriptor, "write", give_up):
                    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                rest = rest[os.write(descriptor, rest[:piece]):]
            except BlockingIOError:
                continue
            except Cancelled:
                give_up = give_up or time.monotonic() + GRACE
    except OSError as error:
        return error
    return None


def read_input(source: str, limit: int = INPUT_LIMIT, deadline: "Optional[float]" = None) -> bytes:
    """All bytes of stdin (source "-") or of a file, at most `limit` of them.

    deadline: on the monotonic clock; None is none. It reads no further than one byte past the
    limit. Raises Failure (exit 2, ARG_ERROR) when there is more, when the bytes do not come in
    time or cannot be read; Cancelled (exit 128 + N) when a signal ends agentcli meanwhile.
    """
    data, descriptor = bytearray(), 0
    try:
        if source != "-":
            descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)
        while len(data) <= limit:
            if not wait_ready(descriptor, "read", deadline):
                raise ValueError("the input did not end within the time limit")
            if in_background(descriptor):
                stop_here(signal.SIGTTIN)  # as whoever reads there; a read itself would be deaf
                if not in_background(descriptor):
                    continue
            try:
                piece = os.read(descriptor, min(65536, limit + 1 - len(data)))
            except BlockingIOError:
                continue
            if not piece:
                heed_signals()  # who ends agentcli often closes its input next
                return bytes(data)
            data += piece
        raise ValueError(f"it is larger than {limit} bytes")
    except (OSError, ValueError) as error:
        raise argument_error(
            f"--input {source}: {reason_of(error)}", suggestion="Pass - for stdin, or a file's path"
            if isinstance(error, OSError) else None) from None
    finally:
        if descriptor:
            os.close(descriptor)


# ---- Manifest and registration -------------------------------------------------------------------


def _is_string(value: "Any") -> bool:
    """Whether the system can take it as an argument or a name: no NUL, no lone surrogate."""
    return isinstance(value, str) and "\0" not in value \
        and value == value.encode("utf-8", "ignore").decode("utf-8")


def _is_strings(value: "Any") -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _is_pattern(value: "Any") -> bool:
    import warnings

    try:
        with warnings.catch_warnings():  # of what a later version may read differently
            warnings.simplefilter("ignore")
            return isinstance(value, str) and bool(re.compile(value))
    except (re.error, ValueError, OverflowError, RecursionError):
        return False


def _is_number(value: "Any", highest: float = LONGEST_TIMEOUT) -> bool:
    return type(value) in (int, float) and 0 <= value <= highest


def _one_of(*allowed: str) -> "Rule":
    return lambda value: value in allowed, "one of " + ", ".join(f'"{a}"' for a in allowed)


def _like(pattern: str, what: str) -> "Rule":
    return lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)), what


_TEXT: "Rule" = (lambda value: _is_string(value) and value.strip() != "",
                 "a non-empty string without NUL and lone surrogates")
_STRING: "Rule" = (lambda value: isinstance(value, str), "a string")
_STRINGS: "Rule" = (_is_strings, "a list of strings")
_OBJECT: "Rule" = (lambda value: isinstance(value, dict), "an object")
_LIST: "Rule" = (lambda value: isinstance(value, list), "a list")
_BOOL: "Rule" = (lambda value: isinstance(value, bool), "true or false")
_SECONDS: "Rule" = (_is_number, f"a number of seconds from 0 (no limit) to {LONGEST_TIMEOUT}")
_COUNT: "Rule" = (lambda value: type(value) is int and 0 < value <= 10 ** 15, "1 to 10 ** 15")
_FEW: "Rule" = (lambda value: type(value) is int and 0 < value <= 1000, "1 to 1000")
_PATH: "Rule" = (lambda value: _is_string(value) and value[:1] == "/", "an absolute path")
_NAME: "Rule" = (  # not a pattern: each call looks at one name, and a pattern must be compiled
    lambda value: isinstance(value, str) and all(
        word.isascii() and word.isalnum() and word.islower() | word.isdigit()
        for word in value.split("-")), "lower-case words in kebab-case")

_ERROR_KEYS: "Dict[str, Rule]" = {  # of a ResponseEnvelope
    "code": _like("[A-Z][A-Z0-9_]+", "upper-case words"), "retryable": _BOOL, "context": _OBJECT,
    "phase": _one_of("validation", "execution", "cleanup"),
    **{key: _like("(?s).+", "a non-empty string")
       for key in ("message", "fix_required", "fix_command", "suggestion")},
    "retry_after_ms": (lambda value: type(value) is int and value >= 0, "milliseconds")}
_AUDIT_KEYS = {"path": _PATH, "max_bytes": _COUNT, "max_files": _FEW, "max_age_days": _COUNT}
_ROOT_KEYS: "Dict[str, Rule]" = {
    "name": _NAME, "version": _TEXT, "description": _STRING, "timeout": _SECONDS,
    "base_url": _TEXT, "token_file": _TEXT, "commands": _OBJECT,
    "audit_log": (lambda value: isinstance(value, bool) or _PATH[0](value)
                  or isinstance(value, dict) and not shape_faults(value, _AUDIT_KEYS),
                  "true, false, an absolute path, or an object of " + ", ".join(_AUDIT_KEYS))}
_EXAMPLE_KEYS = {"description": _STRING, "command": _STRING}
_COMMAND_KEYS: "Dict[str, Tuple[str, Rule]]" = {  # the kinds that have the key, and its rule
    "description": ("phd", _TEXT), "timeout": ("phd", _SECONDS),
    "danger_level": ("phd", _one_of("safe", "mutating", "destructive")),
    "arguments": ("phd", _one_of("passthrough", "declared")),
    "option_placement": ("phd", _one_of("any", "strict")), "required_scopes": ("phd", _STRINGS),
    "examples": ("phd", (
        lambda value: isinstance(value, list) and not any(
            shape_faults(item, _EXAMPLE_KEYS, _EXAMPLE_KEYS) for item in value),
        'a list of {"description": "...", "command": "..."}')),
    "argv": ("p", (lambda value: _is_strings(value) and value[:1] not in ([], [""]),
                   "a list of strings, the program first")),
    "help_argv": ("p", _STRINGS), "stdin": ("p", _one_of("inherit", "none")),
    "env": ("p", (lambda value: isinstance(value, dict) and all(
        _is_strings([name, text]) and name and "=" not in name for name, text in value.items()),
        "an object of strings, no name empty or with a =")),
    "http": ("h", _OBJECT), "flags": ("hd", _OBJECT), "positionals": ("hd", _LIST),
    **dict.fromkeys(("stdout", "stderr", "confirm_flag"), ("", _STRING))}  # known, to be refused
_HTTP_KEYS: "Dict[str, Rule]" = {
    "method": _one_of("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"),
    "path": _like(r"(/([!$-.0-;=@-Z_a-z~]|\{[a-z][a-z0-9_-]*\})*)+",
                  "an absolute path of visible ASCII without ? and #"),
    "input": _one_of("required", "optional", "none")}
_ARGUMENT_KEYS: "Dict[str, Rule]" = {
    "required": _BOOL, "description": _STRING, "pattern": (_is_pattern, "a regular expression"),
    "enum_values": (lambda value: _is_strings(value) and value != [], "a list of strings")}
_VARIABLE_KEYS: "Dict[str, Rule]" = {
    "name": (lambda value: _TEXT[0](value) and "=" not in value, "a variable's name"),
    "description": _STRING}
_FLAG_KEYS: "Dict[str, Rule]" = dict(
    _ARGUMENT_KEYS, short=_like("[a-zA-Z0-9]", "one letter or digit"),
    type=_one_of("string", "integer", "number", "boolean", "array", "enum"),
    default=(lambda value: True, ""),
    env_vars=(lambda value: isinstance(value, list) and not any(
        shape_faults(item, _VARIABLE_KEYS, ("name",)) for item in value),
        'a list of {"name": ...}'))
_POSITIONAL_KEYS: "Dict[str, Rule]" = dict(
    _ARGUMENT_KEYS, type=_one_of("string", "integer", "number", "enum"),
    name=_like("[a-z][a-z0-9_-]*", "lower-case letters, digits, - and _"))
_VALUES = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
           "array": (list,), "enum": (str,)}


def shape_faults(value: "Any", rules: "Dict[str, Rule]",
                 required: "Iterable[str]" = ()) -> "List[str]":
    """What of an object breaks a table of rules, a sentence a breach."""
    if not isinstance(value, dict):
        return ["must be an object"]
    faults = [f'"{key}" is missing; it must be {rules[key][1]}' for key in required
              if key not in value]
    for key, item in value.items():
        if key not in rules:
            faults.append(f'unknown key "{key}". {nearest(str(key), rules) or ""}'.rstrip(". "))
        elif not rules[key][0](item):
            faults.append(f'"{key}" must be {rules[key][1]}')
    return faults


def sound(value: "Json", rules: "Dict[str, Rule]") -> "Json":
    """The part of an object that breaks no rule."""
    return {key: item for key, item in value.items() if key in rules and rules[key][0](item)}


def argument_faults(spec: "Any", rules: "Dict[str, Rule]", *required: str) -> "List[str]":
    """What of one flag's or positional's declaration breaks a rule."""
    faults = shape_faults(spec, rules, ("type", "required", "description", *required))
    if not faults and spec["type"] == "enum" and "enum_values" not in spec:
        faults.append('the type "enum" needs "enum_values"')
    if not faults and spec.get("default") is not None:
        default, kind = spec["default"], spec["type"]
        values = default if kind == "array" else [default] if kind != "boolean" else []
        if type(default) not in _VALUES[kind] or kind == "array" and not _is_strings(default):
            return [f'"default" must be of the type {kind}' + " of strings" * (kind == "array")]
        try:
            for value in values:
                convert(str(value), spec, '"default"')
        except (Failure, ValueError) as wrong:
            faults.append(str(wrong))
    return faults


def flag(kind: str, description: str, required: bool = False, **more: "Any") -> "Json":
    return dict(type=kind, required=required, description=description, **more)


class Command:
    """One registered command: its dotted path, its kind, its manifest entry and its function."""

    def __init__(self, path: str, entry: "Any", kind: str = "",
                 handler: "Optional[Callable[..., Any]]" = None) -> None:
        self.path, self.handler, self.words = path, handler, path.replace(".", " ")
        self.entry: Json = entry if isinstance(entry, dict) else {}
        self.kind = kind or ("passthrough" if self.entry.get("arguments") == "passthrough" else
                             "http" if "http" in self.entry else "declared")
        self.is_safe = self.entry.get("danger_level") == "safe"
        self.is_destructive = self.entry.get("danger_level") == "destructive"
        self.positionals: List[Json] = self.entry.get("positionals", [])

    def flags(self) -> "Dict[str, Json]":
        """The command's own flags: those that it declares and those that its kind brings."""
        return dict(self.entry.get("flags", {}), **self.brought())

    def brought(self) -> "Dict[str, Json]":
        flags, body = {}, self.entry.get("http", {}).get("input", "none")
        if body != "none":
            flags["input"] = flag("string", "The JSON body: - for stdin, or a file's path",
                                  body == "required")
        if self.kind == "http" and not self.is_safe:
            flags["operation-id"] = flag("string", "The same as --idempotency-key")
        if self.kind == "declared" and self.is_destructive:
            flags["dry-run"] = flag("boolean", "Show what it would do and do nothing")
        if self.is_destructive:
            flags["confirm-destructive"] = flag("boolean", "Do it, although it cannot be undone")
        return flags

    def faults(self, app: "App") -> "List[str]":
        """Every rule that the entry breaks."""
        faults, rules = [], {key: rule for key, (kinds, rule) in _COMMAND_KEYS.items()
                             if self.kind[0] in kinds}
        entry = {key: item for key, item in self.entry.items()
                 if (key, item) not in (("flags", {}), ("positionals", []))}
        if not all(_NAME[0](word) for word in self.path.split(".")):
            faults.append("the name must be lower-case words in kebab-case, joined by dots")
        if self.path.split(".")[0] in BUILTINS:
            faults.append("it is a built-in command's name")
        for key in [key for key in entry if key in _COMMAND_KEYS and key not in rules]:
            faults.append(f'a {self.kind} command may not declare "{key}"')
            del entry[key]
        if self.kind == "passthrough":
            if entry.get("option_placement") == "any":
                faults.append('"option_placement" is "strict" for every passthrough command')
            if self.is_destructive:
                faults.append('"danger_level" may not be "destructive": nothing previews a tool')
        faults += shape_faults(entry, rules, ("description", "danger_level")
                               + ("argv",) * (self.kind == "passthrough"))
        if self.kind == "http":
            faults += [f'"http": {fault}' for fault in shape_faults(
                entry["http"], _HTTP_KEYS, ("method", "path"))]
        if self.kind != "passthrough":
            whole = sound(entry, rules)
            whole["http"] = sound(whole.get("http", {}), _HTTP_KEYS)
            faults += Command(self.path, whole, self.kind)._argument_faults(app)
        return [f'command "{self.path}": {fault}' for fault in faults]

    def _argument_faults(self, app: "App") -> "List[str]":
        """Every rule that the flags, the positionals and the placeholders of a path break."""
        declared, brought = self.entry.get("flags", {}), self.brought()
        letters = {spec.get("short") for spec in app.flags.values()}
        places: Dict[str, bool] = {}  # whether a positional is required
        faults: List[str] = []
        for name, spec in declared.items():
            found = argument_faults(spec, _FLAG_KEYS)
            letter = None if found else spec.get("short")
            if not _NAME[0](name):
                found.append("the name must be lower-case words in kebab-case")
            if name in GLOBAL_FLAGS or name in brought:
                found.append("is a global option's name, or one that agentcli brings")
            if letter and letter in letters:
                found.append(f'the letter "{letter}" is taken')
            letters.add(letter)
            faults += [f'flag "{name}": {fault}' for fault in found]
        for spec in self.positionals:
            name = str(spec.get("name") if isinstance(spec, dict) else spec)
            found = argument_faults(spec, _POSITIONAL_KEYS, "name")
            if name in places or name in declared or name in brought:
                found.append("the name is taken")
            if not found and spec["required"] and not all(places.values()):
                found.append("follows an optional one; require none")
            if not found:
                places[name] = spec["required"]
            faults += [f'positional "{name}": {fault}' for fault in found]
        if "path" in self.entry["http"]:
            holes = set(re.findall(r"\{([^}]*)\}", self.entry["http"]["path"]))
            faults += [f'"http": {{{hole}}} in the path needs a required positional of that name'
                       for hole in sorted(holes) if not places.get(hole)]
            faults += [f'positional "{name}": the path does not use it'
                       for name in places if name not in holes]
        return faults


def path_faults(commands: "Dict[str, Command]") -> "List[str]":
    """Passthrough paths that are groups too: their second word would be the tool's."""
    tools = {path for path, command in commands.items() if command.kind == "passthrough"}
    above = [(".".join(other.split(".")[:n]), other) for other in commands
             for n in range(1, other.count(".") + 1)]
    return [f'command "{path}": a passthrough path may not be a group, but there is "{other}"'
            for path, other in above if path in tools]


def find_manifest(given: "Optional[str]") -> str:
    """The path of the manifest: given, or beside this file, even where there is none.

    Never the current directory: a repository that is only visited must not choose what runs.
    """
    if given is not None:
        return given
    folders = [os.path.dirname(path(__file__)) for path in (os.path.abspath, os.path.realpath)]
    beside = [os.path.join(folder, name) for name in ("manifest.json", "manifest.example.json")
              for folder in folders]
    return next(filter(os.path.lexists, beside), beside[0])


def load(path: str, app: "Optional[App]" = None) -> "App":
    """An App with what a manifest file declares; a program that imports agentcli may bind to it.

    Every fault of the file is told in one answer by the App's `run`: exit 2, INVALID_MANIFEST,
    whatever is called but help, version and doctor. Raises nothing.
    """
    script = app is not None
    app = app or App()
    app.source = path
    document: Any = {}
    faults: List[str] = []
    try:
        app.folder = os.path.realpath(os.path.dirname(path) or ".")  # one spelling for the journal
        with open(regular_file(path), "rb") as file:
            document = parse_json(file.read(), twice=True)
        faults += shape_faults(document, _ROOT_KEYS, ("commands",))
    except FileNotFoundError:
        faults.append("it is a link to what is not there" if os.path.islink(path) else
            'there is no manifest. Make one there, such as {"name": "ledger", "commands": {"lint": '
            '{"description": "Compile a file", "danger_level": "safe", "arguments": '
            '"passthrough", "argv": ["{python}", "-I", "-m", "py_compile"]}}}, or name one with '
            "--manifest PATH or AGENTCLI_MANIFEST")
    except OSError as error:
        faults.append(reason_of(error))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError among them
        faults.append(f"it is not JSON in UTF-8: {error}")
    root = sound(document if isinstance(document, dict) else {}, _ROOT_KEYS)
    declared = root.pop("commands", {})
    vars(app).update(root)  # what holds, so that --version is right all the same
    commands = {name: Command(name, entry) for name, entry in declared.items()}
    for name, command in commands.items():
        if "=" in name or not isinstance(declared[name], dict):
            faults.append(f'command "{name}": must be one object')
            continue
        faults += command.faults(app)
        if script and command.kind == "declared":
            faults.append(f'command "{name}": needs "arguments": "passthrough" with "argv", or '
                          '"http"; only a program that imports agentcli can bind a function to it')
    faults += path_faults(commands)
    if faults:
        app.broken = failure("INVALID_MANIFEST", f"{path}: {'; '.join(faults)}", context={
            "faults": faults}, fix_required="Correct the manifest; nothing was run")
    else:
        app.commands.update(commands)
    return app


# ---- Command line --------------------------------------------------------------------------------

GLOBAL_FLAGS = {
    "format": flag("enum", "How the outcome is told; json is the default off a terminal",
                   enum_values=["json", "text"]),
    "json": flag("boolean", "The same as --format json"),
    "output": flag("string", "Also write the envelope to this file, whole or not at all"),
    "timeout": flag("number", "Wall-clock limit in seconds; 0 is none",
                    pattern=r"^([0-9]+(\.[0-9]+)?|\.[0-9]+)$"),
    "idempotency-key": flag("string", "Names the call: within a day the same key runs once"),
    "session": flag("string", "The agent's session, in which a repeat is not run again"),
    "rerun": flag("boolean", "Run although this session already ran it"),
    "schema": flag("boolean", "Print the command's manifest entry and run nothing"),
    "manifest": flag("string", "The manifest to use; only before the command path"),
    "help": flag("boolean", "Show help and run nothing", short="h"),
    "version": flag("boolean", "Show the version and run nothing", short="V"),
}


class Call:
    """One invocation: what was asked, and what is known of it so far."""

    def __init__(self, app: "App", argv: "Sequence[str]") -> None:
        self.app, self.argv, self.began = app, list(argv), time.monotonic()
        self.request_id = new_id("cli_")
        self.command: Optional[Command] = None
        self.line = CommandLine()  # argv, sorted
        self.options: Json = {}  # global options by name
        self.args: Json = {}  # the command's own flags and positionals by name
        self.operation_id = ""  # of a mutating http command
        self.audit: Optional[AuditLog] = None
        self.output: Optional[str] = None  # the --output PATH, once nothing is wrong with it
        self.informs = False  # it shows help, the version or a schema, and performs nothing
        self.warnings: List[Json] = []
        self.timeout: float = 0  # seconds; 0 is none
        self.format = "json" if os.environ.get("CI") or not os.isatty(1) else "text"

    @property
    def deadline(self) -> "Optional[float]":
        """When the call's time is up, on the monotonic clock; None for never."""
        return self.began + self.timeout if self.timeout else None

    @property
    def kind(self) -> str:
        """The kind of the command that is called, "" as long as it is not known."""
        return self.command.kind if self.command else ""

    @property
    def timeout_ms(self) -> int:
        return max(1, round(self.timeout * 1000)) if self.timeout else 0

    def milliseconds(self) -> int:
        return int((time.monotonic() - self.began) * 1000)

    def warn(self, code: str, message: str) -> None:
        self.warnings.append({"code": code, "message": message})


class CommandLine:
    """The tokens of a command line, sorted."""

    def __init__(self) -> None:
        self.words: List[str] = []  # of the command's path, or of a group above it
        self.given: Dict[str, List[Any]] = {}  # the values of each option, in order
        self.late: List[str] = []  # the options behind the first word
        self.places: List[str] = []  # positionals, or what a passthrough command's tool gets
        self.fault: Optional[Failure] = None  # the first among the options


def read_command_line(argv: "Sequence[str]", commands: "Dict[str, Command]",
                      flags: "Json") -> CommandLine:
    """Sort tokens into a path, options and positionals; the longest path wins.

    `--json task --timeout 5 add x` has the words task and add, the place x, and both options. A
    passthrough command's path ends at its last word: what follows is the tool's. Behind a `--` that
    follows a word, and behind a word that continues no path, are places only.
    """
    prefixes = {".".join(path.split(".")[:n + 1]) for path in commands
                for n in range(path.count(".") + 1)}
    line, waiting, known = CommandLine(), list(argv)[::-1], flags
    command: Optional[Command] = None
    while waiting and not (command and command.kind == "passthrough"):
        token = waiting.pop()
        if token == "--":
            if line.words:
                break
        elif token[:2] == "--" or token[:1] == "-" and token != "-" and not (
                is_decimal(token) and token[1] not in [s.get("short") for s in known.values()]):
            while token:
                token = read_option(token, waiting, known, line)
        elif not line.places and set(line.given) <= set(flags) and "." not in token \
                and ".".join([*line.words, token]) in prefixes:
            line.words.append(token)
            command = commands.get(".".join(line.words))
            known = dict(flags, **command.flags()) if command else flags
        else:
            line.places.append(token)
            if not command:
                break
    line.places += waiting[::-1]
    return line


def read_option(token: str, waiting: "List[str]", flags: "Json", line: CommandLine) -> str:
    """Read one option, and the value that follows it, into the command line.

    `--name value`, `--name=value`, `-n value`, `-nvalue`, `-n=value`, and `-ab` for two that take
    no value: what is left of it, `-b`, is returned. A value in a token of its own begins with a
    dash only if it is a number or `-`. Names are never abbreviated.
    """
    name, equals, value = token[2:].partition("=")
    given, text, rest = "--" + name, value if equals else None, ""
    if token[:2] != "--":
        letters = {spec["short"]: name for name, spec in flags.items() if "short" in spec}
        given, name = token[:2], letters.get(token[1], "")
        text = token[3:] if token[2:3] == "=" else token[2:] or None
    boolean = flags.get(name, {}).get("type") == "boolean"
    if boolean and token[:2] != "--" and text is not None and token[2] != "-":
        text, rest = None, "-" + token[2:]
    if text is None and name in flags and not boolean and waiting:
        text = waiting.pop()
        if text[:1] == "-" and text != "-" and not is_decimal(text):
            text = None
    near = None
    if name not in flags:  # far names are not offered: --dry-run was not meant as --rerun
        wrong = f"There is no option {given} here"
        options = ["--" + known for known in flags]
        near = nearest(given, options, 0.76) or (
            f"There are {', '.join(options)}" if line.words else
            "What is a command's own goes behind its path")
    elif boolean and text is not None:
        wrong = f"{given} takes no value"
    elif not boolean and text is None:
        wrong = f"{given} needs a value"
    else:
        line.given.setdefault(name, []).append(True if boolean else text)
        line.late += [name] if line.words else []
        return rest
    line.fault = line.fault or argument_error(wrong, suggestion=near)
    return ""


def is_decimal(text: str) -> bool:
    """Whether it is a decimal number, such as -1, .5 or 1e-3."""
    return bool(re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text))


def convert(text: str, spec: "Json", where: str) -> "Any":
    """An argument's value by its declared type. Raises Failure (ARG_ERROR)."""
    kind, value, must = spec["type"], text, ""  # type: str, Any, str
    if kind in ("integer", "number") and re.fullmatch("[+-]?[0-9]{1,300}", text):
        value = int(text)
    elif kind == "integer":
        must = "a whole number"
    elif kind == "number":
        value = float(text) if is_decimal(text) else float("inf")
        must = "a finite decimal number" * (abs(value) == float("inf"))
    elif kind == "boolean":  # of a variable: an option takes no value
        value = {"true": True, "1": True, "false": False, "0": False}.get(text)
        must = "one of true, 1, false, 0" * (value is None)
    if text not in spec.get("enum_values", [text]):
        must = "one of " + ", ".join(spec["enum_values"])
    if not must and "pattern" in spec and not re.search(spec["pattern"], text):
        must = f"text that matches {spec['pattern']} ({spec['description']})"
    if must:
        raise argument_error(f"{where} must be {must}, not {text!r}",
                             suggestion=nearest(text, spec.get("enum_values", ())))
    return value


def convert_all(app: "App", given: "Dict[str, List[Any]]", flags: "Json", into: "Json") -> None:
    """Put in each option's value, of its type: given, else of a variable, else its default.

    An array keeps all; of any other type, two that differ are a fault. Raises Failure (ARG_ERROR),
    of what is given first; what was right until then is kept.
    """
    own = {"format": app.prefix + "FORMAT", "session": app.prefix + "SESSION_ID"}
    for name in sorted(flags, key=lambda name: name not in given):
        spec = flags[name]
        texts, where, many = given.get(name, []), "--" + name, spec["type"] == "array"
        variables = [own[name]] if name in own else [v["name"] for v in spec.get("env_vars", ())]
        variable = next(filter(os.environ.get, variables), None)
        if variable and not texts:
            where, texts = variable, [os.environ[variable]]
        typed = [text if text is True else convert(text, spec, where) for text in texts]
        if not many and any(value != typed[0] for value in typed):
            different = " and ".join(dict.fromkeys(texts))
            raise argument_error(f"{where} is given twice with different values: {different}")
        if typed:
            into[name] = typed if many else typed[0]
        elif spec.get("default") is not None:
            into[name] = spec["default"]
    into.update([(name, into.pop(name)) for name in flags if name in into])  # as declared


def parse(call: Call) -> "Callable[[Call], Outcome]":
    """Fill in what a command line asks for; return the step that answers it.

    Raises Failure (exit 2) for everything that is wrong with it; then nothing was started.
    """
    app, line = call.app, read_command_line(call.argv, call.app.commands, call.app.flags)
    command = call.command = app.commands.get(".".join(line.words))
    call.line = line
    if command:
        root = None if command.kind == "builtin" else app.timeout
        default = TIMEOUTS[command.kind] if root is None else root
        call.timeout = command.entry.get("timeout", default)
    given = dict(line.given)
    audit_fault: Optional[Failure] = None
    if given.pop("json", None):
        given["format"] = given.get("format", []) + ["json"]
    call.informs = bool({"help", "version", "schema"} & set(given))
    flags = command.flags() if command else {}
    if "operation-id" in given and command and "operation-id" in command.brought():
        given["idempotency-key"] = given.get("idempotency-key", []) + given.pop("operation-id")
    wanted = given.get("format", [app.setting("FORMAT")])
    call.format = "json" if "json" in wanted else "text" if "text" in wanted else call.format
    try:
        call.audit = audit_log_of(app)
    except Failure as wrong:
        audit_fault = wrong if command else None
    except OSError as error:
        call.warn("AUDIT_LOG_UNAVAILABLE", str(error))
    for step, name in (show_help, "help"), (show_version, "version"):
        if name in given:
            return step
    is_doctor = command is not None and command.path == "doctor"
    for fault in [line.fault] if is_doctor else [app.broken, line.fault, audit_fault]:
        if fault:
            raise fault
    if not command and (line.words or line.places):
        raise _unknown_command(call, line.places[:1])
    strict = call.kind == "passthrough" or command and \
        command.entry.get("option_placement") == "strict"
    for name in line.late:
        if name in app.flags and (strict or name == "manifest"):
            raise argument_error(f"--{name} goes before the command path")
    convert_all(app, given, app.flags, call.options)
    _check_options(call)
    if command and "schema" in call.options:
        return lambda call: Outcome(0, dict(manifest_entry(command), global_flags=app.flags))
    convert_all(app, given, flags, call.args)
    if command and call.kind != "passthrough":
        _check_arguments(call, command, line.places)
    return perform if command else show_help


def _unknown_command(call: Call, extra: "Sequence[str]") -> Failure:
    group = " ".join(call.line.words)
    below = [command.words for command in call.app.commands.values()
             if not group or command.words.startswith(group + " ")]
    if group and not extra:
        return argument_error(f"{group} is a group of commands; call one of: {', '.join(below)}")
    typed = " ".join(call.line.words + list(extra))
    groups = [" ".join(words.split()[:len(call.line.words) + 1]) for words in below]
    return argument_error(f"There is no command {typed}", context={"commands": below},
                          suggestion=nearest(typed.replace(".", " ").lower(),
                                             dict.fromkeys(below + groups))
                          or "Call one of: " + ", ".join(below))


def _check_options(call: Call) -> None:
    """Take the time limit from the global options, and check each of them."""
    app, options, command = call.app, call.options, call.command
    call.timeout = options.get("timeout", call.timeout)
    refuse("ARG_ERROR", (
        (not 1 <= len(options.get("session", "-")) <= 255,
         f"--session and {app.prefix}SESSION_ID take 1 to 255 characters"),
        ("idempotency-key" in options and not re.fullmatch(
            "[!-~]{1,255}", options["idempotency-key"]),
         "--idempotency-key and --operation-id take 1 to 255 visible ASCII characters"),
        ("idempotency-key" in options and (not command or command.is_safe),
         "--idempotency-key needs a mutating or destructive command"),
        (not 0 <= call.timeout <= LONGEST_TIMEOUT,
         f"--timeout takes 0 (no limit) to {LONGEST_TIMEOUT} seconds"),
        ("schema" in options and not command,
         "--schema needs a command; `manifest` prints them all")))
    if "output" in options:
        check_output(options["output"])
        call.output = options["output"]


def _check_arguments(call: Call, command: Command, texts: "Sequence[str]") -> None:
    """Give the positionals their values; see to it that no argument is missing."""
    specs, args = command.positionals, call.args
    if len(texts) > len(specs):
        raise argument_error(f"{command.words} takes {len(specs)} positional argument(s); "
                             f"{texts[len(specs)]!r} is one too many")
    for text, spec in zip(texts, specs):
        args[spec["name"]] = convert(text, spec, spec["name"])
    needed = [("--" + name, name, spec) for name, spec in command.flags().items()]
    for shown, name, spec in [(spec["name"], spec["name"], spec) for spec in specs] + needed:
        if spec["required"] and name not in args:
            raise argument_error(f"{command.words} needs {shown}: {spec['description']}")


# ---- JSON-lines store: whole lines appended, read from the end, torn ones skipped ----------------


def private_folder(path: str) -> None:
    """Make an absolute folder and those above it, 0700 whatever the umask. Raises OSError."""
    folder = "/"
    for name in path.split("/"):
        folder = os.path.join(folder, name)
        try:
            if not os.path.isdir(folder):
                os.mkdir(folder, 0o700)
                os.chmod(folder, 0o700)  # the umask may have kept the owner out
        except FileExistsError:
            if not os.path.isdir(folder):
                raise


def own_folder(path: str) -> str:
    """The path of a folder, unless it is another user's, who could forge what it holds. Or OSError.
    """
    owner = os.stat(path).st_uid if os.path.exists(path) else 0
    if owner and os.geteuid() not in (0, owner):
        raise PermissionError(errno.EPERM, "it belongs to another user", path)
    return path


def regular_file(path: str, private: bool = False) -> int:
    """Open a regular file to read; private: to append too, a new one is 0600. Raises OSError."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if private else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a directory, pipe or device, not a regular file", path)
    if private and mode & 0o600 != 0o600:  # the umask may have kept the owner out
        os.fchmod(descriptor, 0o600)
    return descriptor


def append_record(descriptor: int, record: "Json", durable: bool = False) -> None:
    """Append one record in one write, on a line of its own even after a torn one.

    durable: it is on disk (fdatasync) on return. Raises OSError; what a full disk let through is
    then a torn line, which readers skip.
    """
    line = json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"
    info = os.fstat(descriptor)
    if not info.st_nlink:
        raise FileNotFoundError(errno.ENOENT, "the file was removed meanwhile")
    if info.st_size and os.pread(descriptor, 1, info.st_size - 1) != b"\n":
        line = b"\n" + line
    if os.write(descriptor, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if durable:
        getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has no fdatasync


def records_backwards(descriptor: int, needle: bytes = b"{", end: "Optional[int]" = None,
                      ) -> "Iterator[Tuple[int, Json]]":
    """The records whose line holds the needle, the last first, each with its line's offset.

    What is no JSON object is skipped, and so is a line over 1 MiB. No more of the file is read
    than the caller asks for. end: the offset to begin at; None is the file's end.
    """
    size = os.fstat(descriptor).st_size
    at = size if end is None else min(size, end)
    more = 0  # bytes behind the piece that end a line which begins in it
    while at > 0:
        size = min(1 << 18, at)
        at -= size
        piece = os.pread(descriptor, size + more, at)
        first = piece.find(b"\n") + 1 if at else 0
        if at and first in (0, len(piece)):  # no line begins in here
            more = len(piece) if len(piece) < 1 << 20 else 0
            continue
        more, hit = first, piece.rfind(needle, first)
        while hit >= 0:
            start = max(piece.rfind(b"\n", first, hit) + 1, first)
            stop = piece.find(b"\n", hit)
            try:
                record = json.loads(piece[start:stop if stop >= 0 else len(piece)].decode("utf-8"))
                if isinstance(record, dict):
                    yield at + start, record
            except (ValueError, RecursionError):
                pass
            hit = piece.rfind(needle, first, start)


def take_lock(descriptor: int, offset: int, deadline: "Optional[float]",
              shared: bool = False) -> bool:
    """Lock one byte of a file for this process before the deadline (monotonic; None: no limit).

    shared: only to see that nobody holds it, beside others who look. The kernel frees the lock when
    the process ends, however it ends. Raises OSError, Cancelled.
    """
    import fcntl

    while True:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.lockf(descriptor, kind | fcntl.LOCK_NB, 1, offset)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        left = heed_signals(deadline)
        if not left:
            return False
        time.sleep(left)


def digest(*parts: object) -> str:
    """128 bits of SHA-256 over parts, in hexadecimal; no two lists of parts read the same."""
    import hashlib

    return hashlib.sha256(ascii(parts).encode("ascii")).hexdigest()[:32]


# ---- Journal: what ran, what must not run again, what nobody knows the end of --------------------


class Work:
    """What a call is about to do, checked and ready: its identity and the step that does it."""

    def __init__(self, identity: "Tuple[Any, ...]",
                 start: "Callable[[Optional[JournalEntry]], Outcome]",
                 journalled: bool = True, inputs: "Sequence[int]" = ()) -> None:
        self.identity = identity  # two calls with the same one are repeats of each other
        self.start, self.journalled = start, journalled
        self.inputs = inputs  # the descriptors that it may read


class JournalEntry:
    """One run in the journal, from its admission to its end.

    A run has a place for its idempotency key, found across sessions, and one in its session, found
    by what it does. While it lasts its process holds a lock for each, one byte of one file at an
    offset taken from the digest: a `started` record without a lock is a run that never reported
    its end.
    """

    def __init__(self, call: Call, identity: str) -> None:
        self.call, self.identity, self.began = call, identity, time.time()
        self.fields: Json = {"run": call.request_id,
                             "command": call.command and call.command.path}
        self.key = None if call.operation_id else call.options.get("idempotency-key")
        self.open_files: List[int] = []
        self.places: List[Place] = []
        session = call.options.get("session")
        of = {} if session is None else {"session": digest("session", os.fsencode(session))}
        if self.key is not None:
            self.places.append((self._day(0), digest("key", self.key), dict(of, who=identity)))
        if session is not None:
            self.places.append((of["session"] + ".jsonl", digest(of["session"], identity), {}))
        if not self.places:
            self.places.append((self._day(0), digest("operation", call.operation_id), {}))

    def _day(self, ago: float) -> str:
        return time.strftime("day-%Y-%m-%d.jsonl", time.gmtime(self.began - ago))

    def _open(self, name: str) -> int:
        path = os.path.join(self.folder, name)
        new = not os.path.exists(path)
        self.open_files.append(regular_file(path, private=True))
        if new:
            folder = os.open(self.folder, os.O_RDONLY)
            os.fsync(folder)  # the new file's name, too, is on disk before its first record
            os.close(folder)
            forget_old_journals(self.folder)
        return self.open_files[-1]

    def open(self) -> None:
        """Take the run's locks and open its files. Raises OSError, Failure (6, IN_PROGRESS)."""
        self.folder = self.call.app.journal_folder()
        private_folder(self.folder)
        locks = self._open("locks")
        if time.time() - os.fstat(locks).st_mtime > 86400:  # nobody looked for a day
            os.utime(locks)
            forget_old_journals(self.folder)
        for name, key, _ in self.places:
            self._open(name)
            at = int(key[:15], 16)
            if self.key is not None and "rerun" not in self.call.options \
                    and not take_lock(locks, at, 0):
                self.latest()  # the key may name another call, for which nobody need wait
            if not take_lock(locks, at, self.call.deadline):
                raise failure(
                    "IN_PROGRESS", "The same call is still running; it did not end within this "
                    f"call's limit of {self.call.timeout:g} s", retryable=True,
                    suggestion="Call again when that one has ended")
        self.fields["at"] = round(time.time(), 3)  # it may have waited for others

    def latest(self) -> "Optional[Json]":
        """The last record of an earlier run of the call, or None. Raises OSError, Failure (6)."""
        name, key, _ = self.places[0]
        record = next(whole_records(self.open_files[1], key), None)
        if self.key is not None:
            for day in self._day(KEY_SECONDS), self._day(-KEY_SECONDS):  # a clock may be set back
                path = os.path.join(self.folder, day)
                if record is None and os.path.exists(path):
                    with open(regular_file(path), "rb", buffering=0) as file:
                        record = next(whole_records(file.fileno(), key), None)
            if record and record["at"] < self.began - KEY_SECONDS:
                record = None
            if record and record.get("who") != self.identity:
                raise failure("IDEMPOTENCY_CONFLICT", f"The key named another call of "
                              f"{record['command']} at {timestamp(record['at'])}",
                              suggestion="Use a new key for it")
        os.utime(os.path.join(self.folder, name))  # a file that is only read is in use too
        return record

    def write(self, event: str, durable: bool = False, **fields: "Any") -> None:
        """Append a record to each of the run's places. Raises OSError."""
        for descriptor, (_, key, more) in zip(self.open_files[1:], self.places):
            record = dict({"id": key, "event": event}, **self.fields, **more, **fields)
            append_record(descriptor, record, durable)

    def note(self, event: str, **fields: "Any") -> None:
        """The same for what is known once the run began: a full disk is then only a warning."""
        try:
            self.write(event, **fields)
        except OSError as error:
            if event == "finished":
                self.call.warn("STATE_UNAVAILABLE", "The run's end could not be written to the "
                               f"journal ({error.strerror}): a repeat answers OUTCOME_UNKNOWN")

    def finish(self, outcome: Outcome) -> None:
        """Record how the run ended; of an http command's reply no more than the error's code."""
        fields: Json = {"end": round(time.time(), 3), "exit": outcome.exit_code}
        if outcome.reply is not None:
            fields["error"] = outcome.error and {"code": outcome.error["code"][:64]}
        elif max(len(json.dumps(part)) for part in (outcome.data, outcome.error)) > LARGEST_RESULT:
            error = outcome.error and dict(outcome.error, message=outcome.error["message"][:999])
            fields.update(omitted=True, error=error and {key: error[key] for key in (
                "code", "message", "retryable")})
        else:
            fields.update(error=outcome.error, data=outcome.data)
        self.note("finished", **{key: value for key, value in fields.items() if value is not None})


_TIME: "Rule" = (lambda value: _is_number(value, highest=1e11), "seconds")
_RECORD_KEYS: "Dict[str, Rule]" = {
    "id": _like("[0-9a-f]{32}", "a digest"), "run": _STRING, "command": _STRING, "at": _TIME,
    "event": _one_of("started", "running", "finished", "void"), "end": _TIME,
    "exit": (lambda value: type(value) is int and 0 <= value <= 255, "an exit code"),
    "data": (lambda value: isinstance(value, (dict, list, type(None))), "JSON"),
    "error": (lambda value: isinstance(value, dict) and isinstance(value.get("code"), str), "one"),
    **dict.fromkeys(("session", "who", "operation_id"), _STRING), "omitted": _BOOL,
    "pid": (lambda value: type(value) is int and value > 0, "a process")}


def whole_records(descriptor: int, key: str = "") -> "Iterator[Json]":
    """The journal's records, of one id or of all, the last first, without those of no run."""
    void = set()  # runs that never started
    for _, found in records_backwards(descriptor, b'"' + key.encode()):
        record = sound(found, _RECORD_KEYS)
        if not {"id", "run", "command", "at", "event"} <= set(record) \
                or key not in ("", record["id"]):  # a handler's data may hold the text, too
            continue
        if record["event"] == "void":
            void.add(record["run"])
        if record["run"] not in void and (record["event"] != "finished" or _tells_end(record)):
            yield record


def _tells_end(record: "Json") -> bool:
    """Whether a `finished` record holds all that `replay` needs (no request is replayed)."""
    if not {"exit", "end"} <= set(record):
        return False
    if "operation_id" in record:
        return True
    if record["exit"] == 0:
        return "error" not in record
    return not shape_faults(record.get("error"), _ERROR_KEYS, ("code", "message", "retryable"))


def forget_old_journals(folder: str) -> None:
    """Remove the journal's files that nothing has used for JOURNAL_DAYS."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            age = time.time() - os.stat(path).st_mtime
            if name.endswith(".jsonl") and age > JOURNAL_DAYS * 86400:
                os.unlink(path)
        except OSError:  # another call was faster
            continue


def replay(record: "Json") -> Outcome:
    """The outcome of a call that is not run again: how it ended first, or that nobody knows."""
    when = timestamp(record["at"])
    if record["event"] != "finished" or "omitted" in record:
        pid = record.get("pid")
        why = "its answer was too large to keep" if "omitted" in record else \
            "never reported its end" + (f"; its process, pid {pid}, may still run" if pid else "")
        raise failure(
            "OUTCOME_UNKNOWN", f"The same call began at {when} but {why}",
            suggestion="Find out what it has done. If it was done, go on; if not, call again with "
            "--rerun before the command path",
            context={"started_at": when, "pid": pid, "request_id": record["run"]})
    data, error = record.get("data"), record.get("error")
    if data is None or isinstance(data, dict):
        data = dict(data or {}, effect="noop")
    if error:
        told = f"It ended so at {timestamp(record['end'])} and was not run again; --rerun before " \
               "the command path runs it"
        error = dict(error, suggestion=". ".join(filter(None, (error.get("suggestion"), told))))
    return Outcome(record["exit"], data, error, meta={"idempotency_hit": True,
                                                      "first_run_at": when},
                   note="" if error else
                   f"not run again: it ran at {when} and ended well; --rerun runs it")


def surroundings(inputs: "Sequence[int]") -> "Tuple[Any, ...]":
    """What else tells one call from another: the working directory, and the files that it reads.

    A regular file on a descriptor is known by device, inode, size, time and read position.
    """
    files = [(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, os.lseek(
        descriptor, 0, os.SEEK_CUR)) if stat.S_ISREG(info.st_mode) else None
        for descriptor in inputs for info in [os.fstat(descriptor)]]
    try:
        return os.getcwdb(), files
    except OSError:  # it was deleted
        info = os.stat(".")
        return (info.st_dev, info.st_ino), files


def bytes_wait(descriptor: int) -> bool:
    """Whether a pipe or socket holds bytes, or gets some within 250 ms."""
    import fcntl
    import termios

    mode = os.fstat(descriptor).st_mode
    try:
        return (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) \
            and wait_ready(descriptor, "read", time.monotonic() + 0.25) \
            and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:  # a socket that only listens
        return False


def admit(call: Call, work: Work) -> Outcome:
    """Do a call's work unless the journal says that it was done; record its start and its end.

    Passthrough and declared commands are journalled in a session or with a key. An http command
    always is, without a session as well as can be: the service, not the journal, recognises its
    repeats, by the operation id that a repeat in a session takes over.
    """
    options, command = call.options, call.command
    assert command
    is_http = call.kind == "http"
    if not work.journalled or command.is_safe or not (
            is_http or {"idempotency-key", "session"} & set(options)):
        return work.start(None)
    if is_http:
        call.operation_id = options.get("idempotency-key") or new_id("op_")
    entry = JournalEntry(call, digest(*work.identity))
    try:
        try:
            entry.open()
            known = None if "rerun" in options else entry.latest()
            instead = recall(call, work, known) if known else None
            if instead:
                return instead
            if is_http:
                entry.fields["operation_id"] = call.operation_id
            entry.write("started", durable=True)
        except OSError as error:
            entry.note("void")
            return without_journal(call, work, error)
        try:
            outcome = work.start(entry)
        except Failure:  # nothing was started
            entry.note("void")
            raise
        entry.finish(outcome)
        return outcome
    finally:
        for descriptor in entry.open_files:
            os.close(descriptor)


def recall(call: Call, work: Work, record: "Json") -> "Optional[Outcome]":
    """What an earlier run of the call means for this one: its outcome again, or None to run."""
    when = timestamp(record["at"])
    if call.operation_id:
        if "operation_id" in record and "idempotency-key" not in call.options:
            call.operation_id = record["operation_id"]
            call.warn("OPERATION_ID_REUSED", f"The same call began at {when}; this one carries its "
                      "operation id, so that the service can recognise it; --rerun takes a new one")
        return None
    if record["event"] == "finished" and any(map(bytes_wait, work.inputs)):
        call.warn("STDIN_NOT_DEDUPLICATED",
                  f"The same call ran at {when}; it was run, for bytes wait on what it reads")
        return None
    return replay(record)


def mend_state(app: "App") -> str:
    return "Make the state folder and its files readable and writable, or set " \
        f"{app.prefix}STATE_DIR to the absolute path of a folder that is"


def without_journal(call: Call, work: Work, error: OSError) -> Outcome:
    """Run what cannot be journalled, with a warning, where that is asked for or harmless."""
    options = call.options
    why = reason_of(error) + f" ({error.filename})" * bool(error.filename)
    needed = "session" in options or call.kind != "http"
    if needed and "rerun" not in options:
        raise failure("STATE_UNAVAILABLE", f"The journal cannot be written: {why}; nothing was run",
                      fix_required=f"{mend_state(call.app)}; --rerun runs without it")
    call.warn("STATE_UNAVAILABLE", f"The call is not in the journal: {why}")
    return work.start(None)


def run_journal(call: Call) -> Outcome:
    """Built-in `journal`: what was started and how it ended, the oldest first.

    A run is unresolved when nobody knows its end, and no later run of the same call or operation
    told one.
    """
    # Not the session of the environment: who was killed comes back with a new one.
    session = call.line.given.get("session")
    wanted = digest("session", os.fsencode(session[0])) if session else None
    # The last record of each, which tells most, and its ids: one in each of its places.
    runs: Dict[str, Tuple[Json, Set[str]]] = {}
    told: Set[str] = set()  # the calls and operations whose end a later run has told
    try:
        folder = call.app.journal_folder()
        names = [name for name in os.listdir(folder) if name.endswith(".jsonl")]
    except FileNotFoundError:
        names = []
    for name in names:
        if wanted and name[:4] != "day-" and name != wanted + ".jsonl":
            continue
        try:
            with open(regular_file(os.path.join(folder, name)), "rb") as f:
                for record in whole_records(f.fileno()):
                    if wanted in (None, record.get("session"), name[:-6]):
                        _, ids = runs.setdefault(record["run"], (record, set()))
                        ids.add(record["id"])
        except OSError as error:
            call.warn("STATE_UNAVAILABLE", f"{name} of the journal is left out: {error}")
    try:
        locks = os.open(os.path.join(folder, "locks"), os.O_RDWR)
    except OSError:  # none was ever taken, or none can be on a read-only disk
        locks = -1
    entries: List[Json] = []
    seen: Set[str] = set()
    for record, ids in sorted(runs.values(), key=lambda run: -float(run[0]["at"])):
        code = (record.get("error") or {}).get("code")
        if record["event"] == "finished":
            state = "unknown" if code == "operation_unknown" else "finished"
        else:
            locked = locks >= 0 and any(not take_lock(locks, int(one[:15], 16), 0, shared=True)
                                        for one in ids - seen)
            state = "running" if locked else "unknown"
        seen |= ids  # an earlier run of the same call cannot hold its lock
        same = {record["operation_id"]} if "operation_id" in record else ids
        if state == "finished":
            told |= same
        if not call.args.get("unresolved") or not same & told:
            entry = {"command": record["command"], "state": state, "pid": record.get("pid"),
                     "started_at": timestamp(record["at"]), "exit_code": record.get("exit"),
                     "ended_at": timestamp(record["end"]) if record.get("end") else None,
                     "error_code": code, "request_id": record["run"],
                     "operation_id": record.get("operation_id")}
            entries.append({key: value for key, value in entry.items() if value is not None})
    if locks >= 0:
        os.close(locks)  # and with it every lock that this look has taken
    limit: int = call.args["limit"]
    more = len(entries) > limit
    return Outcome(0, {"entries": entries[:limit][::-1]}, meta={"pagination": {
        "total": len(entries), "returned": min(limit, len(entries)), "truncated": more,
        "has_more": more, "next_cursor": None}})


# ---- Audit log: one line an invocation (REQ-O-030) -----------------------------------------------


class AuditLog:
    """Where the audit log lies, and how large and how old it may become."""

    def __init__(self, path: str, max_bytes: int = 10 ** 7, max_files: int = 5,
                 max_age_days: int = 30) -> None:
        self.path, self.max_bytes, self.max_age_days = path, max_bytes, max_age_days
        # The newest is written, max_files old ones are kept.
        self.files = [path] + [f"{path}.{number + 1}" for number in range(max_files)]

    def append(self, entry: "Json") -> None:
        """Append an entry under the file's lock; rotate first if it is full or old.

        Raises OSError. A lock that somebody holds for a second is passed by: an append is whole
        without it too.
        """
        private_folder(os.path.dirname(self.path))
        while True:
            descriptor = regular_file(self.path, private=True)
            try:
                held = take_lock(descriptor, 0, time.monotonic() + 1)
                here, there = os.fstat(descriptor), os.stat(self.path)
                if here.st_ino != there.st_ino:
                    continue  # another process rotated it meanwhile
                if not (held and here.st_size and self._is_over(descriptor, here.st_size, entry)):
                    append_record(descriptor, entry)
                    return
                self._rotate()
            except FileNotFoundError:
                continue
            finally:
                os.close(descriptor)

    def _is_over(self, descriptor: int, size: int, entry: "Json") -> bool:
        oldest = timestamp(max(0, time.time() - self.max_age_days * 86400))
        first = re.match(rb'{"timestamp": ?"([^"]+)"', os.pread(descriptor, 60, 0))
        return size + len(json_line(entry)) >= self.max_bytes or \
            bool(first and first.group(1) < oldest.encode())

    def _rotate(self) -> None:
        for newer, older in reversed(list(zip(self.files, self.files[1:]))):
            try:
                os.rename(newer, older)
                if time.time() - os.stat(older).st_mtime > self.max_age_days * 86400:
                    os.unlink(older)
            except FileNotFoundError:
                continue

    def entries(self, after: str) -> "Iterator[Json]":
        """The entries of all files, the newest first; after: only those before this request's.

        It is looked for in every file, because a rotation may have moved it; when it has gone, so
        has all that was before it. Raises OSError.
        """
        import contextlib

        opened: Dict[int, int] = {}  # by inode: one may be rotated while the files are opened
        with contextlib.ExitStack() as closing:
            for path in self.files:
                with contextlib.suppress(FileNotFoundError):
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    closing.callback(os.close, descriptor)
                    opened.setdefault(os.fstat(descriptor).st_ino, descriptor)
            for descriptor in opened.values():
                end = next((at for at, record in records_backwards(descriptor, after.encode())
                            if record.get("request_id") == after), None) if after else None
                if after and end is None:
                    continue
                after = ""
                for _, record in records_backwards(descriptor, end=end):
                    if re.match("[0-9]{4}-.*Z$", str(record.get("timestamp"))) \
                            and isinstance(record.get("request_id"), str):
                        yield record


def audit_log_of(app: "App") -> "Optional[AuditLog]":
    """The audit log if it is on. Raises Failure (exit 2, INVALID_AUDIT_LOG_SETTING), OSError."""
    declared = app.audit_log
    variable = os.environ.get(app.prefix + "AUDIT_LOG")
    if variable not in (None, "0", "1") and not str(variable).startswith("/"):
        raise failure("INVALID_AUDIT_LOG_SETTING", f"{app.prefix}AUDIT_LOG must be 1, 0 or an "
                      f"absolute path, not {variable!r}")
    if variable == "0" or variable is None and not declared:
        return None
    settings: Json = dict(declared) if isinstance(declared, dict) else \
        {"path": declared} if isinstance(declared, str) else {}
    settings.update({"path": native(settings["path"])} if "path" in settings else {})
    if variable not in (None, "1"):
        settings["path"] = variable
    if "path" not in settings:
        settings["path"] = os.path.join(app.state_folder(), "audit.jsonl")
    return AuditLog(**settings)


def write_audit_entry(call: Call, outcome: Outcome) -> None:
    """Log an invocation that resolved to a command; what cannot be written becomes a warning."""
    if not call.audit or not call.command or call.kind == "builtin" or call.informs:
        return
    args = dict(call.args, **{"--" + name if name in call.args else name: value
                              for name, value in call.options.items()
                              if name not in ("session", "format", "manifest")})
    if call.kind == "passthrough":
        args["argv"] = "[OMITTED]"
    if "input" in args and "input" in call.command.brought():
        args["input"] = "[OMITTED]"
    if call.operation_id:
        args["--operation-id" if "operation_id" in args else "operation_id"] = call.operation_id
    trace = os.environ.get("TOOL_TRACE_ID", "")
    entry: Json = {
        "timestamp": timestamp(time.time()), "command": call.command.path, "args": args,
        "exit_code": outcome.exit_code, "duration_ms": call.milliseconds(),
        "request_id": call.request_id, "warnings": [w["code"][:64] for w in call.warnings[:64]],
        **({"trace_id": trace[:LONGEST_TRACE]} if trace else {}),
        **({"truncated": True} if trace[LONGEST_TRACE:] or call.warnings[64:] else {})}
    session = call.line.given.get("session", [call.app.setting("SESSION_ID")])[0]
    if session:
        entry["session_id"] = session[:255]
    for name in sorted(args, key=lambda n: len(json_line(args[n])), reverse=True):
        if len(json_line(entry)) <= LARGEST_ENTRY:
            break
        args[name], entry["truncated"] = "[TRUNCATED]", True
    if len(json_line(entry)) > LARGEST_ENTRY:  # the names alone
        entry["args"] = {"[TRUNCATED]": len(args)}
    try:
        call.audit.append(entry)
    except Exception as error:  # noqa: BLE001  # whatever it is, it changes no outcome
        call.warn("AUDIT_LOG_UNAVAILABLE", f"The audit log {call.audit.path} could not be "
                  f"written: {reason_of(error)}")


def since(text: str) -> float:
    """The time in seconds since the epoch that a span before now (15m) or ISO 8601 names.

    Raises Failure (ARG_ERROR). A time without an offset is UTC.
    """
    import datetime

    span = re.fullmatch("([0-9]{1,9})([smhd])", text)
    if span:
        unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}[span.group(2)]
        return max(0.0, time.time() - int(span.group(1)) * unit)
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d([Tt ]\d\d:\d\d(:\d\d([.,]\d+)?)?"
                            r"([Zz]|[+-]\d\d:?\d\d)?)?", text, re.ASCII):
            raise ValueError  # newer versions of Python take more forms, 3.8 takes fewer
        six = re.sub(r"[.,](\d{1,6})\d*", lambda m: "." + str(m[1]).ljust(6, "0"), text.upper())
        moment = datetime.datetime.fromisoformat(
            re.sub(r"([+-]\d\d):?(\d\d)$", r"\1:\2", six.replace("Z", "+0000")))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.timezone.utc)
        return min(max(0.0, moment.timestamp()), 253402300799.0)  # of the years 1970 to 9999
    except (ValueError, OverflowError):
        raise argument_error("--since takes a span such as 30s, 15m, 2h or 7d, or an ISO 8601 "
                             f"time, not {text!r}") from None


def run_audit_log(call: Call) -> Outcome:
    """Built-in `audit-log`: the newest entries that match, the oldest of them first."""
    log, args, limit = audit_log_of(call.app), call.args, call.args["limit"]
    if log is None:
        raise failure("AUDIT_LOG_DISABLED", "The audit log is off", fix_required='Set '
                      f'"audit_log": true in the manifest, or {call.app.prefix}AUDIT_LOG=1')
    wanted = {"command": args.get("command", "").replace(" ", "."),
              "trace_id": args.get("trace-id", "")[:LONGEST_TRACE]}
    oldest = since(args["since"]) if "since" in args else 0.0
    after, _, check = args.get("cursor", "").rpartition(".")
    if "cursor" in args and check != digest(after, args.get("since"), wanted):
        raise failure("INVALID_CURSOR", "--cursor is not one that audit-log gave for the same "
                      "--since, --command and --trace-id", suggestion="Begin again without it")
    found: List[Json] = []
    old = 0  # entries in a row that are too old: writers and clocks may be out of order
    for entry in log.entries(after):
        old = old + 1 if entry["timestamp"] < timestamp(oldest) else 0
        if old > 100 or len(found) > limit:
            break
        if not old and all(not value or entry.get(key) == value for key, value in wanted.items()):
            found.append(entry)
    more, found = len(found) > limit, found[:limit]
    last = found[-1]["request_id"] if more else ""
    return Outcome(0, {"entries": found[::-1]}, meta={"pagination": {
        "total": None, "returned": len(found), "truncated": more, "has_more": more,
        "next_cursor": f"{last}.{digest(last, args.get('since'), wanted)}" if more else None}})


# ---- Running a child: processes, signals, one wait loop ------------------------------------------


class ProcessTree:
    """A child and all that comes from it, as far as the system can tell.

    Linux shows descent, environment and memory in /proc, so that what left the process group or
    was orphaned is found by its marker, or as a fork of a handler by the page that it shares;
    elsewhere the process group has to do.
    """

    def __init__(self, pid: int, grouped: bool, marker: str = "", page: str = "") -> None:
        self.pid, self.grouped = pid, grouped  # grouped: the child leads a process group of its own
        self.marker = b"\0" + os.fsencode(marker) if marker else b""  # NAME=VALUE
        self.page = page.encode()
        self.known: Dict[int, bytes] = {}  # pid: start time, of all that was ever found

    def members(self) -> "Dict[int, int]":
        """The processes of the tree that are alive (zombies are not), and the group of each."""
        try:
            own = os.readlink("/proc/self") == str(os.getpid())  # else another PID namespace's
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if own else []
        except OSError:  # there is none, or no descriptor is left
            pids = []
        if not pids:
            alone = self.grouped and _send(os.killpg, self.pid, 0)
            return {self.pid: self.pid} if alone else {}
        seen: Dict[int, Tuple[int, int, bytes]] = {}  # pid: parent, group, start time
        found: Set[int] = set()
        for pid in pids:
            try:
                fields = _read_proc(pid, "stat").rpartition(b")")[2].split()
                # One whose first thread has ended is shown as a zombie, too.
                if fields[0] in (b"Z", b"X") and int(fields[17]) < 2 or pid == os.getpid():
                    continue
                parent, group, start = int(fields[1]), int(fields[2]), fields[19]
                seen[pid] = parent, group, start
                if (pid == self.pid or self.known.get(pid) == start
                        or self.grouped and group == self.pid or self._is_marked(pid)
                        or self.page and self.page in _read_proc(pid, "maps")):
                    found.add(pid)
            except IndexError:  # it has ended meanwhile
                continue
        more = found
        while more:
            more = {pid for pid, (parent, _, _) in seen.items() if parent in more} - found
            found |= more
        self.known.update((pid, seen[pid][2]) for pid in found)
        return {pid: seen[pid][1] for pid in found}

    def _is_marked(self, pid: int, behind: bytes = b"\0/") -> bool:
        """Whether its environment holds the marker; behind it is / for a run within the run."""
        if not self.marker:
            return False
        environment = b"\0" + _read_proc(pid, "environ") + b"\0"
        _, found, rest = environment.partition(self.marker)
        return bool(found) and rest[:1] in behind

    def signal(self, signo: int) -> None:
        """Send a signal to the whole tree once: to the group, then to what left it.

        A run within the run is told by its own agentcli, unless all are to be killed.
        """
        members = self.members() or {self.pid: self.pid}
        if self.grouped:
            _send(os.killpg, self.pid, signo)
        for pid, group in members.items():
            inner = signo not in (signal.SIGKILL, signal.SIGCONT) and self._is_marked(pid, b"/")
            if not (self.grouped and group == self.pid or inner):
                _send(os.kill, pid, signo)


def _read_proc(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:  # it has ended, or is another user's
        return b""


def _send(kill: "Callable[[int, int], None]", pid: int, signo: int) -> bool:
    try:
        kill(pid, signo)
        return True
    except OSError:  # gone already, or another user's: who survives is reported
        return False


def leads_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except OSError:  # it has ended
        return False


def next_signal(awaited: "Set[int]", seconds: float) -> "Tuple[int, bool]":
    """The next blocked signal and whether a process sent it; (0, False) after seconds or a day."""
    seconds = min(max(seconds, 1e-6), 86400)
    if hasattr(signal, "sigtimedwait"):
        info = signal.sigtimedwait(awaited, seconds)
        return (info.si_signo, info.si_code <= 0) if info else (0, False)
    until, nap = time.monotonic() + seconds, 0.0005
    while not awaited & set(signal.sigpending()):  # an alarm would be the caller's, and one only
        left = until - time.monotonic()
        if left <= 0:
            return 0, False
        time.sleep(min(left, nap))
        nap = min(2 * nap, LOOK / 2)
    signo = int(signal.sigwait(awaited & set(signal.sigpending())))
    # Who sent it cannot be told here, so what a terminal's keys send counts as the terminal's.
    return signo, signo not in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)


def supervise(tree: ProcessTree, deadline: "Optional[float]", at_terminal: bool = False,
              child_decides: bool = True, own: bool = False) -> "Ending":
    """Wait for a child under one rule: the first of its end, its deadline and a signal decides.

    All signals are blocked, and this loop is the one place that takes them. A signal that ends
    agentcli goes to the tree, and so does TERM at the deadline; after the grace, or at once on a
    second such signal, KILL goes to all that is left. In a terminal's foreground the kernel has
    sent the terminal's signals to the child too: it is not told twice, and if it decides what
    they mean, agentcli only waits. Returns the wait status (None: not even KILL ended it), the
    cause (None: it ended by itself; 0: its time was up; else the signal) and who survived.
    """
    def reap(job_control: bool) -> "Optional[int]":
        """The wait status of a child that has ended, or None; stops with it if it has stopped."""
        try:
            ended, status = os.waitpid(tree.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:  # another part of this program took it
            if child_decides and not own:
                raise
            return 0  # a forked child's answer tells all
        if ended and os.WIFSTOPPED(status):
            if job_control:
                stop_here(os.WSTOPSIG(status))  # so that the shell sees the job stop
            return None
        return status if ended else None

    timers = {signo for signo in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
              if callable(signal.getsignal(signo))}  # of the program that imported agentcli
    awaited = {int(signo) for signo in signal.valid_signals()  # Linux queues even ignored ones
               if signo not in (signal.SIGKILL, signal.SIGSTOP, *timers)
               and signal.getsignal(signo) != signal.SIG_IGN}
    status: Optional[int] = None
    cause: Optional[int] = None
    killing, until = False, deadline
    # In an embedding program another thread may be the one that a signal reaches.
    threads = "threading" in sys.modules and sys.modules["threading"].active_count() > 1
    while True:
        if status is None:
            status = reap(at_terminal and cause is None)
        # Looked for twice: what forks and ends during one look is not seen in it.
        if status is not None and (cause is None or not (tree.members() or tree.members())):
            return status, cause, []
        left = float("inf") if until is None else until - time.monotonic()
        if killing or status is not None or threads:  # nobody reports a stranger's child's end
            left = min(LOOK, left)
        signo, sent = next_signal(awaited, left)
        # The kernel told the child as well, unless that has left for a group of its own; of a
        # hang-up it tells a session's leader alone.
        theirs = at_terminal and not sent and not (
            signo == signal.SIGHUP and os.getsid(0) == os.getpid())
        leads = tree.grouped or leads_group(tree.pid)
        told = signo in ENDING_SIGNALS and not (theirs and child_decides)
        over = until is not None and time.monotonic() >= until
        if not told and not over:
            if killing:
                tree.signal(signal.SIGKILL)  # look again until nothing is left
            elif own and signo == signal.SIGTSTP:
                stop_here()  # agentcli's own child is told nothing
            elif signo == signal.SIGXCPU and not sent:
                continue  # it is about agentcli's own time on the processor
            elif not own and signo not in (0, signal.SIGCHLD) and (leads or not theirs):
                to_group = tree.grouped or leads and (theirs or signo == signal.SIGCONT)
                _send(os.killpg if to_group else os.kill, tree.pid, signo)
        elif killing:
            if over:
                return status or 0, cause, sorted(tree.members())
        elif cause is None:
            status = reap(False)
            if status is not None and not (told and theirs):
                continue  # what had ended, and not of this signal, keeps its own result
            cause, killing = (signo if told else 0), own
            until = time.monotonic() + (KILL_PATIENCE if own else GRACE)
            if own:
                _send(os.kill, tree.pid, signal.SIGKILL)
            elif leads or not theirs or not told:
                tree.signal(cause or signal.SIGTERM)
                if cause in signal.sigpending():  # timeout(1) tells its child, and at once its
                    signal.sigwait({cause})  # group: that is one request, not a second one
            tree.signal(signal.SIGCONT)  # a stopped process cannot end
        else:
            killing, until = True, time.monotonic() + KILL_PATIENCE
            tree.signal(signal.SIGKILL)


def run_child(call: Call, journal: "Optional[JournalEntry]", start: "Callable[[bool], int]",
              page: str = "") -> "Ending":
    """Start a child, note its pid in the journal, and wait for it.

    start takes "own group?" and returns a pid; page: the name of what a handler's forks share.
    """
    heed_signals()
    at_terminal = has_terminal()
    pid = start(not at_terminal)
    if journal:
        journal.note("running", pid=pid)
    load_select()  # report() needs it, and the child is busy meanwhile
    return supervise(ProcessTree(pid, not at_terminal, marker_of(call), page), call.deadline,
                     at_terminal=at_terminal, child_decides=not page)


def marker_of(call: Call) -> str:
    """NAME=VALUE by which the processes of a run are known; nested runs append to the value."""
    name = call.app.prefix + "RUN_ID"
    outer = os.environ.get(name)
    return f"{name}={outer + '/' if outer else ''}{call.request_id}"


def has_terminal() -> bool:
    """Whether this process has a controlling terminal (POSIX.1-2017, 11.1.3)."""
    for descriptor in (0, 1, 2):
        try:
            os.tcgetpgrp(descriptor)
            return True
        except OSError:
            continue
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return True
    except OSError:
        return False


class SharedPage:
    """Memory that a forked child shares with agentcli: one mark and one answer.

    Unlike a pipe it needs no reader while the child runs, and unlike a file it leaves nothing on
    disk. Pages that are not touched cost nothing. Its name is seen in whatever is forked of it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.writer = name, 0  # the child's pid
        try:
            import mmap

            try:
                with open(os.memfd_create(name), "r+b") as file:
                    os.ftruncate(file.fileno(), PAGE_SIZE)
                    self.memory = mmap.mmap(file.fileno(), PAGE_SIZE)
            except (AttributeError, OSError):  # not Linux, or the size of files is limited
                self.memory = mmap.mmap(-1, PAGE_SIZE)
        except (ImportError, OSError) as error:
            raise no_child(error) from None

    @property
    def marked(self) -> bool:
        """Whether the child has passed the point from which its work may have had an effect."""
        return self.memory[0] == 1

    def mark(self) -> None:
        self.memory[0] = 1

    def put(self, answer: "Json") -> None:
        """Leave the answer. Raises ValueError or TypeError when it is no JSON or too large."""
        if os.getpid() != self.writer:  # the child's function forked, and this is the copy's end
            return
        text = json.dumps(answer, allow_nan=False).encode("ascii") + b"\0"
        if len(text) >= PAGE_SIZE:
            raise ValueError(f"an answer of {len(text)} bytes is larger than {PAGE_SIZE}")
        self.memory[1:1 + len(text)] = text  # behind the mark

    def answer(self) -> "Json":
        """What the child left; empty if it left nothing."""
        try:
            found: Json = json.loads(self.memory[1:self.memory.find(b"\0", 1)] or b"{}")
            return found
        except (ValueError, RecursionError):  # what only the child's own limits let pass
            return {}


def no_child(error: Exception) -> Failure:
    return failure("INTERNAL_ERROR", f"No process could be started: {reason_of(error)}")


def flush_streams() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError, RuntimeError):  # odd, not read, closed
            continue


def fork_child(call: Call, page: SharedPage, own_group: bool, work: "Callable[[], None]") -> int:
    """Run a function in a child, which leaves its answer on the page; return the child's pid.

    What the function and its children print on stdout goes to stderr. Its process ends however
    the function does: an exception's traceback is on stderr, and the page stays empty.
    """
    try:
        pid = os.fork()
    except OSError as error:
        raise no_child(error) from None
    if pid:
        if own_group:
            _send(os.setpgid, pid, pid)
        return pid
    try:
        if own_group:
            _send(os.setpgid, 0, 0)
        for signo in (signal.SIGCHLD, signal.SIGWINCH, *ENDING_SIGNALS):
            if callable(signal.getsignal(signo)):  # no handler of the embedding program's
                signal.signal(signo, signal.default_int_handler if signo == signal.SIGINT
                              else signal.SIG_DFL)
        name, _, value = marker_of(call).partition("=")
        os.environ[name] = value
        signal.set_wakeup_fd(-1)
        os.dup2(2, 1)
        try:
            printed = sys.stdout.fileno()
        except (AttributeError, OSError, ValueError):  # None, closed, or no file
            printed = -1
        if printed != 1:  # a test's capture, say
            sys.stdout = sys.stderr
        page.writer = os.getpid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        work()
        flush_streams()
        os._exit(0)
    except BaseException:  # noqa: BLE001  # nothing of the child may run on
        internal_error()
    finally:
        os._exit(1)


# ---- Passthrough run -----------------------------------------------------------------------------

def find_program(app: "App", command: Command) -> str:
    """A command's program: from the manifest's folder if it has a slash, else found on PATH.

    Entries of PATH that are empty or relative are passed over: they would let the current
    directory choose. Raises Failure (exit 4, TOOL_NOT_FOUND or TOOL_NOT_EXECUTABLE).
    """
    name = expand_argv(app, command.entry["argv"])[0]
    own = command.entry.get("env", {}).get("PATH")
    search_path = os.environ.get("PATH") if own is None else native(own)
    folders = [app.folder] if "/" in name else [
        entry for entry in (search_path or os.defpath).split(os.pathsep) if entry[:1] == "/"]
    present = [path for path in (os.path.join(folder, name) for folder in folders)
               if os.path.isfile(path) or "/" in name and os.path.exists(path)]
    for path in present:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    if present:
        raise not_executable(present[0], "is a folder" if os.path.isdir(present[0]) else
                             "has no execute permission")
    raise failure("TOOL_NOT_FOUND", f"The tool {name} was not found "
                  + (f"at {os.path.join(app.folder, name)}" if "/" in name else "on PATH"),
                  fix_required="Install it, or correct the command's argv in the manifest")


def not_executable(program: str, what: str) -> Failure:
    return failure("TOOL_NOT_EXECUTABLE", f"The tool {program} cannot be run: it {what}",
                   fix_required="Mend the tool, or the command's argv in the manifest")


def native(text: str) -> str:
    """A manifest's text, which is UTF-8 whatever the locale, as the system's calls take it."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def expand_argv(app: "App", argv: "Sequence[str]") -> "List[str]":
    """A manifest's argv with {python} and {manifest_dir} filled in, in one pass."""
    values = {"{python}": sys.executable or os.path.realpath("/proc/self/exe"),
              "{manifest_dir}": app.folder}
    return [re.sub(r"\{python\}|\{manifest_dir\}", lambda m: values[str(m[0])], element)
            if "{" in element else element for element in map(native, argv)]


def named_descriptors(tokens: "Sequence[str]") -> "List[int]":
    """The descriptors above 2 that tokens name and that can be read, such as a shell's <(...)."""
    found: List[int] = []
    if any("/fd/" in token for token in tokens):
        import fcntl

        for number in re.findall("/(?:dev|proc/self)/fd/([0-9]{1,9})", "\n".join(tokens)):
            try:
                mode = fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_ACCMODE
                found += [int(number)] if int(number) > 2 and mode != os.O_WRONLY else []
            except OSError:  # it is not open
                continue
    return found


def prepare_tool(call: Call, command: Command) -> Work:
    """Find all that a passthrough command needs before anything is started (REQ-C-031).

    The tool inherits descriptors 0 to 2 as they are. Its signal mask is empty; PIPE and XFSZ, which
    Python ignores, and CHLD are default in it. Raises Failure (exit 4).
    """
    app = call.app
    entry, tokens = command.entry, call.line.places
    fixed = expand_argv(app, entry["argv"])
    helps = tokens in (["--help"], ["-h"]) and "help_argv" in entry
    argv = [os.fsencode(element) for element in fixed + (
        [native(element) for element in entry["help_argv"]] if helps else tokens)]
    environment = {name: text for name, text in os.environb.items() if name}  # "" cannot be passed
    environment.update((name.encode("utf-8"), text.encode("utf-8"))
                       for name, text in entry.get("env", {}).items())
    variable, _, value = os.fsencode(marker_of(call)).partition(b"=")
    environment[variable] = value
    program, no_stdin = find_program(app, command), entry.get("stdin") == "none"
    inputs = ([] if no_stdin else [0]) + named_descriptors(tokens)
    if "/" in fixed[0]:  # some programs look beside themselves: a virtual environment's python
        argv[0] = os.fsencode(program)

    def spawn(own_group: bool) -> int:
        more: Json = {"setpgroup": 0} if own_group else {}
        if no_stdin:
            more["file_actions"] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        try:
            return os.posix_spawn(program, argv, environment, setsigmask=(), setsigdef=(
                signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD), **more)
        except OSError as error:
            raise not_executable(
                program, "names an interpreter in its #! line that is not there"
                if error.errno == errno.ENOENT else f"does not start: {error.strerror}") from None

    def start(journal: "Optional[JournalEntry]") -> Outcome:
        return tell_ending(call, run_child(call, journal, spawn))

    # In bytes: the locale decides what text they are.
    return Work((command.path, os.fsencode(program), argv, sorted(entry.get("env", {}).items()),
                 *surroundings(inputs)), start, not helps, inputs)


def tell_ending(call: Call, ending: "Ending", what: str = "tool") -> Outcome:
    """What the end of a child means: its own exit code, its death, a timeout or a cancellation."""
    status, cause, survivors = ending
    if survivors:
        call.warn("PROCESS_SURVIVED", f"KILL did not end {', '.join(map(str, survivors))} within "
                  f"{KILL_PATIENCE:g} s")
    if cause == 0:
        told: Outcome = failure(
            "TIMEOUT", f"The {what} ran past its limit of {call.timeout:g} s and was stopped; what "
            "it had done until then stays done", {"partial": True},
            suggestion=f"{_LOOK_FIRST}; --timeout sets another limit",
            context={"timeout_ms": call.timeout_ms})
    elif cause is not None:
        told = Cancelled(cause, what)
    elif os.WIFSIGNALED(status):
        signo = os.WTERMSIG(status)
        told = Failure(128 + signo, "DELEGATED_SIGNAL", f"The {what} died of {signal_name(signo)} "
                       f"(signal {signo})", {"partial": True}, context={"signal": signo})
    else:
        code = os.WEXITSTATUS(status)  # it may have failed halfway: nothing says "run it again"
        told = Outcome(0, {"exit_code": 0}) if not code else Failure(
            code, "DELEGATED_EXIT", f"The delegated tool exited {code}", {"exit_code": code})
    told.ran = True
    return told


# ---- HTTP operation ------------------------------------------------------------------------------

_UNFINISHED = {  # what a status means that ends in an exit code other than 0 without an error
    "ok": "The service took the request but has not finished it (HTTP 202)",
    "partial": "The service did a part of it", "needs_clarification": "The service asks back"}
_CODE_OF_STATUS = {
    400: "invalid_input", 401: "unauthenticated", 403: "forbidden", 404: "not_found",
    409: "conflict", 412: "etag_conflict", 413: "limit_exceeded", 422: "invalid_input",
    429: "rate_limited", 503: "dependency_unavailable"}


def service_url(app: "App") -> "Any":
    """The service's base URL, split and checked. Raises Failure (CONFIGURATION_INVALID)."""
    from urllib.parse import urlsplit

    text = app.setting("BASE_URL") or app.base_url or ""
    # Its text is not told: it may hold a password, or a token in its query.
    named = f"The base URL of {app.prefix + 'BASE_URL' if app.setting('BASE_URL') else 'base_url'}"
    try:
        url = urlsplit(text)
        port = url.port
        (url.hostname or "").encode("idna")  # as it is looked up
    except ValueError:
        raise failure("CONFIGURATION_INVALID", f"{named} is no URL") from None
    refuse("CONFIGURATION_INVALID", (
        (not text, f'No base URL is set: set "base_url" in the manifest, or {app.prefix}BASE_URL'),
        (url.scheme not in ("http", "https"), f"{named} must begin with http:// or https://"),
        ("@" in url.netloc, f"{named} must hold no user or password; use a token file"),
        (port == 0 or not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^][%:]+)(:[0-9]+)?", url.netloc),
         f"{named} names no host and port"),
        (set("?#") & set(text), f"{named} must have no query and no fragment"),
        (not re.fullmatch("[!-~]+", text), f"{named} must be visible ASCII without spaces")))
    return url


def is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(app: "App", url: "Any") -> str:
    """The bearer token, "" where none is configured. Raises Failure (CONFIGURATION_INVALID)."""
    path = app.setting("TOKEN_FILE") or native(app.token_file or "")
    if not path:
        return ""
    path = os.path.join(app.folder, os.path.expanduser(path))
    named = f"The token file {path}"
    try:
        with open(regular_file(path), "rb", buffering=0) as file:
            info, text = os.fstat(file.fileno()), file.read(TOKEN_LIMIT + 2)
    except (OSError, ValueError) as error:
        raise failure("CONFIGURATION_INVALID", f"{named}: {reason_of(error)}") from None
    line = text[:-1] if text.endswith(b"\n") else text
    refuse("CONFIGURATION_INVALID", (
        (info.st_uid != os.geteuid(), f"{named} belongs to another user"),
        (info.st_mode & 0o077, f"{named} is open to others; run: chmod 600 {path}"),
        (len(line) > TOKEN_LIMIT or not re.fullmatch(b"[!-~]([ -~]*[!-~])?", line),
         f"{named} must hold one line of printable ASCII of at most {TOKEN_LIMIT} bytes"),
        (url.scheme == "http" and not is_loopback(url.hostname),
         f"{named} is not sent to another machine over plain http; use https")))
    return line.decode("ascii")


def request_path(command: Command, args: "Json") -> str:
    """The path and query that positionals and flags make. Raises Failure (ARG_ERROR)."""
    from urllib.parse import quote, urlencode

    def fill(match: "Any") -> str:
        text = str(args[match.group(1)])
        if text in ("", ".", ".."):
            raise argument_error(f"{match.group(1)} must not be empty, . or ..")
        return quote(text, safe="")

    try:
        path = re.sub(r"\{([^}]*)\}", fill, command.entry["http"]["path"])
        query = urlencode([
            (name, "true" if value is True else value)
            for name in command.entry.get("flags", {}) if name in args
            for value in (args[name] if isinstance(args[name], list) else [args[name]])
            if value is not False])
    except UnicodeEncodeError:
        raise argument_error("an argument is not valid UTF-8") from None
    return f"{path}{query and '?' + query}"


def prepare_request(call: Call, command: Command) -> Work:
    """Check all that an http command needs before anything is sent: settings, arguments, body."""
    url, body = service_url(call.app), None
    method, path = command.entry["http"]["method"], request_path(command, call.args)
    target = f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}{path}"
    headers = {"Accept": "application/json", "User-Agent": f"agentcli/{VERSION}",
               "X-Request-ID": call.request_id}
    token = read_token(call.app, url)
    if token:
        headers["Authorization"] = "Bearer " + token
    if "input" in command.brought() and "input" in call.args:
        body = read_input(call.args["input"], INPUT_LIMIT, call.deadline)
        headers["Content-Type"] = "application/json"
        try:
            parse_json(body)
        except ValueError as error:
            raise argument_error(f"--input {call.args['input']}: not a JSON value in UTF-8: "
                                 f"{error}") from None
    if command.is_destructive and not call.args.get("confirm-destructive"):
        raise failure("APPROVAL_REQUIRED", f"{command.words} is destructive and was not sent: ask "
                      "for approval, then add --confirm-destructive")

    def start(journal: "Optional[JournalEntry]") -> Outcome:
        if call.operation_id:
            headers["Idempotency-Key"] = call.operation_id
        return send_request(call, method, target, headers, body)

    # Without the base URL: a service that moved keeps what it knows of an operation.
    return Work((command.path, method, path, body), start)


def send_request(call: Call, method: str, target: str, headers: "Dict[str, str]",
                 body: "Optional[bytes]") -> Outcome:
    """Send one request in a child, and tell what its reply, or the lack of one, means.

    The child marks the shared page before the first byte may leave, and that mark alone decides
    between "nothing was sent" and "nobody knows"; at the deadline KILL ends it.
    """
    heed_signals()
    getattr(sys, "set_int_max_str_digits", int)(0)  # a reply's integers stay exact; run() resets it
    page = SharedPage(call.request_id)

    def send() -> None:
        try:
            page.put(exchange(call, page, method, target, headers, body))
        except (ValueError, RecursionError):  # to write takes more of the stack than to read did
            page.put(judged(lost(call, page.marked, "the reply is too deep or too large"), None))

    pid = fork_child(call, page, True, send)
    status, cause, _ = supervise(ProcessTree(pid, True), call.deadline, own=True)
    died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if cause is None and died == signal.SIGALRM:
        cause = 0  # the sender's own timer was the first to ring
    answer = page.answer()
    if cause is None and answer:
        named = '"operation_id"' in json.dumps(answer["reply"])
        if answer["exit"] == 6 and call.operation_id and not named:
            told = _UNFINISHED.get(answer["reply"]["status"], "It is not known to be done")
            call.warn("PENDING", f"{told}; look operation {call.operation_id} up")
        return Outcome(answer["exit"], error=answer["reply"]["error"], reply=answer["reply"],
                       final=answer["final"])
    if cause and not page.marked:
        raise Cancelled(cause)
    if cause is None and not page.marked and not died:
        return internal_error()
    reply = lost(call, page.marked, f"{signal_name(cause)} came" if cause else
                 f"the limit of {call.timeout:g} s passed" if cause == 0 else
                 f"agentcli's sender died of {signal_name(died)}" if died else
                 "agentcli's sender failed; the traceback is on stderr")
    exit_code = 128 + cause if cause else resolve_exit_code(reply, None)
    return Outcome(exit_code, error=reply["error"], reply=reply)


def lost(call: Call, sent: bool, why: str, read: "Any" = None) -> "Json":
    """The envelope of a request without a usable reply; read: what could be read of it."""
    if not sent or not call.operation_id:
        return operation_envelope(
            call.request_id, "error", read, "dependency_unavailable",
            f"{'No usable reply came' if sent else 'Nothing was sent'}: {why}", True)
    return operation_envelope(
        call.request_id, "partial",
        {"operation_id": call.operation_id, "operation_state": "unknown"}, "operation_unknown",
        f"The request may have been carried out, but {why}; find out how operation "
        f"{call.operation_id} ended before any retry, and retry only with --operation-id "
        f"{call.operation_id}", operation_id=call.operation_id)


def direct_opener(page: SharedPage) -> "Any":
    """An opener that marks the page before the request may leave, and follows no redirect."""
    import contextlib
    import io
    import socket
    import urllib.request
    from http import client

    # A final reply other than 2xx, perhaps behind interim ones.
    refusal = rb"(HTTP/1\.[01] 1..[^\n]*\n([^\r\n].*\n)*\r?\n)*HTTP/1\.[01] [3-5]"

    class Lines(io.BufferedReader):
        """A reply's stream, of whose head http.client would take a line that is cut short."""

        def readline(self, limit: "Optional[int]" = -1) -> bytes:
            line = super().readline(limit)
            # http.client takes signed chunk sizes, and a bare CR for a line's end (RFC 9112, 2.2).
            if line[-1:] != b"\n" or line[0] in b"+-" or b"\r" in line[:-2]:
                raise client.HTTPException("the reply was cut short or has a malformed line")
            return line

    class Reply(client.HTTPResponse):
        def begin(self, **limits: "Any") -> None:
            self.fp = Lines(self.fp.detach())
            super().begin(**limits)
            while 101 < self.status < 200:  # an interim reply (RFC 9110, 15.2)
                vars(self)["headers"] = None
                super().begin(**limits)
            if self.status in (204, 304):  # no body, whatever its header says (RFC 9110, 6.4.1)
                self.chunked, self.length = False, 0

    class Connection(client.HTTPConnection):
        """One that marks the page between having connected and sending the request."""

        response_class = Reply

        def connect(self) -> None:
            super().connect()  # a proxy's CONNECT is sent in here: not yet the request
            page.mark()
            if hasattr(self.sock, "suppress_ragged_eofs"):  # TLS that just breaks off is no end
                self.sock.suppress_ragged_eofs = False

        def send(self, data: "Any") -> None:
            if self.sock is None:
                self.connect()
            plain = not hasattr(self.sock, "cipher")
            try:
                self.sock.setblocking(not plain)  # macOS knows no MSG_DONTWAIT
                while data and plain:
                    with contextlib.suppress(BlockingIOError):
                        seen = self.sock.recv(65536, socket.MSG_PEEK)
                        if re.match(refusal, seen):
                            return  # the rest need not be sent (RFC 9112, 9.5)
                        if not seen:
                            break
                    wait_ready(self.sock.fileno(), "write", time.monotonic() + LOOK)
                    with contextlib.suppress(BlockingIOError):
                        data = data[self.sock.send(data[:65536]):]
                self.sock.setblocking(True)
                super().send(data)
            except OSError:  # it may have answered before it hung up; getresponse() tells
                return
            finally:
                self.sock.setblocking(True)

    class TLSConnection(Connection, getattr(client, "HTTPSConnection", object)):  # type: ignore
        """The same over TLS; a Python that was built without it still speaks plain http."""

    class Handler(urllib.request.AbstractHTTPHandler):
        def http_open(self, request: "Any") -> "Any":
            return self.do_open(Connection, request)

        def https_open(self, request: "Any") -> "Any":
            import ssl

            context = ssl.create_default_context()  # Python 3.8 and 3.9 take a break-off for an end
            context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
            return self.do_open(TLSConnection, request, context=context)

        http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    opener = urllib.request.OpenerDirector()  # follows no redirect and knows no other scheme
    opener.add_handler(Handler())
    return opener


def exchange(call: Call, page: SharedPage, method: str, target: str, headers: "Dict[str, str]",
             body: "Optional[bytes]") -> "Json":
    """In the child: send the request, read the whole reply, and say what it means."""
    import urllib.parse
    import urllib.request
    from http.client import HTTPException, InvalidURL

    if call.deadline:  # should agentcli itself be killed, its sender still ends in time
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, call.deadline - time.monotonic()))
    request = urllib.request.Request(target, body, headers, method=method)
    opener = direct_opener(page)
    url = urllib.parse.urlsplit(target)
    if not is_loopback(url.hostname or ""):
        # Of the variables alone: what macOS would be asked beside them is not safe after a fork.
        opener.add_handler(urllib.request.ProxyHandler(urllib.request.getproxies_environment()))
    try:
        reply: Any = opener.open(request, timeout=None)  # the timer above is the only limit
        status, received = reply.status, read_reply(reply)
    except (OSError, HTTPException, ValueError) as error:
        reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        if isinstance(error, (ValueError, InvalidURL)) and not page.marked:
            reason = "the proxy variable's value is no URL"  # and may hold a password
        return judged(lost(call, page.marked, f"{url.netloc}: {reason}"), None)
    return interpret(call, status, received)


def read_reply(reply: "Any") -> bytes:
    """The whole body of a reply. Raises ValueError when it is too large or cut short."""
    lengths = {text.strip() for text in reply.headers.get_all("Content-Length", ["0"])}
    coding = ",".join(reply.headers.get_all("Transfer-Encoding", ["chunked"])).strip().lower()
    defects = [d for d in reply.headers.defects if "Header" in type(d).__name__]  # not of a part
    if defects or coding != "chunked" or len(lengths) > 1 or not re.fullmatch(
            "[0-9]+", min(lengths)):
        raise ValueError("its header is malformed, or says two things of its length")
    data: bytes = reply.read(REPLY_LIMIT + 1)
    if len(data) > REPLY_LIMIT:
        raise ValueError(f"the reply is larger than {REPLY_LIMIT} bytes")
    if reply.length:  # read(n) does not mind a short body
        raise ValueError(f"the reply was cut short by {reply.length} bytes")
    return data


def interpret(call: Call, status: int, received: bytes) -> "Json":
    """What a whole reply means: its own OperationEnvelope, or one made of its status and JSON."""
    problem, document, meant = "", None, ""
    try:
        document = parse_json(received, huge=True) if received.strip() else None
    except ValueError as error:
        problem = f"the reply cannot be read: {error}"
    if isinstance(document, dict) and is_operation_envelope(document):
        return judged(document, status, final=True)
    if isinstance(document, dict) and is_near_envelope(document):  # and may not pass for success
        problem, meant = "the reply breaks the OperationEnvelope's schema", meant_code(document)
    if status < 200 or status in (502, 504):
        problem = f"a gateway answered HTTP {status}"
    if problem and (status < 300 or status in (502, 504) or _EXIT_OF_CODE.get(meant) == 6):
        return judged(lost(call, True, problem, document), status)
    if status < 300:
        return judged(operation_envelope(call.request_id, "ok", document), status)
    code = meant or _CODE_OF_STATUS.get(status, "http_error")
    message = f"The service answered HTTP {status}"
    if status < 400:
        code, message = "redirect_refused", message + ", a redirect; correct the base URL"
    return judged(operation_envelope(
        call.request_id, "error", document, code, message, status in (429, 503),
        **({"operation_id": call.operation_id} if call.operation_id else {})), status)


def judged(reply: "Json", status: "Optional[int]", final: bool = False) -> "Json":
    """What the child leaves for its parent; final: the envelope is the service's own."""
    return {"exit": resolve_exit_code(reply, status), "reply": reply, "final": final}


# ---- Declared commands ---------------------------------------------------------------------------


class Context:
    """What a handler knows of its call, and ways to speak to the caller.

    dry_run: it is to show what it would do, and do nothing (REQ-C-004). warnings: what `warn` kept.
    """

    def __init__(self, dry_run: bool, page: "Optional[SharedPage]" = None) -> None:
        self.dry_run = dry_run  # show what would be done, and do nothing
        self.warnings: List[Json] = []
        self._page = page

    def log(self, text: str) -> None:
        """Write a line to stderr, for a person; the envelope does not hold it."""
        write_all(2, (str(text) + "\n").encode("utf-8", "backslashreplace"))

    def warn(self, code: str, message: str) -> None:
        """Add a warning to the envelope (REQ-F-004), however the function ends.

        code: `^[A-Z][A-Z0-9_]+$`. message: a sentence. Raises ValueError when one is malformed.
        """
        faults = shape_faults({"code": code, "message": message}, _ERROR_KEYS)
        if faults:
            raise ValueError(f"this is no warning: {'; '.join(faults)}")
        self.warnings.append({"code": code, "message": message})
        if self._page:
            self._page.put({"warnings": self.warnings})


def prepare_handler(call: Call, command: Command) -> Work:
    """Make ready to run the function that a program bound to a declared command."""
    args, handler = dict(call.args), command.handler
    if handler is None:
        raise failure("NO_HANDLER", f"No function is bound to {command.words}",
                      fix_required=f'Bind one with @app.handler("{command.path}")')
    brought = {name: args.pop(name, False) for name in command.brought()}
    asked = brought.get("dry-run", False)
    preview = asked or not brought.get("confirm-destructive", True)

    def start(journal: "Optional[JournalEntry]") -> Outcome:
        outcome = in_child(call, journal, handler, args, preview)
        if outcome.exit_code == 0 and preview and not asked:
            raise failure("CONFIRMATION_REQUIRED", f"{command.words} is destructive and was only "
                          "asked what it would do; data is the answer", outcome.data,
                          fix_required="Ask for approval, then add --confirm-destructive")
        if preview:
            outcome.meta["dry_run"] = True
        elif outcome.exit_code == 0 and not command.is_safe and not (
                isinstance(outcome.data, dict) and outcome.data.get("effect") in EFFECTS):
            call.warn("EFFECT_MISSING", "A mutating command's handler should return its effect: "
                      "created, updated, deleted or noop")
        return outcome

    return Work((command.path, os.fsencode(call.app.folder), sorted(args.items()),
                 *surroundings([0])), start, not preview, [0])


def in_child(call: Call, journal: "Optional[JournalEntry]", function: "Callable[..., Any]",
             args: "Json", dry_run: bool = False) -> Outcome:
    """Call `function(args, context)` in a forked child under the wait loop; tell how it ended."""
    page = SharedPage(call.request_id)
    context = Context(dry_run, page)

    def work() -> None:
        try:  # PR_SET_CHILD_SUBREAPER: what the function leaves orphaned stays its descendant
            import ctypes

            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        except (ImportError, OSError, AttributeError):  # not Linux
            pass
        # The threads of the program's pools are not in the fork, so that nobody may wait for them.
        getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {}).clear()
        try:
            try:
                data = function(args, context)
            finally:  # wait for threads, as at Python's exit
                getattr(sys.modules.get("threading"), "_shutdown", int)()
            if not (data is None or isinstance(data, (dict, list))):
                raise TypeError(f"it returned {type(data).__name__}, not dict, list or None")
            page.put({"exit": 0, "data": data, "error": None, "warnings": context.warnings})
        except BaseException as error:  # noqa: BLE001  # SystemExit is an end without an answer too
            told = error if isinstance(error, Failure) else internal_error(
                f"The handler failed: {type(error).__name__}: {error}")
            page.put({"exit": told.exit_code, "data": told.data, "error": told.error,
                      "warnings": context.warnings})

    ending = run_child(call, journal, lambda own_group: fork_child(call, page, own_group, work),
                       page.name)
    status, cause, _ = ending
    answer = page.answer()
    call.warnings += answer.get("warnings", ())
    if cause is not None:
        return tell_ending(call, ending, "handler")
    if "exit" not in answer:
        how = f"died of {signal_name(os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else \
            f"left with exit code {os.WEXITSTATUS(status)}"
        return failure("INTERNAL_ERROR", f"The handler's process {how} and gave no answer",
                       {"partial": True}, suggestion=_LOOK_FIRST)
    return Outcome(answer["exit"], answer["data"], answer["error"])


# ---- Built-ins: manifest, doctor, schema, version, help ------------------------------------------

# What agentcli itself exits with, for the manifest (REQ-C-001): the code, for which kinds of
# command (passthrough, http, declared, built-in; a capital: only those that are not safe), a name,
# its side effects, and when. Only what has none may be tried again as it is, which is 5.
_EXIT_CODES = (
    (0, "phdb", "SUCCESS", "complete", "It ended well"),
    (1, "pdb", "INTERNAL_ERROR", "partial", "A fault of agentcli's own; traceback on stderr"),
    (1, "h", "OTHER_FAILURE", "partial", "Any other failure, authentication and authorization too"),
    (2, "phdb", "ARG_ERROR", "none", "An argument, the manifest or a setting is wrong"),
    (3, "PD", "OUTCOME_UNKNOWN", "partial", "An earlier identical run never reported its end"),
    (3, "h", "APPROVAL_REQUIRED", "none", "Clarification or approval is required"),
    (4, "pdb", "PRECONDITION", "none", "Something that it needs is missing; not started"),
    (4, "h", "CONFLICT", "none", "The service reports a conflict"),
    (5, "h", "UNAVAILABLE", "none", "The service or the journal is unavailable; nothing was done"),
    (6, "PD", "CONFLICT", "none", "The key names another call, or the same call still runs"),
    (6, "h", "OUTCOME_UNKNOWN", "partial", "Pending, partial or unknown; look the operation up"),
    (10, "pdb", "TIMEOUT", "partial", "It ran past its limit and was stopped, perhaps halfway"),
) + tuple((128 + signo, "phdb", "CANCELLED", "partial", f"{name} stopped agentcli or the tool")
          for signo, name in ((1, "SIGHUP"), (2, "SIGINT"), (3, "SIGQUIT"), (15, "SIGTERM")))
_ENVIRONMENT = (
    ("{}FORMAT", "Default of --format: json or text"), ("{}SESSION_ID", "Default of --session"),
    ("{}STATE_DIR", "Where the journal and the audit log lie; an absolute path"),
    ("{}AUDIT_LOG", "1, 0 or an absolute path; it wins over the manifest"),
    ("{}BASE_URL", "The service's address; it wins over the manifest"),
    ("{}TOKEN_FILE", "A private file with the service's token; it wins over the manifest"),
    ("{}RUN_ID", "Set for the tool: names the run; nested runs append to it"),
    ("AGENTCLI_MANIFEST", "The manifest to use when --manifest is not given"),
    ("TOOL_TRACE_ID", "Copied into meta.trace_id and the audit log"),
    ("CI", "When set, json is the default format on a terminal too"))


def manifest_entry(command: Command) -> "Json":
    """A command as the ManifestResponse shows it (REQ-O-041)."""
    entry, kind = command.entry, command.kind
    letters = {kind[0], "" if command.is_safe else kind[0].upper()}
    shown: Json = {
        "description": entry["description"], "danger_level": entry["danger_level"],
        "required_scopes": entry.get("required_scopes", []), "flags": command.flags(),
        "option_placement": entry.get("option_placement", "any"), "output_file": "envelope",
        "exit_codes": {str(code): {"name": name, "description": text, "retryable": code == 5,
                                   "side_effects": "none" if command.is_safe
                                   and effects == "partial" else effects}
                       for code, kinds, name, effects, text in _EXIT_CODES
                       if letters & set(kinds)}}
    if kind == "passthrough":
        shown.update(arguments="passthrough", option_placement="strict", subprocess={
            "binary": entry["argv"][0], "hardcoded_args": entry["argv"][1:]})
    if kind == "http":
        shown["has_network_io"] = True
        if "input" in shown["flags"]:
            shown["stdin"] = {"mode": "buffered", "max_bytes": INPUT_LIMIT}
    if kind == "builtin":
        shown["builtin"] = True
    shown.update({key: entry[key] for key in ("positionals", "examples") if entry.get(key)})
    if "help_argv" in entry:  # an empty one means something, too
        shown["help_argv"] = entry["help_argv"]
    return shown


def run_manifest(call: Call) -> Outcome:
    """Built-in `manifest`: all that can be called; data is null when the caller knows its etag."""
    app = call.app
    response: Json = {
        "schema_version": "3.9", "framework_version": VERSION, "flags": app.flags,
        "env_vars": [{"name": name.format(app.prefix), "description": text}
                     for name, text in _ENVIRONMENT],
        "commands": {path: manifest_entry(c) for path, c in sorted(app.commands.items())}}
    response["etag"] = "sha256:" + digest(app.name, app.version, json.dumps(response))
    if call.args.get("etag") == response["etag"]:
        return Outcome(0, None, meta={"not_modified": True})
    return Outcome(0, response)


def run_doctor(call: Call) -> Outcome:
    """Built-in `doctor`: what a newcomer trips over, and how to mend it."""
    outcome = in_child(call, None, lambda *_: {"checks": checks(call)}, {})
    found = (outcome.data or {}).get("checks", ())
    failed = [check["name"] for check in found if not check["ok"]]
    outcome.text = "\n".join(printable(f"{'ok' if c['ok'] else 'MEND':4} {c['name']}: {c['found']}"
                                       + f". {c.get('fix')}" * ("fix" in c)) for c in found) or None
    if failed:
        wrong = failure("CHECKS_FAILED", f"Not in order: {', '.join(failed)}",
                        suggestion="The fix of each in data.checks says how to mend it")
        outcome.exit_code, outcome.error = wrong.exit_code, wrong.error
    return outcome


def checks(call: Call) -> "List[Json]":
    """What was checked: its name, whether it holds, what was found, how to mend it."""
    app = call.app
    made: List[Json] = []

    def check(name: str, find: "Callable[..., Any]", *args: "Any") -> None:
        try:
            made.append({"name": name, "ok": True, "found": str(find(*args))})
        except Failure as wrong:
            fix = (wrong.error or {}).get("fix_required", "Correct this setting")
            made.append({"name": name, "ok": False, "found": str(wrong), "fix": fix})
        except OSError as error:
            made.append({"name": name, "ok": False, "found": str(error), "fix": mend_state(app)})

    def manifest() -> str:
        if app.broken:
            raise app.broken
        return app.source or "registered from Python"

    def tool(command: Command) -> str:
        for element in command.entry["argv"][1:]:
            path, = expand_argv(app, [element])
            if element.startswith("{manifest_dir}/") and not os.path.exists(path):
                raise failure("TOOL_NOT_FOUND", f"There is no {path}", fix_required="Put it there, "
                              "or correct the command's argv in the manifest")
        return find_program(app, command)

    def state() -> str:
        folder = app.journal_folder()
        private_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
        return app.state_folder()

    def service() -> str:
        import socket
        from urllib.request import getproxies_environment, proxy_bypass

        url = service_url(app)
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        if not is_loopback(url.hostname) and getproxies_environment().get(url.scheme) \
                and not proxy_bypass(url.hostname):
            return f"{url.hostname}:{port} is behind a proxy and was not tried"
        try:
            socket.create_connection((url.hostname, port), 3).close()
        except (OSError, ValueError) as error:
            raise failure("TOOL_NOT_FOUND", f"{url.hostname}:{port}: {error}", fix_required="Start "
                          "the service, or correct the base URL") from None
        return f"{url.hostname}:{port} accepts connections"

    check("python", lambda: f"Python {sys.version.split()[0]} at {sys.executable}")
    check("manifest", manifest)
    for path, command in app.commands.items():
        if command.kind == "passthrough":
            check(f"tool of {path}", tool, command)
    check("state folder", state)
    check("audit log", lambda: "on" if audit_log_of(app) else "off")
    if app.setting("BASE_URL") or app.base_url or "http" in [c.kind for c in app.commands.values()]:
        if app.setting("TOKEN_FILE") or app.token_file:
            check("token file", lambda: read_token(app, service_url(app)) and "ok")
        check("service", service)
    return made


def show_version(call: Call) -> Outcome:
    """--version: of the tool and of agentcli, and whether this copy was edited (its SHA-256)."""
    import hashlib

    app = call.app
    try:
        with open(__file__, "rb") as file:
            own: Optional[str] = hashlib.sha256(file.read()).hexdigest()
    except OSError:  # in a zip archive, say
        own = None
    return Outcome(0, {"name": app.name, "version": app.version, "agentcli_version": VERSION,
                       "agentcli_sha256": own},
                   text=f"{app.name} {app.version} (agentcli {VERSION})")


def show_help(call: Call) -> Outcome:
    """Help for the root, a group or a command: to stdout on a terminal, else to stderr."""
    app, command, words = call.app, call.command, " ".join(call.line.words)
    if app.broken:
        call.warn("INVALID_MANIFEST", str(app.broken))
    lines = [f"usage: {app.name} [global options] {words or 'COMMAND PATH'}"]
    if command:
        lines[0] += " [options]" if call.kind != "passthrough" else " [tokens for the tool]"
        lines[0] += "".join(f" {p['name']}" if p["required"] else f" [{p['name']}]"
                            for p in command.positionals)
        lines += ["", command.entry["description"], f"({command.entry['danger_level']})"]
        lines += _table("arguments", [(p["name"], p["description"]) for p in command.positionals]
                        + [_flag_row(n, spec) for n, spec in command.flags().items()])
        lines += _table("examples", [(e["command"], e["description"])
                                     for e in command.entry.get("examples", ())])
        if call.kind == "passthrough":
            lines += ["", f"Every token after `{words}` is the tool's; global options go before."]
    else:
        lines += ["", app.description] if app.description and not words else []
        lines += _table("commands", [(c.words, c.entry["description"])
                                     for c in app.commands.values()
                                     if not words or c.words.startswith(words + " ")])
    lines += _table("global options", [_flag_row(n, spec) for n, spec in app.flags.items()])
    if call.format == "text" and os.isatty(1):
        return Outcome(0, None, text="\n".join(lines))
    write_all(2, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
    call.format = "json"
    return Outcome(0, None, meta={"help": True})


def _flag_row(name: str, spec: "Json") -> "Tuple[str, str]":
    value = {"boolean": "", "enum": " " + "|".join(spec.get("enum_values", ()))}.get(
        spec["type"], " " + spec["type"].upper())
    short = f"-{spec['short']}, " if "short" in spec else ""
    more = " (required)" * spec["required"] \
        + (f" (default: {json.dumps(spec['default'])})" if spec.get("default") is not None else "")
    return f"{short}--{name}{value}", spec["description"] + more


def _table(title: str, rows: "Sequence[Tuple[str, str]]") -> "List[str]":
    width = min(max([len(left) for left, _ in rows], default=0), 34)
    return ["", f"{title}:"] * bool(rows) + [f"  {a:<{width}}  {b}" for a, b in rows]


_LIMIT = flag("integer", "How many entries at most, the newest; from 1", default=100,
              pattern="^[1-9]")
BUILTINS: "Dict[str, Tuple[Callable[[Call], Outcome], str, Json]]" = {
    "manifest": (run_manifest, "Print all that can be called, as data", {
        "etag": flag("string", "An etag seen before: when it still holds, data is null")}),
    "journal": (run_journal, "Show what was started and how it ended", {
        "unresolved": flag("boolean", "Only what nobody knows the end of"), "limit": _LIMIT}),
    "audit-log": (run_audit_log, "Show what was called", {
        "since": flag("string", "A span before now (30s, 15m, 2h, 7d) or an ISO 8601 time"),
        "command": flag("string", "Only this command"),
        "trace-id": flag("string", "Only entries with this TOOL_TRACE_ID"), "limit": _LIMIT,
        "cursor": flag("string", "meta.pagination.next_cursor of the page before")}),
    "doctor": (run_doctor, "Check this machine and the manifest, and say how to mend them", {}),
}


# ---- App and main --------------------------------------------------------------------------------


class App:
    """A set of commands behind one door; two of them share nothing.

    name: kebab-case; it gives the environment's prefix (`my-app`: MY_APP_) and the state folder.
    settings: base_url, token_file, audit_log and timeout (seconds for every command that sets
    none; 0 is no limit), as in a manifest. Raises RegistrationError.
    """

    timeout: "Optional[float]" = None
    base_url: "Optional[str]" = None
    token_file: "Optional[str]" = None
    audit_log: "Any" = False
    source = ""  # the manifest file, if there is one
    notice = ""  # why the caller may have meant another manifest
    broken: "Optional[Failure]" = None  # why the manifest file could not be used

    def __init__(self, name: str = "agentcli", version: str = "0.0.0", description: str = "",
                 **settings: "Any") -> None:
        self.name, self.version, self.description = name, version, description
        settings = {key: value for key, value in settings.items() if value is not None}
        faults = shape_faults(dict(settings, name=name, version=version, description=description),
                              {key: rule for key, rule in _ROOT_KEYS.items() if key != "commands"})
        if faults:
            raise RegistrationError(faults)
        vars(self).update(settings)
        program = getattr(sys.modules.get("__main__"), "__file__", None)
        try:  # {manifest_dir}
            self.folder = os.path.dirname(os.path.realpath(program)) if program else os.getcwd()
        except OSError:  # it was deleted, so nothing is found there, wherever the program goes
            self.folder = os.devnull
        self.flags = {key: spec for key, spec in GLOBAL_FLAGS.items() if key != "manifest"}
        self.commands = {path: Command(
            path, {"description": text, "danger_level": "safe", "flags": flags}, "builtin", run)
            for path, (run, text, flags) in BUILTINS.items()}

    @property
    def prefix(self) -> str:
        return self.name.upper().replace("-", "_") + "_"

    def setting(self, variable: str) -> "Optional[str]":
        """An environment variable of this app; set but empty counts as unset."""
        return os.environ.get(self.prefix + variable) or None

    def state_folder(self) -> str:
        """Where the journal and the audit log lie. Raises OSError where that is nowhere."""
        folder = self.setting("STATE_DIR")
        if not folder:
            state, home = os.environ.get("XDG_STATE_HOME", ""), os.environ.get("HOME")
            if not state.startswith("/"):
                if not home:
                    import pwd

                    try:
                        home = pwd.getpwuid(os.getuid()).pw_dir
                    except KeyError:
                        home = ""
                state = os.path.join(home, ".local", "state")
            folder = os.path.join(state, self.name)
        if not folder.startswith("/"):
            raise OSError(f"the state folder must be an absolute path, not {folder!r}")
        return own_folder(folder)

    def journal_folder(self) -> str:
        """Where the journal lies in it. Raises OSError."""
        return own_folder(os.path.join(self.state_folder(), "journal"))

    def register(self, path: str, **entry: "Any") -> None:
        """Add a command; path is dotted ("task.add"), entry is what a manifest entry holds.

        Raises RegistrationError with every rule that it breaks.
        """
        path = str(path)
        command = Command(path, entry)
        faults = command.faults(self) + path_faults(dict(self.commands, **{path: command}))
        if path in self.commands:
            faults.append(f'command "{path}": it is registered already')
        if faults:
            raise RegistrationError(faults)
        self.commands[path] = command

    def handler(self, path: str) -> "Callable[[Handler], Handler]":
        """Bind a function `(args, context) -> dict, list or None` to a declared command.

        args: a dict of the command's flags and positionals by name. The function runs in a forked
        child; it raises Failure for an end of its own. Raises RegistrationError.
        """
        command = self.commands.get(path)
        if self.broken:  # run() tells why
            return lambda function: function
        if command is None or command.kind != "declared":
            raise RegistrationError([f'command "{path}": is not a declared command; register it'])

        def bind(function: "Handler") -> "Handler":
            command.handler = function
            return function
        return bind

    def run(self, argv: "Optional[Sequence[str]]" = None) -> int:
        """Answer one command line (default: this process's); return its exit code, 0 to 255.

        What the caller does wrong ends in an envelope, never in an exception. While it runs,
        signals are blocked in this thread.
        """
        hold_closed_descriptors()
        flush_streams()  # what a program printed stays before the envelope, and out of a fork
        call = Call(self, sys.argv[1:] if argv is None else argv)
        if self.notice:
            call.warn("EXAMPLE_MANIFEST", self.notice)
        if os.name != "posix" or not hasattr(os, "posix_spawn"):
            return report(call, failure(
                "UNSUPPORTED_PLATFORM", "agentcli needs Linux or macOS, Python 3.8 or newer and "
                f"os.posix_spawn, not {sys.platform} and {sys.version.split()[0]}; nothing was "
                "started"))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        digits = getattr(sys, "get_int_max_str_digits", int)()
        handlers = {}
        for signo, replaced in ((signal.SIGCHLD, (signal.SIG_DFL, signal.SIG_IGN)),
                                (signal.SIGWINCH, (signal.SIG_DFL,))):
            # A BSD kernel drops a blocked signal whose default is to be ignored, and if the caller
            # ignores CHLD the kernel reaps the tool unseen. The handler is never run.
            if signal.getsignal(signo) in replaced:
                try:
                    handlers[signo] = signal.signal(signo, lambda *_: None)
                except ValueError:  # only the main thread may
                    break
        try:
            return report(call, answer(call))
        except Exception:  # noqa: BLE001  # a second try, without all that may have failed
            call.audit = call.output = None
            return report(call, internal_error())
        finally:
            getattr(sys, "set_int_max_str_digits", int)(digits)
            for signo, handler in handlers.items():
                signal.signal(signo, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def main(self, argv: "Optional[Sequence[str]]" = None) -> "NoReturn":
        """Answer one command line and end the process with its exit code.

        Raises SystemExit alone. Of this process's own command line (argv is None), signals are
        then blocked for good: one that comes when the answer is told changes no exit code.
        """
        if argv is None and hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        sys.exit(self.run(argv))


def answer(call: Call) -> Outcome:
    """Parse and perform one call; every way in which it can fail becomes an outcome."""
    try:
        return parse(call)(call)
    except Failure as failed:  # which an App may keep to raise it again: `report` adds to its own
        return Outcome(failed.exit_code, failed.data, failed.error)
    except Exception:  # noqa: BLE001  # the envelope is written whatever happens
        return internal_error()


_PREPARE: "Dict[str, Callable[[Call, Command], Work]]" = {
    "passthrough": prepare_tool, "http": prepare_request, "declared": prepare_handler}


def perform(call: Call) -> Outcome:
    """Make the command's work ready, and do it unless the journal says that it was done."""
    command = call.command
    assert command
    if command.kind == "builtin" and command.handler:
        try:
            outcome: Outcome = command.handler(call)
            return outcome
        except OSError as error:
            raise failure("STATE_UNAVAILABLE", f"What {command.words} shows cannot be read: "
                          f"{error}", fix_required=mend_state(call.app)) from None
    return admit(call, _PREPARE[command.kind](call, command))


# What agentcli's own failures are called in an OperationEnvelope; others only become lower-case.
_OPERATION_CODE = {
    "ARG_ERROR": "invalid_input", "INVALID_AUDIT_LOG_SETTING": "configuration_invalid",
    "STATE_UNAVAILABLE": "journal_unavailable"}
# Found before a tool can have written anything, so that stdout is still agentcli's to use.
_BEFORE_THE_TOOL = ("ARG_ERROR", "INVALID_MANIFEST", "INVALID_AUDIT_LOG_SETTING")


def sentence_of(error: "Json") -> str:
    """An error for a person: what is wrong, what to do, and which operation it is about."""
    sentence = ". ".join(error[key] for key in ("message", "suggestion", "fix_required")
                         if isinstance(error.get(key), str))
    operation = error.get("operation_id", "")
    return sentence if operation in sentence else f"{sentence} (operation {operation})"


def remarks(call: Call, outcome: Outcome) -> "List[str]":
    """What stands on stderr beside the answer: warnings, and for a person why it is not ok."""
    own, reply = call.warnings, outcome.reply
    theirs = reply["warnings"] if outcome.final and reply and call.format == "text" else []
    lines = [f"warning: {warning['message']}" for warning in own + theirs]
    if call.format == "json":  # a final envelope is the service's own and holds none of these
        return lines if outcome.final else []
    if outcome.error:
        return [*lines, sentence_of(outcome.error)]
    if outcome.exit_code and reply and "PENDING" not in [warning["code"] for warning in own]:
        return [*lines, _UNFINISHED[reply["status"]]]
    return lines + ([outcome.note] if outcome.note else [])


def report(call: Call, outcome: Outcome) -> int:
    """Tell how a call ended: audit log, --output, then the envelope or lines for a person."""
    error = outcome.error or {}
    if call.kind == "http" and error and outcome.reply is None:
        code = _OPERATION_CODE.get(error["code"], error["code"].lower())
        outcome.reply = operation_envelope(call.request_id, "error", None, code,
                                           sentence_of(error), error["retryable"])
        outcome.exit_code = _EXIT_OF_CODE.get(code, outcome.exit_code)
    early = error.get("code") in _BEFORE_THE_TOOL
    behind_tool = call.kind == "passthrough" and not early and not call.informs
    stopped = error.get("code") in ("TIMEOUT", "CANCELLED")
    write_audit_entry(call, outcome)
    line = envelope_line(call, outcome)
    if call.output:
        try:
            write_output(call.output, line)
        except OSError as wrong:
            call.warn("OUTPUT_UNAVAILABLE", f"--output {call.output}: {reason_of(wrong)}")
            line = envelope_line(call, outcome)
    if call.format == "json":
        target, answer = (2, b"\n" + line) if behind_tool else (1, line)
    else:
        data = outcome.data if outcome.reply is None else outcome.reply["data"]
        shown = outcome.text
        if shown is None and data is not None and not behind_tool:
            shown = readable(data)
        target = 1
        answer = b"" if shown is None else shown.encode("utf-8", "backslashreplace") + b"\n"
    failed = write_all(target, answer, stopped)
    if failed and target == 1 and failed.errno not in (errno.EPIPE, errno.EBADF):
        write_all(2, answer)  # stdout is on a full disk, say; it was not closed on purpose
    text = "".join(f"{call.app.name}: {printable(remark)}\n" for remark in remarks(call, outcome))
    if text:
        if outcome.ran and error.get("code") != "DELEGATED_EXIT" and os.isatty(2):
            text = "\n" + text  # behind the ^C that the terminal shows, or half a line
        write_all(2, text.encode("utf-8", "backslashreplace"), stopped)
    return outcome.exit_code


def envelope_line(call: Call, outcome: Outcome) -> bytes:
    """The call's one envelope, of the kind that its command speaks, as a line."""
    if outcome.reply is None:
        return json_line(response_envelope(call, outcome))
    if not outcome.final:
        outcome.reply["warnings"] = [{"code": w["code"].lower(), "message": w["message"]}
                                     for w in call.warnings]
    return json_line(outcome.reply)


def readable(data: "Any") -> str:
    """JSON for a person: indented, letters as they are."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False)
    except RecursionError:  # to indent takes more of the stack than to read did
        text = json.dumps(data, ensure_ascii=False)
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Text for a terminal, on one line: control characters, escape sequences among them, shown.

    So are those that turn the direction of writing, and with it what a line seems to say.
    """
    return re.sub("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]",
                  lambda match: repr(match[0])[1:-1], text)


def streams_at(path: str) -> "List[int]":
    """Which of stdout and stderr a path names: /dev/stdout does, and so may that of a file.

    Raises OSError where the system does not follow it, such as another user's link in /tmp.
    """
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return []
    return [stream for stream in (1, 2) if os.path.samestat(there, os.fstat(stream))]


def check_output(path: str) -> None:
    """Refuse an --output PATH that could not be written after the run, before anything starts."""
    try:
        if streams_at(path):
            return
        place = os.path.dirname(os.path.realpath(path))
    except OSError as error:
        raise argument_error(f"--output {path}: {reason_of(error)}") from None
    except ValueError:  # it holds a NUL or what is no character
        place = ""
    if path[-1:] in ("", "/") or not place or os.path.isdir(path):
        raise argument_error(f"--output {path!r} is not the path of a file")
    if not os.path.isdir(place):
        raise argument_error(f"--output {path}: there is no folder {place}; create it first")
    if os.path.exists(path) and not os.path.isfile(path):
        place = path  # a pipe or a device
    if not os.access(place, os.W_OK):
        raise argument_error(f"--output {path}: no permission to write {place}")


def write_output(path: str, data: bytes) -> None:
    """Put the envelope at PATH, whole or not at all; a pipe or a device is written into.

    Raises OSError. A FIFO without a reader is such an error: to open it would block.
    """
    same = streams_at(path)
    if same or os.path.exists(path) and not os.path.isfile(path):
        target = os.dup(same[0]) if same else os.open(
            path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        error = write_all(target, data, told=True)
        os.close(target)
        if error:
            raise error
        return
    path = os.path.realpath(path)  # a symbolic link stays one
    part = os.path.join(os.path.dirname(path), f".{new_id('agentcli-')}.part")
    there = os.path.exists(path)
    target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if there else 0o666)
    try:
        with open(target, "wb") as file:
            if there:
                os.fchmod(target, stat.S_IMODE(os.stat(path).st_mode))
            file.write(data)
        os.rename(part, path)
    except BaseException:
        os.unlink(part)
        raise


def is_open(descriptor: int) -> bool:
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False


def hold_closed_descriptors() -> None:
    """Keep what agentcli opens from becoming descriptor 0, 1 or 2 of a tool; there it is closed."""
    while not all(map(is_open, (0, 1, 2))):
        try:
            os.open(os.devnull, os.O_RDWR)
        except OSError:  # in a bare chroot
            os.pipe()


def main(argv: "Optional[Sequence[str]]" = None) -> int:
    """Answer one command line with the commands of a manifest file; return the exit code.

    argv: without the program's name; None is this process's. Returns 0 to 255 (REQ-F-001). What
    the caller does wrong ends in an envelope, never in an exception.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    hold_closed_descriptors()
    app = App()
    app.flags = dict(GLOBAL_FLAGS)
    given = read_command_line(argv, {}, GLOBAL_FLAGS).given.get("manifest", [
        os.environ.get("AGENTCLI_MANIFEST") or None])[0]
    try:
        path = find_manifest(given)
        if given is None and path.endswith(".example.json"):
            app.notice = f"{path} is only the example; make a manifest.json beside it"
        load(path, app)
    except Exception:  # noqa: BLE001  # then, too, every call is answered
        app.broken = internal_error()
    return app.run(argv)


if __name__ == "__main__":
    os._exit(main())  # nothing is buffered, and Python's own end takes time
