#!/usr/bin/env python3
"""What agentcli.py promises, a test a promise: python3 test_agentcli.py [-k NAME]

Every test starts the real program, with real signals and real pseudo-terminals, and looks at what a
caller sees: bytes, exit codes, files, processes.
"""
import contextlib
import fcntl
import json
import os
import pathlib
import pty
import random
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import time
import unittest

FOLDER = os.path.dirname(os.path.abspath(__file__))
AGENTCLI = os.path.join(FOLDER, "agentcli.py")
on_linux = unittest.skipUnless(os.path.exists("/proc/self/environ"), "looks into /proc")

# ---- tools for the commands `py` (python -c) and `sh` (sh -c) ------------------------------------

SHOW = "import os, sys; print([os.fsencode(a) for a in sys.argv[1:]])"

# Catches the signals whose numbers it is given; a line on stdin ends it with exit code 5.
CATCH = r"""
import os, signal, sys
for number in sys.argv[1:]:
    signal.signal(int(number), lambda n, _: os.write(1, b"got %d\n" % n))
os.write(1, b"%d ready\n" % os.getpid())
sys.stdin.readline()
sys.exit(5)
"""

# Four children: in its group, in a session of its own, orphaned there, there without its marker.
TREE = """
sleep 300 & echo $!; setsid sleep 300 & echo $!; (setsid sleep 300 & echo $!)
env -i setsid sleep 300 & echo $!; echo ready; wait
"""

# Leads a session on a terminal and runs one job there, as an interactive shell does; tells through
# `door` what becomes of the job, and resumes a stopped one when a byte comes back.
SHELL = r"""
import os, signal, sys
door, place, *job = sys.argv[1:]
door = int(door)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
pid = os.fork()
if not pid:
    os.close(door)
    os.setpgid(0, 0)
    if place == "foreground":
        os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(job[0], job)
os.write(door, b"%d\n" % pid)
while True:
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if not os.WIFSTOPPED(status):
        break
    os.tcsetpgrp(0, os.getpgrp())
    os.write(door, b"stopped\n")
    os.read(door, 1)
    os.tcsetpgrp(0, pid)
    os.killpg(pid, signal.SIGCONT)
os.write(1, b"\0")
os.write(door, b"%d\n" % (os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)))
os.read(door, 1)
"""


# ---- helpers -------------------------------------------------------------------------------------

def until(condition, seconds=20):
    """Wait for the event itself, and fail when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not happen within {seconds} s")
        time.sleep(0.01)


def read_to(fd, mark, seconds=20):
    """What comes from a descriptor up to `mark`, and not one byte more."""
    seen = b""
    while not seen.endswith(mark):
        byte = os.read(fd, 1) if select.select([fd], [], [], seconds)[0] else b""
        if not byte:
            raise AssertionError(f"{mark!r} did not come after {seen!r}")
        seen += byte
    return seen[:-len(mark)]


def state(pid):
    """The letter that Linux shows for a process; Z for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def held(pending=(), ignored=()):
    """For preexec_fn: start with every signal blocked, some of them waiting, some ignored."""
    def prepare():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for number in pending:
            os.kill(os.getpid(), number)
    return prepare


def fits(value, shape):
    """Whether a JSON value has a shape: a type, a pattern, alternatives, a list of, an object."""
    if isinstance(shape, tuple):
        return any(fits(value, one) for one in shape)
    if isinstance(shape, list):
        return type(value) is list and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, str):
        return type(value) is str and re.fullmatch(shape, value, re.DOTALL) is not None
    if isinstance(shape, dict):  # a key with a ? may be missing
        return (type(value) is dict and {k for k in shape if k[-1] != "?"} <= set(value)
                and all(fits(v, shape.get(k, shape.get(k + "?", ()))) for k, v in value.items()))
    return value is shape or type(value) is shape


CODE = "[A-Z][A-Z0-9_]+"
ENVELOPE = {
    "ok": bool, "data": (dict, list, None),
    "warnings": [{"code": CODE, "message": ".+", "context?": dict}],
    "error": (None, {
        "code": CODE, "message": ".+", "retryable": bool, "phase?": "validation|execution|cleanup",
        "retry_after_ms?": int, "fix_required?": ".+", "fix_command?": ".+", "suggestion?": ".+",
        "context?": dict}),
    "meta": {
        "exit_code": int, "duration_ms": int, "timeout_ms?": int, "request_id": ".{8,}",
        "timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "tool_version": str,
        "command?": str, "trace_id?": ".+", "audit_log_path?": "/.*", "idempotency_hit?": True,
        "not_modified?": True, "help?": True, "dry_run?": bool, "pagination?": dict}}


class Answer:
    """What a caller sees of an agentcli that has ended; an envelope is checked where it is read."""

    def __init__(self, code, out=b"", err=b""):
        self.code, self.out, self.err = code, out, err

    def envelope(self, line):
        try:
            e = json.loads(line.decode("ascii"))
        except ValueError:
            raise AssertionError(f"no envelope: {vars(self)}") from None
        json.dumps(e, ensure_ascii=False).encode("utf-8")  # fails on a lone surrogate
        if not (fits(e, ENVELOPE) and e["ok"] is (self.code == 0) is (e["error"] is None)
                and e["meta"]["exit_code"] == self.code and line.find(b"\n") == len(line) - 1):
            raise AssertionError(f"exit code {self.code} with {line}")
        return e

    @property
    def on_stdout(self):
        """The envelope that is all of stdout."""
        return self.envelope(self.out)

    @property
    def on_stderr(self):
        """The envelope that is the last line of stderr."""
        return self.envelope(self.err[self.err.rfind(b"\n", 0, -1) + 1:])


class Case(unittest.TestCase):
    """A home folder with a manifest; `call` runs agentcli there, away from any terminal."""

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="test-agentcli-")).resolve()
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.addCleanup(self.sweep)
        self.env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": f"{self.dir}/home",
                    "LANG": "C.UTF-8", "AGENTCLI_MANIFEST": f"{self.dir}/manifest.json"}
        self.commands = {}
        self.save(py=self.entry("{python}", "-ISc"), sh=self.entry("sh", "-c"), **{
            "show": self.entry("{python}", "-ISc", SHOW, help_argv=["extract", "--help"]),
            "inner": self.entry("{python}", AGENTCLI, "sh"), "gone": self.entry("no-such-program"),
            "task.show": self.entry("echo", "task", danger_level="safe")})

    @staticmethod
    def entry(*argv, **fields):
        """A passthrough command; a field given as ... is left out."""
        entry = dict({"description": "Run a tool", "danger_level": "mutating",
                      "arguments": "passthrough", "argv": list(argv)}, **fields)
        return {k: v for k, v in entry.items() if v is not ...}

    def save(self, file="manifest.json", root=(), **commands):
        """Write a manifest; the commands come on top of those it has."""
        self.commands.update(commands)
        self.write(file, json.dumps(dict({"name": "ledger", "version": "1.4.0", "description": "x",
                                          "commands": self.commands}, **dict(root))).encode())

    def write(self, name, content, mode=0o644):
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
        return path

    def start(self, *args, run=(AGENTCLI,), env=(), **options):
        env = {k: v for k, v in dict(self.env, **dict(env)).items() if v is not None}
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "cwd": self.dir,
                   "stderr": subprocess.PIPE, "start_new_session": True, **options}
        p = subprocess.Popen([sys.executable, *run, *args], env=env, **options)
        for stream in filter(None, (p.stdin, p.stdout, p.stderr)):
            self.addCleanup(stream.close)
        self.addCleanup(p.wait)
        self.addCleanup(lambda: p.poll() is None and p.kill())
        return p

    def ready(self, *args, **options):
        """Start agentcli, wait for its tool's "ready"; the numbers that the tool wrote before."""
        p = self.start(*args, **{"stdin": subprocess.PIPE, **options})
        return (p, *map(int, read_to(p.stdout.fileno(), b"ready\n").split()))

    def end(self, p, given=None):
        out, err = p.communicate(given, timeout=40)
        return Answer(p.returncode, out or b"", err or b"")

    def call(self, *args, given=None, **options):
        options.setdefault("stdin", subprocess.DEVNULL if given is None else subprocess.PIPE)
        return self.end(self.start(*args, **options), given)

    def calls(self, *rows, **options):
        """Several calls side by side."""
        return [self.end(p) for p in [self.start(*row, **options) for row in rows]]

    def ends(self, answer, code, error=None):
        """Assert how a call ended, with all that the table of exit codes says of such an end."""
        early = error in ("ARG_ERROR", "INVALID_MANIFEST")
        e = answer.on_stdout if early else answer.on_stderr
        fault = e["error"] or {"code": None, "retryable": False}
        self.assertEqual((answer.code, fault["code"], fault["retryable"]), (code, error, False), e)
        if error in ("TIMEOUT", "CANCELLED", "DELEGATED_SIGNAL"):
            self.assertEqual(e["data"], {"partial": True})
            if error != "TIMEOUT":
                self.assertEqual(
                    (fault["context"]["signal"], fault["context"]["signal_name"]),
                    (code - 128, signal.Signals(code - 128).name))
        else:
            tool_ended = error in (None, "DELEGATED_EXIT")
            self.assertEqual(e["data"], {"exit_code": code} if tool_ended else None)
        if early:
            self.assertEqual((answer.err, fault["phase"]), (b"", "validation"))
        return e

    def running(self):
        """The processes that have this test's folder in their environment (on Linux)."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as f:
                if os.fsencode(self.dir) in f.read():
                    found.append(int(pid))
        return found

    def sweep(self):
        for pid in self.running():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def gone(self, pids=()):
        self.assertEqual([pid for pid in pids if state(pid) != "Z"] + self.running(), [])


# ---- envelopes -----------------------------------------------------------------------------------

class EnvelopeTest(Case):
    def test_a_success(self):
        r = self.call("task", "show", "x")
        meta = self.ends(r, 0)["meta"]
        told = {"command": "task.show", "timeout_ms": 300000, "tool_version": "1.4.0"}
        self.assertEqual((r.out, {k: meta.get(k) for k in told}), (b"task x\n", told))
        self.assertNotIn("trace_id", meta)
        again = self.call("task", "show", "x", env={"TOOL_TRACE_ID": "t-1"}).on_stderr["meta"]
        self.assertEqual(again["trace_id"], "t-1")
        self.assertNotEqual(again["request_id"], meta["request_id"])

    def test_nothing_that_a_caller_typed_breaks_the_line(self):
        wild = b"\xff\xc3\xa9\x1b[31m\n"
        self.ends(self.call(wild), 2, "ARG_ERROR")
        self.ends(self.call("--timeout", wild, "sh"), 2, "ARG_ERROR")
        self.assertRegex(self.call("--format=text", wild).err, rb"\Aledger: [^\n\r\x1b]+\n\Z")

    def test_text_mode_tells_a_failure_alone_in_one_plain_line_with_the_numbers(self):
        rows = {("sh", "exit 3"): b"3", ("--timeout=0.3", "sh", "sleep 60"): rb"0\.3 s",
                ("sh", "kill -9 $$"): b"SIGKILL.*9", ("--timeout=soon", "sh"): b"--timeout.*soon",
                ("gone",): b"no-such-program", ("ingst",): b"ingst"}
        for (args, says), r in zip(rows.items(), self.calls(*rows, env={"LEDGER_FORMAT": "text"})):
            with self.subTest(args):
                self.assertRegex(r.err, rb"\A\n?ledger: [^\n]*%s[^\n]*\n\Z" % says)
                self.assertEqual(r.out, b"")

    def test_a_reader_that_left_gets_no_traceback(self):
        r, w = os.pipe()
        os.close(r)
        self.addCleanup(os.close, w)
        answers = self.calls(["--version"], ["--bogus"], ["manifest"], stdout=w)
        answers += self.calls(["--help"], ["--bogus"], ["sh", "exit 3"], stderr=w)
        for answer in answers:
            self.assertNotRegex(answer.err + answer.out, b"Traceback|Exception")
        self.assertEqual(answer.code, 3)


# ---- manifest and registration -------------------------------------------------------------------

FLAG = {"type": "string", "required": False, "description": "x"}
DECLARED = {"arguments": ..., "argv": ...}
HTTP = dict(DECLARED, http={"method": "GET", "path": "/v1/{thing}"})
REFUSED = (  # the fields that make an entry refused, and what the fault names
    ({"flags": {"x": FLAG}}, "flags"), ({"positionals": [dict(FLAG, name="x")]}, "positionals"),
    ({"option_placement": "any"}, "option_placement"), ({"confirm_flag": "yes"}, "confirm_flag"),
    ({"stderr": "child_log"}, "stderr"), ({"stdout": "protocol"}, "stdout"),
    ({"danger_level": "destructive"}, "destructive"), ({"tiemout": 3}, "tiemout.*timeout"),
    ({"argv": ...}, "argv"), ({"argv": []}, "argv"), ({"argv": "tool"}, "argv"),
    ({"argv": [1]}, "argv"), ({"argv": [""]}, "argv"), ({"argv": ["a\0"]}, "argv"),
    ({"help_argv": "x"}, "help_argv"), (dict(DECLARED, help_argv=["x"]), "help_argv"),
    ({"danger_level": ...}, "danger_level"), ({"danger_level": "harmless"}, "danger_level"),
    ({"danger_level": []}, "danger_level"), ({"description": ...}, "description"),
    ({"description": ""}, "description"), ({"timeout": -1}, "timeout"),
    ({"timeout": True}, "timeout"), ({"stdin": "maybe"}, "stdin"), ({"env": {"A": 1}}, "env"),
    ({"env": {"A=B": "x"}}, "env"), ({"required_scopes": "x"}, "required_scopes"),
    ({"arguments": "sideways"}, "arguments"), (DECLARED, "bind"), (HTTP, "thing"),
    (dict(HTTP, flags={"format": FLAG}), "format.*global"), (dict(HTTP, help_argv=[]), "help_argv"),
    (dict(HTTP, flags={"xx": dict(FLAG, short="h")}), '"h"'),
)
EMPTY = b'{"commands": {}, '
NO_MANIFEST = (  # what a file holds, and what the fault says
    (b"", "line 1"), (b'{"name"\n: }', "line 2"), (b"[]", "object"), (b"{}", "commands"),
    (b"\xff{}", "(?i)utf-?8"), ("{}".encode("utf-16"), "(?i)utf-?8"), (b"[" * 100000, "deep"),
    (b'{"name": "a", "name": "a"}', '"name".*twice'), (EMPTY + b'"timeout": NaN}', "NaN"),
    (b'{"commands": {"a": {}, "a": {}}}', '"a".*twice'), (b'{"commands": []}', "commands"),
    (EMPTY + b'"timeot": 1}', "timeot.*timeout"), (EMPTY + b'"timeout": "1"}', "timeout"),
    (EMPTY + b'"name": "Big One"}', "name"), (EMPTY + b'"version": 3}', "version"),
)


class RegistrationTest(Case):
    def test_every_fault_is_refused_in_one_answer_that_names_command_and_rule(self):
        rules = {f"bad-{n}": refused for n, refused in enumerate(REFUSED)}
        for name in "Upper", "under_score", "two..dots", "-dash", "dot.", "caf\u00e9", "a b":
            rules[name] = {}, "lower-case.*kebab-case"
        rules.update({"manifest": ({}, "built-in"), "task": ({}, "group")})
        self.save(**{name: self.entry("true", **fields) for name, (fields, _) in rules.items()})
        e = self.ends(self.call("sh", "echo ran"), 2, "INVALID_MANIFEST")
        faults = e["error"]["context"]["faults"]
        for name, (fields, rule) in rules.items():
            with self.subTest(name, fields=fields):
                self.assertRegex("\n".join(f for f in faults if f'"{name}"' in f), rule)

    def test_a_file_that_is_no_manifest(self):
        rows = [["--manifest", self.write(str(n), content), "sh", "echo ran"]
                for n, (content, _) in enumerate(NO_MANIFEST)]
        for (content, says), r in zip(NO_MANIFEST, self.calls(*rows)):
            with self.subTest(content[:40]):
                faults = self.ends(r, 2, "INVALID_MANIFEST")["error"]["context"]["faults"]
                self.assertRegex(" ".join(faults), says)
        os.mkfifo(self.dir / "fifo")
        with open(os.open(self.dir / "fifo", os.O_RDWR), "wb", buffering=0) as fifo:
            fifo.write((self.dir / "manifest.json").read_bytes())
            for path in ".", "fifo", "missing.json":
                r = self.call("--manifest", path, "sh", "echo ran")
                self.ends(r, 2, "INVALID_MANIFEST")

    def test_a_broken_manifest_stops_everything_but_help_and_version(self):
        self.save(root={"nonsense": 1})
        for r in self.calls(["manifest"], ["--schema", "sh"], ["--output=env.json", "sh", ""], []):
            self.ends(r, 2, "INVALID_MANIFEST")
        self.assertEqual(os.listdir(self.dir), ["manifest.json"])
        for r in self.calls(["--help"], ["--version"]):
            self.assertTrue(r.on_stdout["ok"])

    def test_where_the_manifest_is_looked_for(self):
        run = [shutil.copy(AGENTCLI, self.write("app/agentcli.py", b""))]
        for file in "visited/manifest.json", "visited/manifest.example.json":
            self.save(file, who=self.entry("echo", "visited"))

        def who(*args, env=None):
            env = {"AGENTCLI_MANIFEST": env}
            return self.call(*args, "who", cwd=self.dir / "visited", run=run, env=env)

        missing = self.ends(who(), 2, "INVALID_MANIFEST")["error"]["message"]
        self.assertIn("manifest.json", missing)
        for file, env, *args in (("app/manifest.example.json", None), ("app/manifest.json", ""),
                                 ("by-env.json", "../by-env.json"),
                                 ("by-name.json", "../by-env.json", "--manifest=../by-name.json")):
            self.save(file, who=self.entry("echo", file))
            r = who(*args, env=env)
            self.assertEqual(r.out.decode(), file + "\n")
            warned = [w["code"] for w in r.on_stderr["warnings"]]
            self.assertEqual(warned, ["EXAMPLE_MANIFEST"] * ("example" in file))

    def test_placeholders_stand_in_argv_alone(self):
        names = ["{python}", "{manifest_dir}/x", "-{python}", "{other}", "{", "$HOME", "*"]
        told = [sys.executable, f"{self.dir}/x", "-" + sys.executable, *names[3:]]
        self.save(all=self.entry("{python}", "-ISc", SHOW, *names, help_argv=names[:2]),
                  env=self.entry("sh", "-c", 'echo "$A"', env={"A": "{python}"}))
        for args, seen in (names, told + names), (["-h"], told + names[:2]):
            seen = [os.fsencode(s) for s in seen]
            self.assertEqual(self.call("all", *args).out.decode(), f"{seen}\n")
        self.assertEqual(self.call("env").out, b"{python}\n")

    def test_where_the_program_is_looked_for(self):
        for name in b"bin/tool", b"visited/tool", b"visited/bin/tool":
            self.write(name.decode(), b"#!/bin/sh\necho %s\n" % name, 0o755)
        self.save(slash=self.entry("bin/tool"), bare=self.entry("tool"))
        usual = self.env["PATH"]
        for name, path, found in (("slash", usual, 1), ("bare", f"{usual}:{self.dir}/bin", 1),
                                  ("bare", f":{usual}:.:bin", 0), ("bare", "", 0)):
            r = self.call(name, env={"PATH": path}, cwd=self.dir / "visited")
            self.ends(r, *([0] if found else [4, "TOOL_NOT_FOUND"]))
            self.assertEqual(r.out, b"bin/tool\n" * found)

    def test_the_environment_gains_env_and_one_marker(self):
        self.save(env=self.entry("env", env={"ADDED": "1", "LANG": "C", "EMPTY": ""}))
        given = dict(self.env, KEPT="x\u00e9")
        seen = dict(v.split("=", 1) for v in self.call("env", env=given).out.decode().splitlines())
        self.assertRegex(seen.pop("LEDGER_RUN_ID"), r"\A[\w.-]+\Z")
        seen.pop("LC_CTYPE", None)
        self.assertEqual(seen, dict(given, ADDED="1", LANG="C", EMPTY=""))
        self.assertRegex(self.call("inner", "echo $LEDGER_RUN_ID").out, rb"\A[\w.-]+/[\w.-]+\n\Z")

    def test_stdin_is_inherited_unless_the_command_has_none(self):
        self.save(cat=self.entry("cat"), deaf=self.entry("cat", stdin="none"))
        blob = os.urandom(300000)
        self.assertEqual(self.call("cat", given=blob).out, blob)
        self.assertEqual(self.call("deaf", given=b"bytes").out, b"")


# ---- command line --------------------------------------------------------------------------------

BAD_OPTIONS = (  # what stands before the path, and what the message says
    (["--bogus"], "--bogus"), (["--bogus=1"], "--bogus"), (["-x"], "-x"), (["--json=1"], "--json"),
    (["--form", "json"], "--form"), (["--time=5"], "--time"), (["--js"], "--js"),
    (["--format", "yaml"], "--format.*json.*text.*yaml"), (["--format="], "--format"),
    (["--format=json", "--format", "text"], "--format.*twice"),
    (["--timeout", "1", "--timeout", "2"], "--timeout.*twice"), (["--output", ""], "--output"),
    (["--output=a", "--output=b"], "--output.*twice"), (["--output", "/"], "--output"),
    (["--output", "no/folder/env.json"], "--output.*no/folder"),
    *((["--timeout=" + n], "--timeout") for n in ("", "x", "-1", "+5", "nan", "inf", "1e3", "1_0",
                                                  " 1", "0x1", "\u0663", "1000000001", "1" * 999)),
)


class CommandLineTest(Case):
    def bad(self, *args):
        return self.ends(self.call(*args), 2, "ARG_ERROR")["error"]

    def test_every_token_after_the_path_is_the_tools_byte_for_byte(self):
        tokens = b"-- --help -h --format yaml --json --output env.json --timeout=x --schema -V " \
                 b"--manifest * $HOME '\"\\ \xc3\xa9 \xff\xfe\x80 show --".split(b" ")
        tokens += [b"", b" a  b ", b"line\nbreak"]
        for env in {}, {"LC_ALL": "C", "LANG": None}:
            r = self.call("--json", "show", *tokens, env=env)
            self.ends(r, 0)
            self.assertEqual(r.out.decode(), f"{tokens}\n")
        self.assertEqual(os.listdir(self.dir), ["manifest.json"])

    def test_a_lone_help_becomes_help_argv_or_is_forwarded(self):
        self.save(bare=self.entry("{python}", "-ISc", SHOW))
        rows = {"show --help": b"extract --help", "show -h": b"extract --help",
                "show -h x": b"-h x", "bare": b"", "bare -h": b"-h", "bare --help": b"--help"}
        for seen, r in zip(rows.values(), self.calls(*map(str.split, rows))):
            self.assertEqual(r.out.decode(), f"{seen.split()}\n")

    def test_a_bad_option_starts_nothing(self):
        answers = self.calls(*[[*args, "sh", "echo ran"] for args, _ in BAD_OPTIONS])
        for (args, says), r in zip(BAD_OPTIONS, answers):
            with self.subTest(args):
                self.assertRegex(self.ends(r, 2, "ARG_ERROR")["error"]["message"], says)
        for option in "--format", "--timeout", "--output", "--manifest":
            self.assertIn(option, self.bad(option)["message"])

    def test_an_option_twice_with_the_same_value(self):
        twice = "--format", "json", "--json", "--format=json", "--timeout", "5", "--timeout=5"
        e = self.ends(self.call(*twice, "sh", "exit 3"), 3, "DELEGATED_EXIT")
        self.assertEqual(e["meta"]["timeout_ms"], 5000)

    def test_the_nearest_names_are_suggested(self):
        rows = {"shwo": "show", "task shwo": "task show", "manifset": "manifest",
                "--fromat json sh": "--format", "manifest --etga x": "--etag"}
        for near, r in zip(rows.values(), self.calls(*map(str.split, rows))):
            self.assertIn(near, self.ends(r, 2, "ARG_ERROR")["error"]["suggestion"])
        self.assertIn("task show", self.bad("task")["message"])

    def test_help_is_off_stdout(self):
        for r in self.calls([], ["--help"], ["-h"], ["--json", "--help"], ["--help", "sh", "exit"]):
            self.assertEqual((r.on_stdout["data"], r.on_stdout["meta"]["help"]), (None, True))
            self.assertIn(b"Run a tool", r.err)

    def test_version(self):
        for option in "--version", "-V":
            data = self.call(option).on_stdout["data"]
            self.assertEqual((data["name"], data["version"]), ("ledger", "1.4.0"))
            self.assertRegex(data["agentcli_version"], r"\A\d+\.\d+\.\d+\Z")
            text = f"ledger 1.4.0 (agentcli {data['agentcli_version']})\n"
            self.assertEqual(self.call("--format=text", option).out.decode(), text)

    def test_schema_shows_the_entry_and_runs_nothing(self):
        data = self.call("--schema", "show", "x").on_stdout["data"]
        self.assertEqual(data["arguments"], "passthrough")
        self.assertEqual(data["help_argv"], ["extract", "--help"])

    def test_the_format_is_json_off_a_terminal_and_can_be_set(self):
        for args, value, added in (([], None, b"\n{"), ([], "text", b""), ([], "", b"\n{"),
                                   (["--format=text"], None, b""), (["--json"], "text", b"\n{")):
            r = self.call(*args, "sh", "printf out; printf err >&2", env={"LEDGER_FORMAT": value})
            self.assertEqual((r.out, r.err[:5]), (b"out", b"err" + added))


class OutputTest(Case):
    def kept(self, *args, **options):
        """Run with --output: the answer, and the envelope in the file."""
        r = self.call("--output", "env.json", *args, **options)
        return r, Answer(r.code, (self.dir / "env.json").read_bytes()).on_stdout

    def mode(self, name):
        return stat.filemode((self.dir / name).lstat().st_mode)

    def test_the_file_holds_the_same_envelope(self):
        for args in ["sh", "exit 3"], ["sh", "exit 0"], ["gone"], ["--timeout=.2", "sh", "sleep 9"]:
            with self.subTest(args):
                r, e = self.kept(*args)
                self.assertEqual(e, r.on_stderr)
        r, e = self.kept("manifest")
        self.assertEqual(e, r.on_stdout)
        r, e = self.kept("--format=text", "sh", "exit 0")
        self.assertEqual((e["data"], r.err), ({"exit_code": 0}, b""))
        self.assertEqual(sorted(os.listdir(self.dir)), ["env.json", "manifest.json"])

    def test_link_and_mode_are_kept_and_a_new_file_follows_the_umask(self):
        self.write("real/file", b"old", 0o604)
        os.symlink("real/file", self.dir / "env.json")
        self.kept("sh", "exit 3")
        self.assertEqual((self.mode("env.json")[0], self.mode("real/file")), ("l", "-rw----r--"))
        os.unlink(self.dir / "env.json")
        self.kept("sh", "exit 3", preexec_fn=lambda: os.umask(0o027))
        self.assertEqual(self.mode("env.json"), "-rw-r-----")

    def test_it_is_left_alone_when_nothing_started(self):
        self.write("env.json", b"old")
        rows = ["--bogus", "sh"], ["nope"], ["task"], ["--version"], ["--help"]
        self.calls(*[["--output", "env.json", *row] for row in rows])
        self.assertEqual((self.dir / "env.json").read_bytes(), b"old")

    @unittest.skipIf(os.geteuid() == 0, "root may write anywhere")
    def test_an_unwritable_folder_is_an_argument_error(self):
        os.mkdir(self.dir / "shut", 0o500)
        self.ends(self.call("--output", "shut/env.json", "sh", "echo ran"), 2, "ARG_ERROR")

    def test_a_pipe_is_written_into(self):
        os.mkfifo(self.dir / "fifo")
        reader = os.open(self.dir / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        r = self.call("--output", "fifo", "sh", "exit 3")
        self.assertEqual(Answer(3, os.read(reader, 65536)).on_stdout, r.on_stderr)
        self.assertEqual(self.mode("fifo")[0], "p")

    def test_a_write_that_fails_after_the_run_is_a_warning(self):
        os.mkfifo(self.dir / "fifo")  # which nobody reads
        for output in ["fifo", "lost/env.json"] + ["/dev/full"] * os.path.exists("/dev/full"):
            with self.subTest(output):
                os.mkdir(self.dir / "lost")
                r = self.call("--output", output, "sh", "rmdir lost; exit 3")
                warnings = self.ends(r, 3, "DELEGATED_EXIT")["warnings"]
                self.assertEqual([w["code"] for w in warnings], ["OUTPUT_UNAVAILABLE"])


# ---- passthrough run, off a terminal -------------------------------------------------------------

class RunTest(Case):
    def test_the_exit_code_is_the_tools_or_tells_its_death(self):
        codes = 1, 2, 4, 10, 127, 143, 255
        for n, r in zip(codes, self.calls(*[["sh", f"echo out; exit {n}"] for n in codes])):
            self.ends(r, n, "DELEGATED_EXIT")
            self.assertEqual(r.out, b"out\n")
        for number in signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1:
            self.ends(self.call("sh", f"kill -{number:d} $$"), 128 + number, "DELEGATED_SIGNAL")

    def test_a_tool_that_cannot_be_started(self):
        self.write("plain", b"#!/bin/sh\n")
        self.write("no-shebang", b"echo ran\n", 0o755)
        self.write("no-interpreter", b"#!/no/such/interpreter\n", 0o755)
        os.symlink("nowhere", self.dir / "dangling")
        found = "./", "./plain", "./no-shebang", "./no-interpreter", "echo"
        for program in ("no-such-program", "./missing", "./dangling", *found):
            with self.subTest(program):
                self.save(bad=self.entry(program, "x" * (3000000 if program == "echo" else 1)))
                r = self.call("bad")
                self.ends(r, 4, "TOOL_NOT_EXECUTABLE" if program in found else "TOOL_NOT_FOUND")
                self.assertEqual(r.out, b"")

    @on_linux
    def test_the_tool_has_the_callers_own_descriptors_and_no_others(self):
        p = self.start("py", "import os; print(*[os.fstat(n).st_ino for n in (0, 1, 2)]); "
                       "print(*sorted(os.listdir('/proc/self/fd')))", stdin=subprocess.PIPE)
        given = [str(os.fstat(f.fileno()).st_ino) for f in (p.stdin, p.stdout, p.stderr)]
        own, others = self.end(p).out.decode().splitlines()
        self.assertEqual((own.split(), others), (given, "0 1 2 3"))  # 3 is the list itself

    def test_the_envelope_is_one_write_on_a_fresh_line(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a write, a datagram
        self.addCleanup(ours.close)
        with theirs:
            r = self.call("sh", "printf 'no newline' >&2; exit 3", stderr=theirs)
        ours.setblocking(False)
        writes = [ours.recv(65536), ours.recv(65536)]
        self.assertRaises(BlockingIOError, ours.recv, 1)
        self.assertRegex(writes[1], rb"\A\n\{.*\}\n\Z")
        self.ends(Answer(r.code, err=b"".join(writes)), 3, "DELEGATED_EXIT")

    @on_linux
    def test_signals_are_as_a_program_expects_them(self):
        self.save(grep=self.entry("grep", "^Sig"))  # not sh, which empties its mask
        ignored = signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ
        r = self.call("grep", "/proc/self/status", preexec_fn=held(ignored=ignored))
        self.ends(r, 0)
        masks = {k: int(v, 16) & 0x7fffffff  # libc keeps 32 and 33 for itself
                 for k, v in re.findall(r"Sig(Blk|Ign):\s*(\w+)", r.out.decode())}
        self.assertEqual(masks, {"Blk": 0, "Ign": 1 << signal.SIGHUP - 1})

    @on_linux
    def test_descriptors_that_the_caller_closed(self):
        tool = ("import os; d = '/proc/self/fd/'; "
                "seen = [os.path.lexists(d + n) and os.readlink(d + n) for n in '012']; "
                "open('seen', 'w').write(repr(seen)); os._exit(3)")
        for closed in (0,), (1,), (2,), (0, 1, 2):
            with self.subTest(closed):
                r = self.call("--output", "env.json", "py", tool,
                              preexec_fn=lambda closed=closed: [*map(os.close, closed)])
                envelope = (self.dir / "env.json").read_bytes()
                self.ends(Answer(r.code, err=envelope), 3, "DELEGATED_EXIT")
                for n, seen in enumerate(eval((self.dir / "seen").read_text())):
                    own = "pipe:" if n else "/dev/null"
                    self.assertRegex(str(seen), r"\A(False|/dev/null)\Z" if n in closed else own)

    def test_a_deleted_current_folder(self):
        lost = self.dir / "lost"
        lost.mkdir()
        self.ends(self.call("sh", "exit 3", cwd=lost, preexec_fn=lost.rmdir), 3, "DELEGATED_EXIT")

    def test_python_options_and_poor_environments_change_nothing(self):
        for flags, env in (("-I", {}), ("-S", {}), ("-E", {}), ("-OO", {}), ("-X dev", {}),
                           ("-W error", {"HOME": None}), ("-bb", {"LANG": "C", "LC_ALL": "C"})):
            with self.subTest(flags, env=env):
                r = self.call("show", "\u00e9", run=[*flags.split(), AGENTCLI], env=env)
                self.assertEqual((r.out, self.ends(r, 0)["warnings"]), (b"[b'\\xc3\\xa9']\n", []))
                self.assertEqual(r.err.count(b"\n"), 2, r.err)  # and not a word besides

    def test_modules_that_lie_about_are_not_run_and_python_m_behaves_the_same(self):
        program = shutil.copy(AGENTCLI, self.write("app/agentcli.py", b""))
        for folder in "app", "visited":
            for module in "json", "argparse", "signal", "select", "difflib":
                self.write(f"{folder}/{module}.py", b"raise SystemExit('planted')")
        for cwd, *run in ("visited", program), ("app", "agentcli.py"), ("app", "-m", "agentcli"):
            with self.subTest(run):
                where = {"run": run, "cwd": self.dir / cwd}
                self.ends(self.call("sh", "exit 3", **where), 3, "DELEGATED_EXIT")
                self.ends(self.call("--fromat", "sh", **where), 2, "ARG_ERROR")

    def test_what_a_tool_left_running_when_it_ended_is_left_alone(self):
        for how, code in ("", 0), (shutil.which("setsid") or "", 3):
            r = self.call("sh", f"{how} sleep 300 >/dev/null 2>&1 & echo $!; exit {code}")
            self.assertEqual(r.code, code)
            os.kill(int(r.out), signal.SIGKILL)  # fails when it is gone

    @on_linux
    def test_a_full_stderr_pipe_loses_nothing_and_does_not_make_deaf(self):
        def blocked(tool):
            r, w = os.pipe()
            self.addCleanup(os.close, r)
            os.set_blocking(w, False)
            with contextlib.suppress(BlockingIOError):
                while os.write(w, b"x" * 4096):
                    pass
            os.set_blocking(w, True)
            with open(w, "wb"):
                return r, *self.ready("sh", "echo $$ ready; " + tool, stderr=w)

        r, drained, _ = blocked("exit 3")
        _, early, _ = blocked("sleep 300")  # told to end while the tool runs
        _, late, tool = blocked("exit 3")  # told to end while it writes
        early.terminate()
        until(lambda: not os.path.exists(f"/proc/{tool}"))
        late.terminate()
        with open(r, "rb", closefd=False) as f:
            self.ends(Answer(err=f.read(), code=drained.wait(20)), 3, "DELEGATED_EXIT")
        self.assertEqual((late.wait(20), early.wait(20)), (3, 143))

    @on_linux
    def test_a_tool_that_left_stderr_non_blocking_and_full(self):
        p, tool = self.ready("py", "import os; os.set_blocking(2, False); "
                             "os.write(1, b'%d ready\\n' % os.getpid())\n"
                             "try:\n while os.write(2, b'x' * 4096): pass\n"
                             "except BlockingIOError: os._exit(3)")
        until(lambda: state(tool) == "Z")
        self.ends(self.end(p), 3, "DELEGATED_EXIT")


class TimeoutTest(Case):
    def test_the_limit_is_the_options_else_the_commands_else_the_roots(self):
        self.save(root={"timeout": 7}, short=self.entry("sleep", timeout=0.2))
        for limit, *args in ((7000, "sh", ""), (1250, "--timeout", "1.25", "sh", ""),
                             (0, "--timeout=0", "short", ".5"),
                             (10**12, "--timeout=1000000000", "sh", "")):
            self.assertEqual(self.ends(self.call(*args), 0)["meta"]["timeout_ms"], limit)
        e = self.ends(self.call("short", "60"), 10, "TIMEOUT")
        self.assertEqual(e["meta"]["timeout_ms"], 200)

    def test_a_tool_that_ends_well_on_term_was_timed_out_all_the_same(self):
        tool = "trap 'exit 0' TERM; while :; do sleep 0.1; done"
        self.ends(self.call("--timeout", "0.5", "sh", tool), 10, "TIMEOUT")

    def test_a_tool_that_stopped_itself_is_timed_out(self):
        self.ends(self.call("--timeout", "0.5", "sh", "kill -STOP $$; sleep 60"), 10, "TIMEOUT")
        self.gone()

    def test_a_signal_after_the_time_was_up_changes_nothing(self):
        p, _ = self.ready("--timeout", "1.5", "py", CATCH, "15")
        read_to(p.stdout.fileno(), b"got 15\n")
        p.send_signal(signal.SIGINT)
        self.ends(self.end(p, b"\n"), 10, "TIMEOUT")


class SignalTest(Case):
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

    @on_linux
    def test_nothing_of_the_run_survives_a_timeout_or_a_signal(self):
        calls = [self.ready("sh", TREE) for _ in self.ending]
        calls.append(self.ready("--timeout", "2", "sh", "trap '' TERM; " + TREE))
        for (p, *_), number in zip(calls, self.ending):
            p.send_signal(number)
        for (p, *_), number in zip(calls, self.ending):
            self.ends(self.end(p), 128 + number, "CANCELLED")
        e = self.ends(self.end(calls[-1][0]), 10, "TIMEOUT")
        self.assertEqual(e["warnings"], [])
        self.assertGreaterEqual(e["meta"]["duration_ms"], 7000)  # the limit and the grace
        self.gone([pid for _, *tree in calls for pid in tree])

    def test_the_whole_group_is_told_and_may_tidy_up(self):
        loop = "trap 'echo tidy; exit' TERM; echo ready; while sleep .1; do :; done"
        p, = self.ready("sh", f"({loop}) & wait")
        p.terminate()
        r = self.end(p)
        self.ends(r, 143, "CANCELLED")
        self.assertEqual(r.out, b"tidy\n")

    def test_a_nested_run_ends_with_the_outer_one(self):
        p, = self.ready("inner", "echo ready; sleep 300")
        p.terminate()
        self.ends(self.end(p), 143, "CANCELLED")
        self.gone()

    def test_a_second_signal_kills_at_once(self):
        p, _ = self.ready("py", CATCH, "15")
        p.terminate()
        read_to(p.stdout.fileno(), b"got 15\n")
        began = time.monotonic()
        p.send_signal(signal.SIGINT)
        self.assertEqual(p.wait(20), 143)
        self.assertLess(time.monotonic() - began, 4)
        self.ends(self.end(p), 143, "CANCELLED")
        self.gone()

    def test_signals_that_end_nothing_are_passed_on_once_each(self):
        numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT,
                   signal.SIGTSTP, signal.SIGALRM]
        p, _ = self.ready("py", CATCH, *[f"{n:d}" for n in numbers])
        for number in numbers:
            p.send_signal(number)
            self.assertEqual(read_to(p.stdout.fileno(), b"\n"), b"got %d" % number)
        r = self.end(p, b"\n")
        self.ends(r, 5, "DELEGATED_EXIT")
        self.assertEqual(r.out, b"")

    def test_what_the_caller_ignores_stays_ignored(self):
        p, _ = self.ready("py", CATCH, preexec_fn=held(ignored=[signal.SIGHUP]))
        p.send_signal(signal.SIGHUP)
        self.ends(self.end(p, b"\n"), 5, "DELEGATED_EXIT")

    def test_a_signal_before_the_tool_started(self):
        for number in self.ending:
            r = self.call("sh", "echo ran", preexec_fn=held(pending=[number]))
            e = self.ends(r, 128 + number, "CANCELLED")
            self.assertEqual((r.out, e["error"]["context"]["started"]), (b"", False))

    @on_linux
    def test_a_tool_that_had_ended_when_agentcli_looked_keeps_its_own_result(self):
        p, tool = self.ready("py", CATCH)
        p.send_signal(signal.SIGSTOP)
        until(lambda: state(p.pid) == "T")
        os.write(p.stdin.fileno(), b"\n")
        until(lambda: state(tool) == "Z")
        p.terminate()
        p.send_signal(signal.SIGCONT)
        self.ends(self.end(p), 5, "DELEGATED_EXIT")

    def test_a_storm_of_signals_ends_in_one_envelope_that_is_true(self):
        dice = random.Random(2)
        harmless = signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT
        tools = "exit 3", "sleep .3", "sleep .3 & trap '' TERM INT; sleep .2; wait"
        for _ in range(4):
            calls = [self.start("--timeout=30", "sh", dice.choice(tools), preexec_fn=held())
                     for _ in range(5)]
            storm = sorted((dice.uniform(0, 0.6), dice.randrange(5),
                            dice.choice(self.ending + harmless)) for _ in range(20))
            began = time.monotonic()
            for when, to, number in storm:  # these times are weather: nothing waits for them
                time.sleep(max(0, began + when - time.monotonic()))
                calls[to].send_signal(number)
            for n, p in enumerate(calls):
                r = self.end(p)
                sent = {number for _, to, number in storm if to == n}
                name = (r.on_stderr["error"] or {"code": None})["code"]
                self.ends(r, r.code, name)
                self.assertEqual((r.out, r.err.count(b'"meta"')), (b"", 1))
                true = {(0, None), (3, "DELEGATED_EXIT")}
                true |= {(128 + s, "CANCELLED") for s in sent & set(self.ending)}
                for how in "DELEGATED_SIGNAL", "DELEGATED_EXIT":  # the shell's own or its sleep's
                    true |= {(128 + s, how) for s in sent & set(harmless)}
                self.assertIn((r.code, name), true)
            until(lambda: not self.running())


# ---- passthrough run, on a pseudo-terminal -------------------------------------------------------

class Terminal:
    """A pseudo-terminal whose session leader, SHELL, runs agentcli (within `wrap`) as its job."""

    def __init__(self, case, *args, place="foreground", wrap=(), env=()):
        self.fd, slave = pty.openpty()
        case.addCleanup(os.close, self.fd)
        modes = termios.tcgetattr(slave)
        modes[1] &= ~termios.OPOST  # so that what comes out is all that was written, as it was
        modes[3] = modes[3] & ~termios.ECHO | termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self.door, door = socket.socketpair()
        case.addCleanup(self.door.close)
        with door, open(slave, "wb"):
            case.start(str(door.fileno()), place, *wrap, sys.executable, AGENTCLI, *args, env=env,
                       run=["-ISc", SHELL], stdin=slave, stdout=slave, stderr=slave,
                       pass_fds=[door.fileno()],
                       preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        self.job = int(self.news())

    def news(self):
        return read_to(self.door.fileno(), b"\n")

    def resume(self):
        self.door.send(b"f")

    def ready(self):
        return [int(pid) for pid in read_to(self.fd, b"ready\n").split()]

    def end(self):
        """The job's end: its code, and as stderr what the terminal showed since the last look."""
        text = read_to(self.fd, b"\0")
        return Answer(int(self.news()), err=text)


class TerminalTest(Case):
    def test_the_tool_is_in_agentclis_group(self):
        tool = ("import os; group = os.getpgrp(); "
                "print(group == os.getpgid(os.getppid()), group == os.tcgetpgrp(0))")
        for place, shown in ("foreground", b"True True\n"), ("background", b"True False\n"):
            self.assertEqual(Terminal(self, "py", tool, place=place).end().err, shown)

    def test_text_is_the_default_unless_ci_is_set(self):
        self.assertEqual(Terminal(self, "sh", "exit 0").end().err, b"")
        self.assertRegex(Terminal(self, "sh", "exit 3").end().err, rb"\A\n?ledger: .*3.*\n\Z")
        self.ends(Terminal(self, "sh", "exit 3", env={"CI": "1"}).end(), 3, "DELEGATED_EXIT")

    def test_help_is_on_stdout_unless_an_envelope_is_wanted_there(self):
        for on_stdout, *args in (True, "--help"), (True,), (False, "--json", "--help"):
            r = Terminal(self, *args, wrap=("/bin/sh", "-c", '"$@" 2>help', "sh")).end()
            shown = [b"Run a tool" in text for text in (r.err, (self.dir / "help").read_bytes())]
            self.assertEqual((r.code, shown), (0, [on_stdout, not on_stdout]))
            self.assertTrue(on_stdout or r.on_stderr["meta"]["help"])

    def test_ctrl_c_reaches_the_tool_once_and_the_tool_decides(self):
        t = Terminal(self, "--json", "py", CATCH, "2")
        t.ready()
        for _ in range(2):
            os.write(t.fd, b"\x03")
            self.assertEqual(read_to(t.fd, b"\n"), b"got 2")
        os.write(t.fd, b"\n")
        r = t.end()
        self.ends(r, 5, "DELEGATED_EXIT")
        self.assertEqual(r.err[:2], b"\n{")
        t = Terminal(self, "--json", "py", "import signal, time; signal.signal(2, signal.SIG_DFL); "
                     "print('ready', flush=True); time.sleep(300)")
        t.ready()
        os.write(t.fd, b"\x03")
        self.ends(t.end(), 130, "DELEGATED_SIGNAL")

    @on_linux
    def test_a_signal_sent_to_agentcli_alone_is_passed_on_once(self):
        t = Terminal(self, "--json", "py", CATCH, "2")
        t.ready()
        os.kill(t.job, signal.SIGINT)
        self.assertEqual(read_to(t.fd, b"\n"), b"got 2")
        os.write(t.fd, b"\n")
        r = t.end()
        self.ends(r, 130, "CANCELLED")
        self.assertEqual(r.err[:2], b"\n{")

    @on_linux
    def test_ctrl_z_stops_the_job_and_the_shell_resumes_it(self):
        t = Terminal(self, "--json", "py", CATCH)
        tool, = t.ready()
        os.write(t.fd, b"\x1a")
        self.assertEqual((t.news(), state(t.job), state(tool)), (b"stopped", "T", "T"))
        t.resume()
        os.write(t.fd, b"\n")
        self.ends(t.end(), 5, "DELEGATED_EXIT")

    def test_a_tool_that_stops_itself_stops_the_job(self):
        t = Terminal(self, "--json", "sh", "kill -STOP $$; exit 3")
        self.assertEqual(t.news(), b"stopped")
        t.resume()
        self.ends(t.end(), 3, "DELEGATED_EXIT")

    def test_a_password_is_read_from_the_terminal(self):
        t = Terminal(self, "py", "import getpass; print(getpass.getpass('key? ')[::-1])")
        read_to(t.fd, b"key? ")
        os.write(t.fd, b"tok-123456\n")
        self.assertEqual(t.end().err.strip(), b"654321-kot")

    @on_linux
    def test_a_timeout_ends_the_tool_and_not_the_callers_group(self):
        caller = 'sleep 300 & "$@"; echo "code $?"; kill $! && echo spared'
        t = Terminal(self, "--timeout=2", "sh", TREE, wrap=("/bin/sh", "-c", caller, "sh"))
        tree = t.ready()
        self.assertRegex(t.end().err, rb"ledger: .*\ncode 10\nspared\n\Z")
        self.assertEqual([state(pid) for pid in tree], ["Z"] * 4)


# ---- built-ins -----------------------------------------------------------------------------------

class ManifestTest(Case):
    def test_the_manifest_lists_what_can_be_called(self):
        data = self.call("manifest").on_stdout["data"]
        self.assertTrue(fits(data, {
            "schema_version": r"3\.\d+", "framework_version": ".+", "etag": "sha256:[0-9a-f]{6,64}",
            "flags": dict, "commands": dict,
            "env_vars": [{"name": ".+", "description": ".+"}]}), data)
        self.assertLessEqual({"format", "json", "output", "timeout", "schema", "manifest", "help",
                              "version"}, set(data["flags"]))
        self.assertLessEqual(set(self.commands) | {"manifest"}, set(data["commands"]))
        for path, shown in data["commands"].items():
            mine = self.commands.get(path)
            with self.subTest(path):
                self.assertIs(shown.get("builtin"), None if mine else True)
                self.assertEqual(shown.get("arguments") == "passthrough", bool(mine))
                if mine:
                    self.assertEqual((shown["option_placement"], shown["flags"]), ("strict", {}))
                    self.assertEqual(shown.get("help_argv"), mine.get("help_argv"))
                    self.assertEqual(shown["danger_level"], mine["danger_level"])
                    self.assertLessEqual({"2", "4", "10", "130", "143"}, set(shown["exit_codes"]))
                for row in shown["exit_codes"].values():
                    effects = "none" if row["retryable"] else "none|partial|complete"
                    self.assertTrue(fits(row, {"name": CODE, "description": ".{1,120}",
                                               "retryable": bool, "side_effects": effects}), row)

    def test_a_known_etag_gives_no_data(self):
        etag = self.call("manifest").on_stdout["data"]["etag"]
        for args in ["--etag", etag], ["--json", "--etag=" + etag]:
            e = self.call("manifest", *args).on_stdout
            self.assertEqual((e["data"], e["meta"]["not_modified"]), (None, True))
        self.save(more=self.entry("true"))
        self.assertNotEqual(self.call("manifest", "--etag", etag).on_stdout["data"]["etag"], etag)

    def test_its_own_arguments_are_checked(self):
        for args in ["--bogus"], ["extra"], ["--etag"], ["--manifest=manifest.json"]:
            with self.subTest(args):
                self.ends(self.call("manifest", *args), 2, "ARG_ERROR")


# ---- what a call loads ---------------------------------------------------------------------------

class CostTest(Case):
    def test_importing_agentcli_loads_nothing_heavy(self):
        code = f"import sys; sys.path.insert(0, {FOLDER!r}); import agentcli; print(*sys.modules)"
        loaded = subprocess.check_output([sys.executable, "-BISc", code]).decode().split()
        self.assertIn("agentcli", loaded)
        heavy = ("urllib.request http.client ssl inspect subprocess hashlib argparse threading "
                 "uuid datetime tempfile logging ctypes")
        self.assertEqual(set(loaded) & set(heavy.split()), set())

    def test_a_run_without_a_journal_loads_neither_digests_nor_locks(self):
        r = self.call("sh", "exit 0", run=["-X", "importtime", AGENTCLI])
        loaded = set(re.findall(rb"\| +([\w.]+)\n", r.err))
        self.assertIn(b"json", loaded)
        self.assertEqual(loaded & {b"hashlib", b"fcntl"}, set())


def setUpModule():
    """Undo what nohup, `&` or CI leave behind, so that every agentcli starts as from a shell."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGTSTP:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    unittest.main()
