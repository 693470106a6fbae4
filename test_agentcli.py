#!/usr/bin/env python3
"""What agentcli.py promises, a test a promise: python3 test_agentcli.py [-k NAME]

Every test starts the real program, with real signals and real pseudo-terminals, and looks at what a
caller sees: bytes, exit codes, files, processes.
"""
import contextlib
import fcntl
import http.server
import json
import os
import pathlib
import platform
import pty
import random
import re
import resource
import select
import shutil
import signal
import socket
import ssl
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest
import zipapp

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
        "first_run_at?": str,
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
                self.assertEqual(fault["context"]["signal"], code - 128)
                self.assertIn(signal.Signals(code - 128).name, fault["message"])
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
        wild = b"\xff\xc3\xa9\x1b[31m\n" + "\u202eexe.\u2066".encode()
        self.ends(self.call(wild), 2, "ARG_ERROR")
        self.ends(self.call("--timeout", wild, "sh"), 2, "ARG_ERROR")
        self.assertRegex(self.call("--format=text", wild).err.decode("utf-8", "replace"),
                         r"\Aledger: [^\n\r\x1b\u202e\u2066]+exe[^\n\r\x1b\u202e\u2066]+\n\Z")

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
    ({"option_placement": "any"}, "option_placement"), ({"confirm_flag": "yes"}, 'not.*"confirm_f'),
    ({"stderr": "child_log"}, 'not declare "stderr"'), ({"stdout": "protocol"}, 'declare "stdout"'),
    ({"danger_level": "destructive"}, '"danger_level".*"destruct'),
    ({"tiemout": 3}, "tiemout.*timeout"),
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
    (dict(HTTP, flags={"xx": dict(FLAG, pattern=5)}), "xx.*pattern.*regular"),
    (dict(HTTP, flags={"xx": dict(FLAG, pattern="(")}), "xx.*pattern.*regular"),
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
            for path, says in (".", "directory"), ("fifo", "regular"), ("gone", "gone.*Make one"):
                e = self.ends(self.call("--manifest", path, "sh", "ls"), 2, "INVALID_MANIFEST")
                self.assertRegex(e["error"]["message"], says)

    def test_a_key_that_occurs_twice_is_one_fault_of_its_command_among_others(self):
        flags = '"flags": {"aa": {"type": "string", "type": "array"}, "bb": 1, "bb": 1}'
        tool = '"arguments": "passthrough", '
        bad = {"one": tool + '"argv": ["a"], "argv": "b"', "two": tool + '"env": {"A": 1, "A": 2}',
               "three": flags + ', "http": {"method": "GET", "method": "PUT"}', "four": '"argv": 1'}
        text = ", ".join(f'"{name}": {{{entry}}}' for name, entry in bad.items())
        self.write("manifest.json", (f'{{"commands": {{{text}, "five": {{}}, "five": {{}}}}, '
                                     '"name": "a", "name": "b"}').encode())
        faults = self.ends(self.call("sh"), 2, "INVALID_MANIFEST")["error"]["context"]["faults"]
        for says in ('"one": unknown key "argv" = "given twice"', '"two":.*"env"',
                     '^unknown key "name".*twice', '"three": flag "aa".*"type".*given twice',
                     '"three": flag "bb".*given twice',
                     '"three": "http".*"method".*given twice', '"four":.*"argv"', '"five".*given'):
            self.assertRegex("\n".join(faults), "(?m)" + says)

    def test_a_broken_manifest_stops_everything_but_help_and_version(self):
        self.save(root={"nonsense": 1})
        for r in self.calls(["manifest"], ["--schema", "sh"], ["--output=env.json", "sh", ""], []):
            self.ends(r, 2, "INVALID_MANIFEST")
        self.assertEqual(os.listdir(self.dir), ["manifest.json"])
        for r in self.calls(["--help"], ["journal", "--help"], ["--version"], ["manifest", "-V"]):
            e = r.on_stdout
            helps = "help" in e["meta"]
            self.assertEqual((e["ok"], [w["code"] for w in e["warnings"]]),
                             (True, ["INVALID_MANIFEST"] * helps))

    def test_many_commands_are_checked_in_time_that_grows_with_their_number(self):
        import agentcli
        began = time.monotonic()
        many = {f"a{n}": agentcli.Command(f"a{n}", self.entry("true")) for n in range(20000)}
        self.assertEqual(agentcli.path_faults(many), [])
        self.assertLess(time.monotonic() - began, 10)

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

    @on_linux
    def test_python_is_the_running_one_though_it_does_not_know_its_name(self):
        p = subprocess.run(["nowhere", AGENTCLI, "py", "print(7)"], executable=sys.executable,
                           env=dict(self.env, PATH="/nowhere"), cwd=self.dir, check=False,
                           capture_output=True, stdin=subprocess.DEVNULL)
        self.assertEqual((p.returncode, p.stdout), (0, b"7\n"), p.stderr)

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
        os.symlink(shutil.which("sh"), self.dir / "bin/sh")  # a venv's python looks beside itself
        self.save(link=self.entry("./bin/sh", "-c", 'echo "$0"'))
        self.assertEqual(self.call("link", cwd="/").out.decode(), f"{self.dir}/./bin/sh\n")

    def test_the_environment_gains_env_and_one_marker(self):
        self.save(env=self.entry("env", env={"ADDED": "1", "LANG": "C", "EMPTY": ""}))
        given = dict(self.env, KEPT="x\u00e9")
        seen = dict(v.split("=", 1) for v in self.call("env", env=given).out.decode().splitlines())
        self.assertRegex(seen.pop("LEDGER_RUN_ID"), r"\A[\w.-]+\Z")
        for of_python in "LC_CTYPE", "__CF_USER_TEXT_ENCODING":
            seen.pop(of_python, None)
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

    def test_a_number_is_no_option_and_no_part_of_a_path(self):
        for args in ["-5", "sh", "exit 0"], ["task", "-1e3", "show"], ["--json", "-.5", "sh", ""]:
            self.assertIn("no command", self.bad(*args)["message"])

    def test_the_nearest_names_are_suggested(self):
        rows = {"shwo": "show", "task shwo": "task show", "manifset": "manifest",
                "--ses s sh": "--session", "tsak show": "task", "TASK show": "task",
                "--fromat json sh": "--format", "manifest --etga x": "--etag"}
        for near, r in zip(rows.values(), self.calls(*map(str.split, rows))):
            self.assertIn(near, self.ends(r, 2, "ARG_ERROR")["error"]["suggestion"])
        self.assertIn("task show", self.bad("task")["message"])
        self.assertIn("behind its path", self.bad("--limit=5", "journal")["suggestion"])
        for word, says in ("t", "Did you mean task.show or task.?"), ("", "Call one of"):
            for seed in "1", "2", "3":
                told = self.call(word, env={"PYTHONHASHSEED": seed}).on_stdout["error"]
                self.assertRegex(told["suggestion"], says)

    def test_help_says_what_the_app_is_for_and_how_each_command_is_called(self):
        self.commands["sh"]["examples"] = [
            {"description": "List files", "command": "ledger sh ls"}]
        self.save(root={"description": "Tools of the household", "base_url": "http://127.0.0.1:9"},
                  **TASKS)
        text = self.call("--help", "sh").err.decode()
        self.assertRegex(text, r"\nexamples:\n  ledger sh ls  List files\n")
        self.assertIn("Every token after `sh` is the tool's", text)
        self.assertNotIn("Every token", self.call("task", "add", "--help").err.decode())
        for args, usage, about in (((), "COMMAND PATH", True), (("task", "--help"), "task", False),
                                   (("--help", "sh"), r"sh \[tokens for the tool\]", False),
                                   (("operation", "get", "--help"),
                                    r"operation get \[options\] operation_id", False)):
            text = self.call(*args).err.decode()
            self.assertRegex(text, rf"\Ausage: ledger \[global options\] {usage}\n")
            self.assertEqual("Tools of the household" in text, about, text)
            self.assertRegex(text, r"global options:\n(.*\n)*  --timeout NUMBER +Wall-clock")

    def test_help_is_off_stdout(self):
        for r in self.calls([], ["--help"], ["-h"], ["--json", "--help"], ["--help", "sh", "exit"]):
            self.assertEqual((r.on_stdout["data"], r.on_stdout["meta"]["help"]), (None, True))
            self.assertIn(b"Run a tool", r.err)

    def test_a_path_is_spelled_with_spaces_alone(self):
        for args in ["task.show"], ["task", "show.x"], ["task show"], ["task.", "show"]:
            e = self.ends(self.call(*args), 2, "ARG_ERROR")
            self.assertIn("task show", e["error"]["suggestion"])

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
        self.assertLessEqual({"format", "timeout", "output"}, set(data["global_flags"]))

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

    def test_a_fault_that_is_not_of_the_options_is_in_the_file_too(self):
        self.save(post=POST)
        for args in (["post"], ["post", "me", "--input=gone"], ["journal", "--limit=0"]):
            r = self.call("--output=env.json", *args)
            self.assertEqual((r.code, r.out), (2, (self.dir / "env.json").read_bytes()), args)
            os.unlink(self.dir / "env.json")

    def test_a_folder_is_no_file(self):
        for path in "missing/", "manifest.json/":
            self.ends(self.call("--output", path, "sh", ""), 2, "ARG_ERROR")

    @unittest.skipIf(os.geteuid() == 0, "root may write anywhere")
    def test_an_unwritable_folder_is_an_argument_error(self):
        os.mkdir(self.dir / "shut", 0o500)
        self.ends(self.call("--output", "shut/env.json", "sh", "echo ran"), 2, "ARG_ERROR")

    def test_a_pipe_that_nobody_empties_is_given_up(self):
        os.mkfifo(self.dir / "full")
        with open(os.open(self.dir / "full", os.O_RDWR | os.O_NONBLOCK), "wb", 0) as fifo:
            with contextlib.suppress(BlockingIOError):
                while fifo.write(bytes(4096)):
                    pass
            e = self.ends(self.call("--output=full", "sh", ""), 0)
        self.assertEqual(e["warnings"][0]["code"], "OUTPUT_UNAVAILABLE")

    def test_a_pipe_is_written_into(self):
        os.mkfifo(self.dir / "fifo")
        reader = os.open(self.dir / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        r = self.call("--output", "fifo", "sh", "exit 3")
        self.assertEqual(Answer(3, os.read(reader, 65536)).on_stdout, r.on_stderr)
        self.assertEqual(self.mode("fifo")[0], "p")

    def test_a_file_that_cannot_be_written_whole_stays_as_it_was(self):
        self.write("env.json", b"old")
        r = self.call("--output=env.json", "sh", "", preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (100, 100)) and None)
        self.assertEqual(self.ends(r, 0)["warnings"][0]["code"], "OUTPUT_UNAVAILABLE")
        self.assertEqual((self.dir / "env.json").read_bytes(), b"old")
        self.assertEqual(sorted(os.listdir(self.dir)), ["env.json", "manifest.json"])

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

    @on_linux
    def test_a_process_whose_first_thread_has_ended_does_not_survive(self):
        p, pid = self.ready("py", """import ctypes, os, signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    os.write(1, b"%d ready\\n" % os.getpid())
else:
    os.setsid()
threading.Thread(target=threading.Event().wait).start()
ctypes.CDLL(None).pthread_exit(None)""")
        p.terminate()
        self.ends(self.end(p), 143, "CANCELLED")
        self.gone([pid])

    @on_linux
    def test_the_tool_of_a_nested_run_is_told_once(self):
        self.save(py=self.entry("{python}", "-ISc"), outer=self.entry(
            "{python}", AGENTCLI, "py"))
        p, _ = self.ready("outer", CATCH.replace("sys.stdin.readline()", """
import time; seen = time.monotonic()
while time.monotonic() < seen + 0.5: signal.sigtimedwait([], 0.1)"""), "15")
        p.terminate()
        r = self.end(p)
        self.assertEqual((r.code, r.out), (143, b"got 15\n"))

    @on_linux
    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("unshare"), "needs a namespace")
    def test_the_processes_of_another_namespace_are_not_taken_for_its_own(self):
        run = ["unshare", "-pf", sys.executable, AGENTCLI, "--timeout=.3", "sh", "exec sleep 300"]
        began = time.monotonic()
        p = subprocess.run(run, env=self.env, capture_output=True, cwd=self.dir, check=False)
        if b"unshare: " in p.stderr:
            self.skipTest("no namespaces here")
        e = self.ends(Answer(p.returncode, p.stdout, p.stderr), 10, "TIMEOUT")
        self.assertEqual(e["warnings"], [])
        self.assertLess(time.monotonic() - began, 6)

    @on_linux
    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("unshare"), "needs a namespace")
    def test_where_no_proc_is_mounted_the_process_group_has_to_do(self):
        run = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh",
               sys.executable, AGENTCLI, "--timeout=.3", "sh"]
        for tool, survives in (("exec sleep 300", False),
                               ("(trap '' TERM; exec sleep 300) & exec sleep 300", True)):
            began = time.monotonic()
            p = subprocess.run([*run, tool], env=self.env, capture_output=True, cwd=self.dir,
                               check=False, timeout=40)
            if b"unshare: " in p.stderr or b"mount: " in p.stderr:
                self.skipTest("no namespaces here")
            self.ends(Answer(p.returncode, p.stdout, p.stderr), 10, "TIMEOUT")
            self.assertEqual(time.monotonic() - began > 5, survives)  # the grace, or none
            self.gone()

    @on_linux
    def test_a_tool_is_stopped_though_no_descriptor_is_left(self):
        self.env["LEDGER_STATE_DIR"] = f"{self.dir}/state"
        self.call("--session=s", "--idempotency-key=k", "sh", "exit 0")
        codes = set()
        for most in 6, 7, 8, 9:  # with too few it is not started: 4
            r = self.call("--session=s", f"--idempotency-key=k{most}", "--timeout=.5", "sh",
                          "sleep 300", preexec_fn=lambda n=most: resource.setrlimit(
                              resource.RLIMIT_NOFILE, (n, n)) and None)
            self.assertIn(r.code, (4, 10), r.err)
            self.assertNotIn(b"Traceback", r.err)
            codes.add(r.code)
            self.gone()
        self.assertIn(10, codes)

    @on_linux
    def test_a_signal_that_is_sent_to_it_and_at_once_to_its_group_is_one(self):
        tool = "import signal as s, time; s.signal(15, lambda *_: 0)\nprint('ready', flush=True)" \
               "; s.pause(); time.sleep(0.3); print('tidied')"
        for _ in range(100):  # so that a look at all processes takes longer than two kills do
            p = subprocess.Popen(["sleep", "300"])
            self.addCleanup(p.wait)
            self.addCleanup(p.kill)
        calls, tidied = [self.ready("py", tool)[0] for _ in range(10)], 0
        for p in calls:  # as timeout(1) does it
            os.kill(p.pid, signal.SIGTERM)
            os.killpg(p.pid, signal.SIGTERM)
        for answer in map(self.end, calls):
            self.ends(answer, 143, "CANCELLED")
            tidied += answer.out == b"tidied\n"
        self.assertGreater(tidied, 8)  # a sender may be held up between its two

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
            self.assertIn("before anything was started", e["error"]["message"])

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

    @on_linux
    def test_what_the_terminal_has_told_the_tool_agentcli_does_not_tell_it_again(self):
        tool = """import os, signal, sys
awaited = [signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print(os.getppid(), "ready", flush=True)
while True:
    info = signal.sigwaitinfo(awaited)
    os.write(1, b"%d %s\\n" % (info.si_signo, b"kernel" if info.si_code > 0 else b"process"))
    if info.si_signo == signal.SIGUSR1: sys.exit(5)"""
        for wrap in (), (shutil.which("setsid"), "--ctty", "--wait"):  # then it leads the session
            if wrap and (os.geteuid() or not wrap[0]):
                continue
            t = Terminal(self, "--json", "py", tool, wrap=wrap)
            agentcli, = t.ready()
            os.write(t.fd, b"\x03")
            self.assertEqual(read_to(t.fd, b"\n"), b"2 kernel")
            os.write(t.fd, b"\x1c")
            self.assertEqual(read_to(t.fd, b"\n"), b"3 kernel")
            fcntl.ioctl(t.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 7, 7, 0, 0))
            self.assertEqual(read_to(t.fd, b"\n"), b"28 kernel")
            os.kill(agentcli, signal.SIGUSR1)
            r = t.end()
            self.assertEqual(r.err[:12], b"10 process\n\n")

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

    def test_a_tool_that_stops_where_nobody_can_resume_it_is_timed_out(self):
        pid, fd = pty.fork()  # agentcli leads the session: there is no shell above it
        if not pid:
            os.execve(sys.executable, [sys.executable, AGENTCLI, "--json", "--timeout=1", "sh",
                                       "kill -STOP $$"], self.env)
        self.addCleanup(os.close, fd)
        self.assertIn(b'"TIMEOUT"', read_to(fd, b"}\r\n"))
        self.assertEqual(os.waitpid(pid, 0)[1], 10 << 8)

    def test_a_hang_up_reaches_the_tool_of_a_session_leader(self):
        seen = self.dir / "seen"
        pid, fd = pty.fork()
        if not pid:
            os.execve(sys.executable, [
                sys.executable, AGENTCLI, "--output", f"{self.dir}/env.json", "sh",
                f"trap 'echo HUP >{seen}; exit 3' HUP; echo ready; while :; do sleep 0.05; done"],
                self.env)
        read_to(fd, b"ready\r\n")
        os.close(fd)
        self.assertEqual(os.waitpid(pid, 0)[1], 129 << 8)
        self.assertEqual(json.loads((self.dir / "env.json").read_text())["error"]["code"],
                         "CANCELLED")
        self.assertTrue(seen.exists())

    @on_linux
    def test_keys_reach_a_tool_that_leads_a_group_of_its_own(self):
        tool = ("import os, signal; os.setpgid(0, 0)\n"
                "signal.signal(2, lambda *_: os.write(1, b'got 2\\n'))\n"
                "os.write(1, b'%d ready\\n' % os.getpid())\nwhile True: signal.pause()")
        t = Terminal(self, "--json", "py", tool)
        t.ready()
        os.write(t.fd, b"\x03")
        self.assertEqual(read_to(t.fd, b"\n"), b"got 2")
        os.write(t.fd, b"\x1a")
        self.assertEqual(t.news(), b"stopped")
        t.resume()
        until(lambda: state(t.job) != "T")  # else the key may be the shell's
        os.write(t.fd, b"\x03")
        self.assertEqual(read_to(t.fd, b"\n"), b"got 2")
        os.write(t.fd, b"\x1c")
        self.ends(t.end(), 131, "DELEGATED_SIGNAL")

    @on_linux
    def test_a_body_that_is_typed_is_read_once_the_job_is_in_the_foreground(self):
        self.save(root={"base_url": "http://127.0.0.1:1"}, **TASKS)
        t = Terminal(self, "--json", "task", "add", "--input", "-", place="background")
        until(lambda: state(t.job) == "S")
        os.write(t.fd, b"{}\n\x04")
        self.assertEqual((t.news(), state(t.job)), (b"stopped", "T"))
        t.resume()
        r = t.end()
        self.assertEqual((r.code, b"dependency_unavailable" in r.err), (5, True), r.err)

    @on_linux
    def test_a_tool_that_reads_in_the_background_stops_the_job_though_tstp_is_ignored(self):
        t = Terminal(self, "sh", "read line; echo got $line; exit 3", place="background",
                     wrap=("/bin/sh", "-c", "trap '' TSTP; exec \"$@\"", "sh"))
        self.assertEqual(t.news(), b"stopped")
        t.resume()
        os.write(t.fd, b"x\n")
        self.assertIn(b"got x\n", t.end().err)

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


# ---- the journal and the audit log ---------------------------------------------------------------

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"
LONG = "[ -e done ] || { echo $$ ready; exec sleep 300; }"
UNTIL = "until [ %s ]; do sleep 0.02; done; exit 3"
GARBAGE = (b'{"id": "torn', b"\0\xff{\n" * 50, b"x" * 100000 + b"\n", b'{"a":' * 20000 + b"\n",
           b'[{}]\nnull\n{}\n{"timestamp": 1}\n{"timestamp": "2099-01-01T00:00:00.000Z"}\n'
           b'{"timestamp": "2099-01-01T00:00:00.000Z", "request_id": 1}\n'
           b'{"id": "?", "run": "?", "event": "?", '
           b'"command": "?", "at": 1}\n{"id": "%032d", "run": "?", "event": "finished", '
           b'"command": "?", "at": 1, "end": 1, "exit": 1, "error": "?"}\n' % 0)
POST = {"description": "Write to a service that nobody offers", "danger_level": "mutating",
        "http": {"method": "POST", "path": "/v1/{who}", "input": "optional"},
        "flags": {"aa": FLAG, "bb": FLAG}, "positionals": [dict(FLAG, name="who", required=True)]}
WRITER = """import os, sys; sys.path.insert(0, sys.argv[1]); import agentcli
app = agentcli.load(sys.argv[2])
for n in range(97, 117):
    os.environ["TOOL_TRACE_ID"] = sys.argv[3] + chr(n)
    app.run(["task", "show"])"""


class StoreCase(Case):
    """In a session; `add` leaves a line in a file of its folder and runs its token in a shell."""
    builtin, settings = "journal", {"LEDGER_SESSION_ID": "s"}
    disk_of = staticmethod(lambda n: lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)))

    def setUp(self):
        super().setUp()
        self.save(add=self.entry("sh", "-c", 'echo >>ran; eval "$1"', "sh"), post=POST)
        self.env.update(self.settings, LEDGER_BASE_URL="http://127.0.0.1:1")
        self.ran, self.state = self.dir / "ran", self.dir / "home/.local/state/ledger"
        self.log, self.journal = self.state / "audit.jsonl", self.state / "journal"

    def told(self, *answers):
        """What became of calls: "ran", "replayed", or the code of what kept them from running."""
        for r in answers:
            e, hit = r.on_stderr, b'"idempotency_hit": true' in r.err
            self.assertTrue(not hit or (r.out, e["data"]["effect"]) == (b"", "noop"), e)
            self.assertEqual((e["data"] or {}).get("exit_code", r.code), r.code)
            yield "replayed" if hit else "ran" if e["data"] else e["error"]["code"]

    def does(self, wanted, *args, warned="", **options):
        """Call the same again and again, and check what becomes of each and what it warns of."""
        answers = [self.call(*args, **options) for _ in wanted.split()]
        codes = " ".join(w["code"] for r in answers for w in r.on_stderr["warnings"])
        self.assertEqual((" ".join(self.told(*answers)), codes), (wanted, warned))

    def refused(self, code, error, *rows, **options):
        for row, r in zip(rows, self.calls(*rows, **options)):
            with self.subTest(row):
                self.assertEqual((r.code, (r.on_stdout["error"] or {}).get("code")), (code, error))
        self.assertFalse(self.ran.exists())

    def entries(self, *args, field=None):
        r = self.call(self.builtin, *args, env={"LEDGER_SESSION_ID": None})
        return [e.get(field) if field else e for e in r.on_stdout["data"]["entries"]]

    def hold(self, *args, lose=False):
        """Start a call whose tool lives long, and perhaps kill it alone; it and the tool's pid."""
        p, pid = self.ready(*args)
        until(lambda: pid in self.entries(field="pid"))
        if lose:
            p.kill()
            p.wait()
            os.kill(pid, signal.SIGKILL)
        return p, pid


class StoreTest(unittest.TestCase):
    def read(self, lines, **options):
        """The numbers of the records that are found in a file of these lines."""
        from agentcli import records_backwards
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(b"".join(lines))
            found = list(records_backwards(file.fileno(), **options))
            for offset, record in found:
                self.assertEqual(os.pread(file.fileno(), 10, offset), b'{"n": %d' % record["n"])
        return [record["n"] for _, record in found]

    def test_every_record_of_a_large_file_is_found_from_its_end_whatever_the_lengths(self):
        piece, chance = 1 << 18, random.Random(7)
        for sizes in ([piece] * 3, [piece - 1, 30, piece - 29], [3 * piece], [50] * 30000,
                      *([chance.choice((30, 99, piece // 2, piece, 2 * piece)) + chance.randrange(9)
                         for _ in range(30)] for _ in range(9))):
            numbers = [1000 + n % 1000 for n in range(len(sizes))]
            lines = [b'{"n": %d, "x": "%s"}\n' % (n, b"x" * (size - 21))
                     for n, size in zip(numbers, sizes)]
            self.assertEqual([len(line) for line in lines], sizes)
            numbers.reverse()
            self.assertEqual(self.read(lines), numbers)
            self.assertEqual(self.read(lines, needle=b'"n": 1000'),
                             [n for n in numbers if n == 1000])
            self.assertEqual(self.read(lines, end=sum(sizes[:-1])), numbers[1:])
            self.assertEqual(self.read([*lines, b'{"n": 1005, "to']), numbers)

    def test_a_line_that_no_writer_left_hides_none_beside_it(self):
        one, two = b'{"n": 1001}\n', b'{"n": 1002}\n'
        for long in b"x" * (2 << 20), b"{" * (3 << 20), b"\n" * (1 << 20), b"\0" * (1 << 19):
            self.assertEqual(self.read([one, long, b"\n", two]), [1002, 1001])


class JournalTest(StoreCase):
    def test_a_repeat_is_not_run_again_ends_as_the_first_run_did_and_says_when_that_was(self):
        for args in (["add", "echo out"], ["add", "echo out; exit 3"], ["add", "kill -9 $$"],
                     ["--timeout=1", "add", "exec sleep 60"], ["add", "kill $PPID; sleep 60"]):
            first, second = self.call(*args), self.call(*args)
            self.assertEqual([*self.told(first, second)], ["ran", "replayed"], args)
            a, b = first.on_stderr, second.on_stderr
            self.assertEqual((second.code, b["data"]), (first.code, dict(a["data"], effect="noop")))
            self.assertEqual(*(e["error"] and dict(e["error"], suggestion="") for e in (a, b)))
            text = self.call("--format=text", *args).err.decode()
            self.assertRegex(text, rf"\Aledger: [^\n]*{TIME}[^\n]*--rerun[^\n]*\n\Z")
        self.assertEqual((a["error"]["code"], self.ran.read_bytes()), ("CANCELLED", b"\n" * 5))

    def test_what_makes_a_call_another_one_and_that_none_waits_for_another(self):
        self.save(add2=self.commands["add"])
        wait = UNTIL % "$(wc -l <ran) -ge 7"
        rows = [("add", wait, *more) for more in ((), ("",), ("a b",), ("a", "b"), (b"\xff",))]
        rows += ("add2", wait), ("--session=t", "add", wait)
        answers = self.calls(*(("--timeout=20", *row) for row in rows))
        self.assertEqual([r.code for r in answers], [3] * 7)
        for option in "--timeout=9", "--output=env.json", "--manifest=manifest.json", "--session=s":
            self.does("replayed", option, "add", wait)
        for folder in self.dir, self.state:
            self.does("ran replayed", "add", "", cwd=folder)
        self.save(add=dict(self.commands["add"], env={"TARGET": "B"}))
        self.does("ran replayed", "add", "")

    def test_a_call_is_the_same_however_its_folder_is_spelled_and_the_locale_reads_it(self):
        folder = self.dir / "caf\u00e9"
        folder.mkdir()
        os.symlink(folder, self.dir / "link")
        self.commands = {"add": self.entry("./tool")}
        self.save(folder / "manifest.json")
        shutil.copy(self.write("tool", b"#!/bin/sh\n", 0o755), folder)
        rows = [{"AGENTCLI_MANIFEST": manifest, "LC_ALL": locale, "PYTHONUTF8": "0"}
                for manifest in (f"{folder}/manifest.json", f"{self.dir}/link/manifest.json",
                                 "manifest.json") for locale in ("C.UTF-8", "C")]
        for wanted, env in zip(["ran"] + ["replayed"] * 5, rows):
            for session in "s", "caf\u00e9":
                self.does(wanted, "--session", session.encode(), "add", cwd=folder, env=env)

    def test_a_safe_command_or_one_without_session_and_key_always_runs_and_leaves_no_file(self):
        self.does("ran ran", "add", "", env={"LEDGER_SESSION_ID": ""})
        self.does("ran ran", "task", "show")
        self.assertEqual(sorted(os.listdir(self.dir)), ["manifest.json", "ran"])

    def test_a_session_id_is_any_text_of_at_most_255_characters(self):
        ids = "a/b", "../../x", "..", ".", "/", "x" * 255, "\u00e9\u2603" * 100, b"\xff", " "
        for wanted in "ran", "replayed":
            answers = self.calls(*(["--session", one, "add", ""] for one in ids))
            self.assertEqual([*self.told(*answers)], [wanted] * len(ids))
        self.assertEqual(sorted(os.listdir(self.dir)), ["home", "manifest.json", "ran"])

    def test_a_key_alone_names_the_call_in_every_session_for_24_hours(self):
        for wanted, age, session, *args in (
                ("ran", 0, "s", "add", ""), ("replayed", 0, "", "add", ""),
                ("IDEMPOTENCY_CONFLICT", 0, "", "add", "exit 3"),
                ("ran", 0, "", "--rerun", "add", "exit 3"), ("replayed", 0, "t", "add", "exit 3"),
                ("replayed", 86000, "s", "add", "exit 3"), ("ran", 87000, "", "add", "exit 3")):
            at = time.time() - age
            for file in [f for f in self.journal.glob("day-*.jsonl") if f.stat().st_size]:
                file.write_bytes(re.sub(rb'"at": ?[0-9.]+', b'"at":%d.5' % at, file.read_bytes()))
                file.rename(file.parent / time.strftime("day-%Y-%m-%d.jsonl", time.gmtime(at)))
            self.does(wanted, "--idempotency-key", "!~" + "x" * 253, *args,
                      env={"LEDGER_SESSION_ID": session})
        self.does("replayed", "add", "")  # it was a call of its session too

    def test_a_key_that_names_another_call_is_told_while_that_one_runs(self):
        p, _ = self.hold("--idempotency-key=k", "add", LONG)
        self.does("IDEMPOTENCY_CONFLICT", "--idempotency-key=k", "add", "")
        self.write("done", b"")
        p.kill()

    def test_a_key_that_is_looked_for_in_other_days_writes_no_record_there(self):
        self.call("--idempotency-key=k", "add", "")
        for ago in 86400, -86400:  # yesterday's and, as the clock was set back, tomorrow's
            self.write(self.journal / time.strftime(
                "day-%Y-%m-%d.jsonl", time.gmtime(time.time() - ago)), b"")
        p, pid = self.hold("--idempotency-key=other", "add", LONG)
        self.does("IN_PROGRESS", "--timeout=.3", "--idempotency-key=other", "add", LONG)
        p.kill()
        os.kill(pid, signal.SIGKILL)
        p.wait()
        self.write("done", b"")
        self.does("ran", "--rerun", "--idempotency-key=other", "add", LONG)
        self.does("replayed replayed", "add", LONG)
        sizes = [f.stat().st_size for f in sorted(self.journal.glob("day-*"))]
        self.assertEqual([bool(size) for size in sizes], [False, True, False])

    def test_records_are_found_however_their_json_is_spaced(self):
        self.does("ran", "add", "exit 3")
        for file in self.journal.glob("*.jsonl"):
            lines = [json.loads(line) for line in file.read_bytes().splitlines()]
            file.write_bytes(b"".join(json.dumps(dict(sorted(line.items())), indent=None).encode()
                                      + b"\n" for line in lines))
        self.does("replayed", "add", "exit 3")

    def test_help_that_is_declared_is_shown_again_and_again(self):
        self.does("ran ran", "show", "--help")
        self.does("ran ran", "show", "-h")
        self.does("ran replayed", "sh", "-h")

    def test_a_redirected_file_belongs_to_the_call(self):
        def cat(skip=0, grow=b"", mtime=5):
            with open(self.dir / "in", "ab+", buffering=0) as f:
                f.write(grow)
                os.utime(f.fileno(), (mtime, mtime))
                f.seek(skip)
                return self.call("add", "cat", stdin=f).out
        seen = [cat(grow=b"12345"), cat(), cat(3), cat(3), cat(mtime=6), cat(grow=b"6", mtime=6)]
        self.assertEqual(seen, [b"12345", b"", b"45", b"", b"12345", b"123456"])

    def test_what_waits_in_a_pipe_is_not_lost_and_an_idle_pipe_holds_nothing_up(self):
        self.save(deaf=dict(self.commands["add"], stdin="none"))
        for name, data, wanted in (("add", b"a", "ran"), ("add", b"", "replayed"), (
                "add", b"b", "ran"), ("deaf", b"a", "ran"), ("deaf", b"a", "replayed")):
            r, w = os.pipe()
            os.write(w, data)
            os.close(w)
            with open(r) as pipe:
                answer = self.call(name, "cat", stdin=pipe)
            warnings = [w["code"] for w in answer.on_stderr["warnings"]]
            self.assertEqual((*self.told(answer), answer.out, warnings), (
                wanted, data * (name == "add"), ["STDIN_NOT_DEDUPLICATED"] * (data == b"b")))
        p = self.start("add", "cat", stdin=subprocess.PIPE)
        p.wait(20)  # while our end is open
        self.assertEqual([*self.told(self.end(p))], ["replayed"])

    def test_nor_is_what_waits_in_a_pipe_that_an_argument_names(self):
        numbers = set()
        for data, wanted in (b"a", "ran"), (b"", "replayed"), (b"b", "ran"):
            r, w = os.pipe()  # as a shell makes it of <(printf a)
            os.write(w, data)
            os.close(w)
            with open(r) as pipe:
                answer = self.call("add", "cat $3", f"--file=/dev/fd/{r}", f"/dev/fd/{r}",
                                   pass_fds=[r])
                numbers.add(pipe.fileno())
            self.assertEqual((*self.told(answer), answer.out), (wanted, data))
        self.assertEqual(len(numbers), 1)
        file = str(self.write("in", b"12"))
        for skip, wanted in (0, "ran"), (0, "replayed"), (1, "ran"):
            with open(file, "rb", 0) as f:
                os.dup2(f.fileno(), 57)
            os.lseek(57, skip, os.SEEK_SET)
            answer = self.call("add", "cat <&57", "/dev/fd/57", "/dev/fd/58", pass_fds=[57])
            os.close(57)
            self.assertEqual([*self.told(answer)], [wanted])
        for data, wanted in (b"", "ran"), (b"more", "replayed"):  # what is written is no input
            path = self.write("out", data)
            with open(path, "wb") as out, open(path, "ab") as log:
                os.dup2(log.fileno(), 57)
                answer = self.call("add", "true", "/dev/fd/57", "/dev/fd/1", stdout=out,
                                   pass_fds=[57])
                os.close(57)
            self.assertEqual([*self.told(answer)], [wanted])

    def test_of_thirty_identical_calls_at_once_one_runs_and_the_others_replay_it(self):
        calls = [self.start("add", UNTIL % "-e go") for _ in range(30)]
        until(self.ran.exists)
        self.write("go", b"")
        answers = [self.end(p) for p in calls]
        self.assertEqual(sorted(self.told(*answers)), ["ran"] + ["replayed"] * 29)
        self.assertEqual(self.ran.read_bytes(), b"\n")

    @on_linux
    def test_a_waiter_heeds_its_time_limit_signals_and_the_end_of_a_holder_that_is_killed(self):
        holder, pid = self.hold("add", LONG)
        r = self.call("--timeout=0.3", "add", LONG)
        self.assertEqual((r.code, *self.told(r), r.on_stderr["error"]["retryable"]),
                         (6, "IN_PROGRESS", True))
        one, two = self.start("add", LONG), self.start("add", LONG)
        for fds in [pathlib.Path(f"/proc/{p.pid}/fd") for p in (one, two)]:
            until(lambda at=fds: any(  # it has opened the journal, so it waits
                "/journal/" in os.path.realpath(fd) for fd in at.iterdir()))
        one.terminate()
        error = self.ends(self.end(one), 143, "CANCELLED")["error"]
        self.assertIs(error["context"]["started"], False)
        holder.kill()
        error = self.ends(self.end(two), 3, "OUTCOME_UNKNOWN")["error"]
        self.assertRegex(error["message"] + error["suggestion"],
                         rf"{TIME}.*\b{pid}\D.*still run.*--rerun")
        os.kill(pid, signal.SIGKILL)  # the tool has lived all the while
        self.write("done", b"")
        self.does("ran", "--rerun", "add", LONG)
        self.does("replayed", "add", LONG)
        self.assertEqual(self.ran.read_bytes(), b"\n\n")

    def test_a_run_that_never_started_leaves_nothing_behind(self):
        self.save(tool=self.entry("./tool"))
        good, bad, term = b"#!/bin/sh\necho >>ran\n", b"#!/no/such\n", held([signal.SIGTERM])
        for tool, args, prepare, code in (
                (bad, [], None, 4), (good, [], term, 143), (good, [], None, 0),
                (bad, ["--rerun"], None, 4), (good, ["--rerun"], term, 143)):
            self.write("tool", tool, 0o755)
            self.assertEqual(self.call(*args, "tool", preexec_fn=prepare).code, code)
        self.does("replayed", "tool")
        self.assertEqual(len(self.entries()), 1)

    def test_an_end_that_was_torn_off_or_did_not_fit_on_the_disk_is_unknown(self):
        self.does("ran", "add", "exit 3")
        file, = self.journal.glob("*.jsonl")
        enough = file.read_bytes().index(b"\n") + 15  # for how it started
        os.truncate(file, file.stat().st_size - 9)
        error = self.ends(self.call("add", "exit 3"), 3, "OUTCOME_UNKNOWN")["error"]
        self.assertRegex(error["message"], f"pid {error['context']['pid']}, may still run")
        self.does("ran", "--rerun", "add", "exit 3")
        self.does("replayed", "add", "exit 3", preexec_fn=self.disk_of(0))
        new = "--session=t", "add", "exit 3"
        self.does("ran", *new, preexec_fn=self.disk_of(enough), warned="STATE_UNAVAILABLE")
        self.does("OUTCOME_UNKNOWN", *new)
        self.does("ran", "--rerun", *new, preexec_fn=self.disk_of(9), warned="STATE_UNAVAILABLE")
        self.does("STATE_UNAVAILABLE", "--session=u", *new[1:], preexec_fn=self.disk_of(20))
        self.does("ran replayed", "--session=u", *new[1:])  # behind a torn first line

    def test_without_a_journal_nothing_runs_but_a_rerun(self):
        self.write("shut/file", b"").parent.chmod(0o500)
        places = f"{self.dir}/manifest.json", "relative", f"{self.dir}/shut/x"
        for place in places[:None if os.geteuid() else 2]:  # root may write anywhere
            with self.subTest(place):
                self.does("STATE_UNAVAILABLE", "sh", "", env={"LEDGER_STATE_DIR": place})
                self.does("ran", "--rerun", "sh", "", env={"LEDGER_STATE_DIR": place},
                          warned="STATE_UNAVAILABLE")
        self.assertFalse((self.dir / "relative").exists())

    @unittest.skipUnless(os.geteuid() == 0 and os.path.exists("/proc"), "mounts a file system")
    def test_on_a_read_only_disk_nothing_runs_and_the_past_can_still_be_read(self):
        disk = self.write("home/disk", b"").parent
        if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk]):
            self.skipTest("nothing can be mounted here")
        self.addCleanup(subprocess.call, ["umount", "-l", disk])
        self.env["LEDGER_AUDIT_LOG"] = "1"
        self.does("ran", "add", "exit 3")
        subprocess.check_call(["mount", "-o", "remount,ro", disk])
        self.does("STATE_UNAVAILABLE", "add", "", warned="AUDIT_LOG_UNAVAILABLE")
        self.does("ran", "add", "", env={"LEDGER_SESSION_ID": ""}, warned="AUDIT_LOG_UNAVAILABLE")
        for self.builtin in "audit-log", "journal":
            self.assertEqual(self.entries(field="exit_code"), [3])

    def test_damaged_lines_are_skipped_and_the_files_stay_usable(self):
        self.env["LEDGER_AUDIT_LOG"] = "1"
        for n, bad in enumerate(GARBAGE):
            self.does("ran", "add", f": {n}")
            for file in [self.log, *self.journal.glob("*.jsonl")]:
                file.write_bytes(file.read_bytes() + bad)
            answers = self.calls(*(["add", f": {m}"] for m in range(n + 1)))
            self.assertEqual({*self.told(*answers)}, {"replayed"}, bad)
        for self.builtin, count in ("audit-log", 20), ("journal", 5):
            self.assertEqual(self.entries(field="command"), ["add"] * count)

    def test_the_tools_of_two_repositories_are_two_calls_though_they_are_called_alike(self):
        for folder, code in ("a", 0), ("b", 3):
            self.write(f"{folder}/tool", b"#!/bin/sh\necho >>ran; exit %d\n" % code, 0o755)
            self.commands = {"go": self.entry("./tool"), "bare": self.entry("tool")}
            self.save(f"{folder}/m.json")
        for command in "go", "bare":
            for code in (0, 3) * 2:
                folder = "ab"[code > 0]
                r = self.call("--manifest", f"{folder}/m.json", command,
                              env={"PATH": f"{self.dir}/{folder}:{self.env['PATH']}"})
                self.assertEqual(r.code, code)
        self.assertEqual(self.ran.read_bytes(), b"\n" * 4)

    def test_a_key_is_found_when_the_clock_was_set_back_over_midnight(self):
        self.does("ran", "--idempotency-key=k", "add", "")
        today, = self.journal.glob("day-*.jsonl")
        for ago in -86400, 86400:
            other = today.with_name(time.strftime("day-%Y-%m-%d.jsonl",
                                                  time.gmtime(time.time() - ago)))
            today.rename(other)
            self.does("replayed", "--idempotency-key=k", "--session=t", "add", "")
            other.rename(today)

    @on_linux
    def test_a_run_that_waited_began_when_it_no_longer_did(self):
        self.save(add=self.entry("sh", "-c", LONG))
        holder, _ = self.hold("add")
        p = self.start("--rerun", "add", env=self.settings)
        fds = pathlib.Path(f"/proc/{p.pid}/fd")
        until(lambda: any(
            "/journal/" in os.path.realpath(fd) for fd in fds.iterdir()))
        self.write("done", b"")
        holder.terminate()
        self.end(holder)
        self.end(p)
        first, second = self.entries()
        self.assertGreaterEqual(second["started_at"], first["ended_at"])

    def test_what_is_in_the_state_folder_by_mistake_stops_nothing(self):
        self.does("ran", "add", "exit 3")
        (self.journal / "x.jsonl").mkdir()
        file, = self.journal.glob("[!dx]*.jsonl")
        run = json.loads(file.read_text().splitlines()[1])
        for wrong in {"pid": "x"}, {"pid": [1]}, {"event": "running", "end": "x", "error": [1]}:
            with file.open("a") as f:
                f.write(json.dumps(dict(run, run="r", **wrong), separators=(",", ":")) + "\n")
            self.assertEqual(self.call("add", "exit 3").code, 3)
            self.assertTrue(self.entries())

    def test_garbage_that_looks_like_an_end_is_not_replayed(self):
        self.does("ran", "add", "exit 3")
        file, = self.journal.glob("*.jsonl")
        record = json.loads(file.read_text().splitlines()[-1])
        for wrong in {"error": {"code": "x y"}}, {"error": {"code": "X"}}, {"exit": 256}:
            with file.open("a") as f:
                f.write(json.dumps(dict(record, run="r", **wrong), separators=(",", ":")) + "\n")
            self.does("replayed", "add", "exit 3")

    def test_where_the_state_lies_that_only_its_owner_may_look_and_what_is_not_there(self):
        self.env.update(LEDGER_AUDIT_LOG="1", LEDGER_TOKEN_FILE=f"{self.dir}/token")
        self.write("token", b"tok-123456", 0o600)
        for place, umask, env in (("home/.local/state/ledger", 0, {}),
                                  ("xdg/ledger", 0, {"XDG_STATE_HOME": f"{self.dir}/xdg"}),
                                  ("a/b/c", 0o777, {"LEDGER_STATE_DIR": f"{self.dir}/a/b/c"})):
            for args in (["sh", "exit 3", "tok-123456"], ["--timeout=x", "sh", "tok-123456"],
                         ["--idempotency-key=k", "sh", "kill -9 $$", "tok-123456"],
                         ["post", "me", "--input=token"]):
                self.call(*args, env=env, preexec_fn=lambda mask=umask: os.umask(mask))
            paths = [*self.dir.glob(place.split("/")[0] + "/**/*")]
            self.assertEqual({(p.is_dir(), p.stat().st_mode & 0o777) for p in paths},
                             {(True, 0o700), (False, 0o600)})
            self.assertEqual((self.dir / place / "audit.jsonl").read_bytes().count(b"\n"), 4)
            self.assertNotIn(b"tok-123456", b"".join(p.read_bytes() for p in paths if p.is_file()))

    def test_files_that_were_unused_for_30_days_go(self):
        self.does("ran", "add", "")
        self.does("ran", "--session=t", "add", "")
        for days, after in (29, "replayed"), (31, "ran"):
            for file in self.journal.glob("*.jsonl"):
                os.utime(file, (time.time() - days * 86400,) * 2)
            self.does("replayed", "add", "")  # which is a use
            self.does("ran", f"--session=new{days}", "add", "")
            self.does("replayed", "add", "")
            self.does(after, "--session=t", "add", "")
        unused = self.write(self.journal / "unused.jsonl", b"")
        for file in unused, self.journal / "locks":  # where no file is new, a look a day
            os.utime(file, (time.time() - 40 * 86400,) * 2)
        self.does("replayed", "add", "")
        self.assertFalse(unused.exists())

    @on_linux
    def test_ctrl_z_stops_a_call_that_waits(self):
        holder, _ = self.hold("add", LONG)
        t = Terminal(self, "--json", "--timeout=9", "add", LONG, env=self.settings)
        fds = pathlib.Path(f"/proc/{t.job}/fd")
        until(lambda: any("/journal/" in os.path.realpath(fd) for fd in fds.iterdir()))
        os.write(t.fd, b"\x1a")
        self.assertEqual((t.news(), state(t.job)), (b"stopped", "T"))
        t.resume()
        holder.terminate()
        self.assertTrue(t.end().on_stderr["meta"]["idempotency_hit"])


    def test_digests_do_not_depend_on_the_version_of_python(self):
        import agentcli
        self.assertEqual(agentcli.digest("\U0001fae8", b"x", 1, None),
                         "8b6204298d449e8fadf61ad544a83f0b")


class JournalCommandTest(StoreCase):
    def test_it_says_when_there_is_more(self):
        self.calls(*(["add", str(n)] for n in range(3)))
        page = self.call("journal", "--limit=2").on_stdout["meta"]["pagination"]
        self.assertEqual((page["total"], page["returned"], page["truncated"]), (3, 2, True))

    def test_it_tells_what_was_started_and_how_it_ended(self):
        self.assertEqual(self.entries(), [])
        self.does("ran replayed", "add", "exit 3")
        self.does("ran", "task", "show")
        pids = [self.hold("add", LONG, lose=True)[1], self.hold("--session=t", "add", LONG)[1]]
        self.call("post", "me", env={"LEDGER_SESSION_ID": ""})  # always journalled
        first, lost, runs, post = entries = self.entries()
        self.assertEqual([[e["command"], e["state"], e.get("exit_code")] for e in entries], [
            ["add", "finished", 3], ["add", "unknown", None], ["add", "running", None],
            ["post", "finished", 5]])
        self.assertEqual((first["error_code"], lost["pid"], runs["pid"]), ("DELEGATED_EXIT", *pids))
        self.assertTrue(fits([post["operation_id"], lost["started_at"]], [("op_.{36}", TIME)]))
        self.assertEqual(self.entries("--limit=2"), [runs, post])
        self.assertEqual(self.entries("--limit=1", "--session=s"), [lost])

    def test_a_killed_run_is_not_running_because_another_holds_its_place(self):
        _, lost = self.hold("add", LONG, lose=True)
        self.ready("--rerun", "--idempotency-key=k", "add", LONG)
        until(lambda: len(self.entries(field="pid")) == 2)
        states = {e["pid"]: e["state"] for e in self.entries()}
        self.assertEqual(states.pop(lost), "unknown")
        self.assertEqual([*states.values()], ["running"])

    def test_what_is_unresolved_stays_so_until_its_own_session_runs_it_again(self):
        pids = [self.hold("--session", one, "add", LONG, lose=True)[1] for one in "st"]
        self.write("done", b"")
        self.assertEqual(self.entries("--unresolved", field="pid"), pids)
        self.does("ran", "--rerun", "add", LONG)
        self.assertEqual(self.entries(field="state"), ["unknown", "unknown", "finished"])
        self.assertEqual(self.entries("--unresolved", field="pid"), pids[1:])


class AuditLogTest(StoreCase):
    builtin, settings = "audit-log", {"LEDGER_AUDIT_LOG": "1"}

    def leave(self, *traces):
        for trace in traces:
            self.call("task", "show", env={"TOOL_TRACE_ID": trace})

    def page(self, *args):
        e = self.call("audit-log", *args).on_stdout
        page, found = e["meta"]["pagination"], "".join(x["trace_id"] for x in e["data"]["entries"])
        more = page["next_cursor"] is not None
        self.assertEqual(page, dict(page, returned=len(found), has_more=more, truncated=more))
        return found, page["next_cursor"]

    def test_it_is_off_unless_the_manifest_or_before_it_the_variable_turns_it_on(self):
        log, mine, other = map(str, (self.log, self.dir / "a/mine", self.dir / "b/other"))
        for declared, variable, path in (
                (False, None, None), (True, None, log), (mine, None, mine), (mine, other, other),
                ({"path": mine, "max_files": 1}, None, mine), ({"max_bytes": 9}, None, log),
                (False, "1", log), (mine, "1", mine), (True, "0", None)):
            self.save(root={"audit_log": declared})
            meta = self.call("task", "show", env={"LEDGER_AUDIT_LOG": variable}).on_stderr["meta"]
            self.assertEqual(meta.get("audit_log_path"), path, (declared, variable))
            there = [p for p in (log, mine, other) if os.path.exists(p)]
            self.assertEqual((there, *map(os.unlink, there)), ([path], None) if path else ([],))
        self.refused(4, "AUDIT_LOG_DISABLED", ["audit-log"], env={"LEDGER_AUDIT_LOG": "0"})
        self.save(root={"audit_log": True})
        self.refused(4, "STATE_UNAVAILABLE", ["audit-log"], env={"LEDGER_STATE_DIR": "nowhere"})
        checks = self.call("doctor", env={"LEDGER_STATE_DIR": "x"}).on_stdout["data"]["checks"]
        self.assertLessEqual({"state folder", "audit log"},
                             {check["name"] for check in checks if not check["ok"]})

    def test_settings_and_values_that_are_refused(self):
        for value in "", "true", "logs/audit.jsonl":
            self.refused(2, "INVALID_AUDIT_LOG_SETTING", ["add"], env={"LEDGER_AUDIT_LOG": value})
        self.call("sh", "", env={"LEDGER_SESSION_ID": "s"})
        self.refused(
            2, "ARG_ERROR", ["--idempotency-key=k", "task", "show"],
            *([one, "--limit", n] for one in ("journal", "audit-log") for n in ("0", "-1", "x")),
            *(["audit-log", "--since", when] for when in (
                "", "1w", "-5m", "15", "2024-13-01", "20240101", "2024-W01-1", "2024-01-01T10")),
            *(["--session", name, "add"] for name in ("", "x" * 256)),
            *(["--idempotency-key", k, "add"] for k in ("", "a b", "\u00e9", "\x7f", "x" * 256)))
        for value in "a.jsonl", 1, {"max_bytes": 0}, {"max": 1}:
            self.save(root={"audit_log": value})
            self.refused(2, "INVALID_MANIFEST", ["add"])

    def test_what_resolved_to_a_command_is_logged_and_nothing_that_was_forwarded(self):
        self.env.update(TOOL_TRACE_ID="t-1", LEDGER_SESSION_ID="s")
        self.calls(["--help"], ["--version"], ["--schema", "sh"], ["task"], ["manifest"],
                   ["--schema", "--bogus", "sh"], ["--schema", "--output=/", "sh"],
                   ["journal"], ["nonsense"], ["audit-log"], ["--help", "sh"], [])
        sent = [self.call("--timeout=7", "--rerun", "add", "exit 4", "z"), self.call("gone"),
                self.call("add", "exit 4", "z", given=b"z"), self.call("--timeout=z", "add", "z"),
                self.call("post", "me", "--aa=z", "--input=manifest.json")]
        found = self.entries()
        self.assertTrue(fits(found, [{
            "timestamp": TIME, "command": ".+", "args": dict, "exit_code": int, "duration_ms": int,
            "request_id": ".{8,}", "trace_id?": ".+", "session_id?": ".+", "warnings": [CODE],
            "truncated?": True}]), found)
        self.assertEqual([(e["exit_code"], e["command"], *e["warnings"]) for e in found[:4]], [
            (4, "add"), (4, "gone"), (4, "add", "STDIN_NOT_DEDUPLICATED"), (2, "add")])
        self.assertEqual({(e["trace_id"], e.get("session_id", "s")) for e in found}, {("t-1", "s")})
        self.assertEqual(found[0]["request_id"], sent[0].on_stderr["meta"]["request_id"])
        self.assertRegex(found[4]["args"].pop("operation_id"), "^op_")
        self.assertEqual([e["args"] for e in found], [
            {"argv": "[OMITTED]", "timeout": 7, "rerun": True}, *[{"argv": "[OMITTED]"}] * 3,
            {"who": "me", "aa": "z", "input": "[OMITTED]"}])
        self.log.unlink()
        self.calls(["--format=json", "--manifest=manifest.json", "add"], ["--bogus", "add"],
                   ["--session", "x" * 99999, "add"], ["--format=x", "post", "me"])
        for e in self.entries():
            self.assertEqual((e["args"].pop("argv", "[OMITTED]"), e["args"]), ("[OMITTED]", {}))
            self.assertIn(e["session_id"], ("s", "x" * 255))

    def test_an_entry_is_at_most_16_kib_its_largest_arguments_going_first(self):
        wide = "\U0001f600"
        self.call("post", "me", "--aa", "x" * 9000, "--bb", "y" * 12000)
        self.call("post", "me", "--aa", wide * 3000, env={
            "TOOL_TRACE_ID": wide * 5000, "LEDGER_SESSION_ID": wide * 255})
        names = {f"{n:03d}" + "x" * 600: FLAG for n in range(30)}  # too long by their names alone
        self.save(post=dict(POST, flags=names))
        self.call("post", "me", *[f"--{name}=1" for name in names])
        one, two, three = self.entries()
        self.assertEqual((list(three["args"].values()), three["truncated"]), ([32], True))
        self.assertEqual(len(self.entries("--trace-id", wide * 5000)), 1)
        self.assertEqual((one["args"]["aa"], one["args"]["bb"]), ("x" * 9000, "[TRUNCATED]"))
        self.assertEqual((two["args"]["aa"], one["truncated"]), ("[TRUNCATED]", True))
        self.assertLessEqual(max(map(len, self.log.read_bytes().splitlines(True))), 16384)

    def test_rotation_under_six_writers_loses_and_doubles_nothing(self):
        self.save(root={"audit_log": {"max_bytes": 4000, "max_files": 200}})
        self.env["LEDGER_SESSION_ID"] = "\U0001f600" * 255  # so that every entry rotates
        path, seen = self.env["AGENTCLI_MANIFEST"], []
        writers = [self.start(FOLDER, path, one, run=["-Bc", WRITER]) for one in "ABCDEF"]
        while any(p.poll() is None for p in writers):
            seen.append(self.entries("--limit=999", field="trace_id"))
        seen += [self.entries("--limit=999", field="trace_id"),
                 [one + chr(n) for one in "ABCDEF" for n in range(97, 117)]]
        for before, after in zip(seen, seen[1:]):
            self.assertEqual((len(before), {*before} - {*after}), (len({*before}), set()))
        self.assertEqual(sorted(seen[-2]), seen[-1])
        logs = [path.stat() for path in self.state.glob("audit*")]
        self.assertEqual({(s.st_mode & 0o777, s.st_size <= 4000) for s in logs}, {(0o600, True)})

    def test_what_is_older_than_the_limit_goes(self):
        self.save(root={"audit_log": {"max_age_days": 2}})
        self.leave("a")
        old = re.sub(rb'("timestamp": ?")20..', rb"\g<1>2001", self.log.read_bytes())
        for name in "audit.jsonl", "audit.jsonl.1", "audit.jsonl.2":
            os.utime(self.write(self.state / name, old), (10**9, 10**9))
        self.leave("b", "c")
        self.assertEqual((self.page(), os.listdir(self.state)), (("bc", None), ["audit.jsonl"]))

    def test_pages_go_back_across_rotations_until_the_oldest_file_goes(self):
        self.leave(*"abcde")
        found, cursor = self.page("--limit=2")
        self.save(root={"audit_log": {"max_bytes": 100, "max_files": 2}})
        self.leave("f", "g")
        second, last = self.page("--limit=2", "--cursor", cursor)
        self.assertEqual((found, second, self.page("--cursor", last)), ("de", "bc", ("a", None)))
        self.assertEqual(self.page("--limit=7"), ("abcdefg", None))
        self.refused(2, "INVALID_CURSOR", *(["audit-log", "--cursor", *words] for words in (
            [cursor, "--command=sh"], [cursor, "--since=1h"], [""], ["x"], ["W10="], ["\u00e9"],
            [cursor[1:]], [" " + cursor], [cursor + "0"], [cursor.replace("cli_", "cli_0")])))
        self.leave("h")
        self.assertEqual((self.page("--cursor", cursor), self.page()), (("", None), ("fgh", None)))
        self.assertEqual(len(os.listdir(self.state)), 3)

    def test_lines_out_of_order_hide_no_others_and_what_cannot_be_read_is_told(self):
        self.leave("a", "b", "c")
        line = json.loads(self.log.read_bytes().splitlines()[-1])
        for stamp in "2001-01-01T00:00:00Z", "0", "x":
            with self.log.open("a") as f:
                f.write(json.dumps(dict(line, timestamp=stamp, trace_id="-")) + "\n")
        self.assertEqual(self.page("--since=15m")[0], "abc")
        self.assertEqual(self.page()[0], "abc-")
        for wrong in self.dir, "/":
            e = self.call("audit-log", env={"LEDGER_AUDIT_LOG": str(wrong)}).on_stdout
            self.assertEqual(end(e), (4, "STATE_UNAVAILABLE"))

    def test_filters(self):
        def iso(ago):
            return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - ago))
        self.leave("x")
        entry = json.loads(self.log.read_bytes())
        rows = ("a", 3 * 86400), ("b", 7000), ("c", 570), ("l", 601), ("d", 60)  # l came late
        lines = [dict(entry, timestamp=iso(ago) + "Z", trace_id=name) for name, ago in rows]
        self.write(self.log, "\n".join(map(json.dumps, lines)).encode() + b"\n")
        self.call("sh", "", env={"TOOL_TRACE_ID": "e"})
        for wanted, *args in (
                ("e", "--since=30s"), ("de", "--since=5m"), ("clde", "--since=1h"),
                ("bclde", "--since=2h"), ("abcld", "--since=7d", "--command=task.show"),
                ("de", f"--since={iso(300)}Z"), ("de", f"--since={iso(-6900)}+02:00"),
                ("cde", "--since=" + iso(590)), ("", "--since=2099-01-01"), ("de", "--limit=2"),
                ("", "--since=9999-12-31T23:59:59-14:00"), ("de", f"--since={iso(300)},5Z"),
                ("de", f"--since={iso(-6900)}.123456789+0200"), ("de", f"--since={iso(9300)}-0230"),
                ("e", "--command=sh"), ("d", "--limit=1", "--command=task show"),
                ("b", "--limit=1", "--trace-id=b"), ("", "--trace-id=no")):
            with self.subTest(args):
                self.assertEqual(self.page(*args)[0], wanted)

    def test_a_failed_write_is_only_a_warning(self):
        for path in str(self.dir), f"{self.dir}/manifest.json/log", "/dev/null", "1":
            self.does("ran", "sh", "exit 3", env={"LEDGER_AUDIT_LOG": path},
                      warned="AUDIT_LOG_UNAVAILABLE", preexec_fn=self.disk_of(9999 * (path != "1")))


# ---- http commands -------------------------------------------------------------------------------

TASKS = {name: dict(more, description="Test", danger_level=danger, http={
    "method": method, "path": path, "input": body}) for name, danger, method, path, body, more in [
        ("task.add", "mutating", "POST", "/v1/tasks", "required", {}),
        ("task.clear", "destructive", "DELETE", "/v1/tasks", "optional", {}),
        ("task.list", "safe", "GET", "/v1/tasks", "none", {"flags": {
            "text": FLAG, "tag": dict(FLAG, type="array"), "done": dict(FLAG, type="boolean")}}),
        ("operation.get", "safe", "GET", "/v1/operations/{operation_id}", "none", {"positionals": [
            dict(FLAG, name="operation_id", required=True)]})]}
EXIT_OF_CODE = {
    1: "unauthenticated forbidden internal_error", 3: "approval_required clarification_required",
    2: "invalid_input configuration_invalid calendar_unsupported limit_exceeded cursor_expired "
       "proposal_expired", 4: "etag_conflict idempotency_conflict", 5: "dependency_unavailable "
       "journal_unavailable judgment_unavailable judgment_invalid",
    6: "operation_unknown partial_apply needs_reconciliation context_pending"}
OF_STATUS = {  # HTTP status: exit code, error.code of a reply that is no envelope
    200: (0, ""), 201: (0, ""), 202: (6, ""), 302: (1, "redirect_refused"), 403: (1, "forbidden"),
    400: (2, "invalid_input"), 401: (1, "unauthenticated"), 404: (1, "not_found"), 504: (1, ""),
    409: (4, "conflict"), 412: (4, "etag_conflict"), 413: (2, "limit_exceeded"), 502: (1, ""),
    422: (2, "invalid_input"), 429: (1, "rate_limited"), 500: (1, "http_error"),
    503: (5, "dependency_unavailable")}
OK, UNKNOWN = (0, "ok", None), (6, "partial", "operation_unknown")
UNAVAILABLE, CANCELLED = (5, "error", "dependency_unavailable"), (143, "error", "cancelled")
OPEN, HEAD = b"HTTP/1.1 200 X\r\n\r\n", b"HTTP/1.1 200 X\r\nContent-Length: 500\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
MEBIBYTE = b'"%s"' % (b"x" * (2 ** 20 - 2))
# Test data: a certificate for 127.0.0.1 that nobody trusts, and its key, which guards nothing.
PEM = b"""-----BEGIN CERTIFICATE-----
MIIBSzCB8aADAgECAgECMAoGCCqGSM49BAMCMBQxEjAQBgNVBAMMCXRlc3QgZGF0YTAgFw0wMDAxMDEwMDAwMDBaGA8yOTk5
MTIzMTIzNTk1OVowFDESMBAGA1UEAwwJdGVzdCBkYXRhMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEYnOx6o3M+eDzk8/t
luWNPXV/l4ObHn7oElsUWX99ErXLMYih70mg1bvdBxrUhPc21bgB9QMRVS8RRyCYuqU83qMyMDAwDwYDVR0RBAgwBocEfwAA
ATAdBgNVHQ4EFgQUGpiXqdknLJG414iZ457o5dYHg5cwCgYIKoZIzj0EAwIDSQAwRgIhANrjlN2OtUc58uU6Cno27ju1+duf
Hv7roPp+ajIHzC0DAiEA/0yf/aRQXKZskKLDE3GFoUHlgcr13tj2usY8XveLQdE=
-----END CERTIFICATE-----
-----BEGIN %(kind)s-----
MEECAQAwEwYHKoZIzj0CAQYIKoZIzj0DAQcEJzAlAgEBBCABc8/2BIbBPFcJmz9/brazhh+zEFkVWGMg/V4GrECI5Q==
-----END %(kind)s-----
""" % {b"kind": b"PRIVATE KEY"}


class Service(http.server.ThreadingHTTPServer):
    """A server on loopback; `reply`, bytes or a function of the request, answers each request.

    then: sent every 50 ms after it; b"": stay, None: hang up. deaf: read no body. pem: speak TLS.
    """
    daemon_threads, request_queue_size = True, 64

    class RequestHandlerClass(http.server.BaseHTTPRequestHandler):
        def answer(self):
            s, size = self.server, int(self.headers.get("Content-Length", 0))
            with contextlib.suppress(OSError):  # the client has gone
                self.body = b"" if s.deaf else self.rfile.read(size)
                s.requests.append(self)
                self.wfile.write((s.reply(self) if callable(s.reply) else s.reply) or b"")
                while s.then and not select.select([self.connection], [], [], 0.05)[0]:
                    self.wfile.write(s.then)
                s.closed.wait(60 if s.then == b"" else 0)
        do_GET = do_POST = do_DELETE = do_CONNECT = answer

    def __init__(self, case, reply=b"", then=None, deaf=False, pem=None):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)
        self.reply, self.then, self.deaf = reply, then, deaf
        self.requests, self.known, self.closed = [], {}, threading.Event()
        self.url = "http%s://127.0.0.1:%d" % ("s" * bool(pem), self.server_address[1])
        self.env = {"LEDGER_BASE_URL": self.url}
        if deaf:  # and give 1 MiB no room in the buffers
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)
        if pem:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(pem)
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        for close in self.server_close, self.shutdown, self.closed.set:  # the last one first
            case.addCleanup(close)


def reply(status, body=b"", *fields):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = ["HTTP/1.1 %d X" % status, "Content-Length: %d" % len(body), *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def operation(status="ok", code=None, message="told", **data):
    return {"schema_version": 1, "request_id": "req_1", "status": status, "data": data,
            "warnings": [],
            "error": code and {"code": code, "message": message, "retryable": False}}


class HttpCase(Case):
    def setUp(self):
        super().setUp()
        self.service = Service(self, reply(200, operation()))
        self.save(root={"base_url": self.service.url}, **TASKS)
        self.pem = str(self.write("server.pem", PEM))
        self.token = {"LEDGER_TOKEN_FILE": str(self.write("token", b"tok-123456\n", 0o600))}

    def add(self, *args, body=b'{"title": "buy milk"}', **options):
        with tempfile.TemporaryFile() as f:
            f.write(body)
            f.seek(0)
            return self.start("task", "add", "--input", "-", *args, stdin=f, **options)

    def in_flight(self, *args, env=(), **options):
        service = Service(self, then=b"")
        p = self.add(*args, env=dict(env, **service.env), **options)
        until(lambda: service.requests)
        return p, service

    def told(self, call, expected=OK):
        """Check how a call ends; return its envelope, which is all of stdout: one line of ASCII."""
        answer = call if isinstance(call, Answer) else self.end(call)
        self.assertRegex(answer.out.decode("ascii"), r"\A\{[^\n]*\}\n\Z", answer.err)
        e = json.loads(answer.out.decode())
        self.assertEqual((answer.code, e["status"], (e["error"] or {}).get("code")), expected, e)
        self.assertEqual(set(e), set(operation()))
        return e

    def refused(self, call, says, code="invalid_input"):
        self.assertRegex(self.told(call, (2, "error", code))["error"]["message"], "(?s)" + says)
        self.assertEqual(self.service.requests, [])

    def took(self, service=None):
        """The one request that came, its operation's id and its own."""
        q, = (service or self.service).requests
        del q.server.requests[:]
        return q, (q.headers["Idempotency-Key"], q.headers["X-Request-ID"])

    def unknown(self, call, service, code=6):
        e, (q, ids) = self.told(call, (code, *UNKNOWN[1:])), self.took(service)
        self.assertEqual((e["error"]["operation_id"], e["request_id"]), ids)
        self.assertEqual((e["data"], e["error"]["retryable"]), (
            {"operation_id": ids[0], "operation_state": "unknown"}, False))
        return q, ids

    def in_doubt(self):
        entries = self.call("journal", "--unresolved").on_stdout["data"]["entries"]
        self.assertLessEqual({e["state"] for e in entries}, {"unknown", "running"})
        return [(e["operation_id"], e["request_id"]) for e in entries]


class ResolveExitCodeTest(unittest.TestCase):
    def test_the_meaning_decides_first_and_the_http_status_second(self):
        from agentcli import resolve_exit_code
        for status, (by_status, _) in OF_STATUS.items():
            for expected, outcome, codes in [
                    (6 if status == 202 else 0, "ok", ""), (6, "partial", " etag_conflict"),
                    (3, "needs_clarification", " etag_conflict"),
                    (by_status, "error", "not_found proposal_not_applicable conflict in_progress"),
                    *((exit_code, "error", codes) for exit_code, codes in EXIT_OF_CODE.items())]:
                for code in codes.split(" "):
                    found = resolve_exit_code(operation(outcome, code or None), status)
                    self.assertEqual(found, expected, (status, outcome, code))


class InputTest(HttpCase):
    def test_the_bytes_sent_are_the_bytes_read_up_to_one_mebibyte(self):
        body = b'{ "title":"caf\xc3\xa9",\r\n "n": 1.10, "big": 123456789012345678901234567890 } '
        for source, given in ("-", body), (self.write("body.json", body), b""), ("-", MEBIBYTE):
            self.told(self.call("task", "add", "--input", source, given=given))
            q, _ = self.took()
            self.assertEqual((q.requestline, q.headers["Content-Type"], q.body),
                             ("POST /v1/tasks HTTP/1.1", "application/json", given or body))

    def test_an_http_command_knows_no_dry_run(self):
        self.refused(self.call("task", "clear", "--dry-run", "--confirm-destructive"), "--dry-run")

    def test_stdin_is_read_only_when_it_is_asked_for_and_one_byte_past_the_limit(self):
        with open(self.write("large", MEBIBYTE * 2), "rb") as f:
            for args in ["list"], ["clear", "--confirm-destructive"], ["add", "--input", "token"]:
                self.call("task", *args, stdin=f)
                self.assertEqual(os.lseek(f.fileno(), 0, os.SEEK_CUR), 0)
            p = self.start("task", "add", "--input", "-", stdin=f)
            self.told(p, (2, "error", "invalid_input"))
            self.assertEqual(os.lseek(f.fileno(), 0, os.SEEK_CUR), 2 ** 20 + 1)
        self.assertEqual([q.body for q in self.service.requests], [b"", b""])

    def test_an_input_that_is_not_json_in_time_is_refused_and_the_message_says_where(self):
        os.mkfifo(self.dir / "fifo")
        silence = os.open(self.dir / "fifo", os.O_RDWR)
        for where, p in (*[(where, self.add(body=body)) for body, where in (
                (b"", "line 1"), (b'{"a": 1,\n "b" 2}', "line 2 column 6"), (b"[" * 200000, "deep"),
                (b"[\n\n-Infinity]", "Infinity.*line 3"), (b'["NaN",\n NaN]', "NaN.*line 2"),
                (b"[\n1e999]", "1e999.*line 2"), (b"[%s]" % (b"9" * 400), "999.*line 1"),
                (b'{"b": 1, "b": 1}', '"b"'), (b'"\xff"', "position 1"), (b"{} 1", "column 4"))], *[
                (where, self.start("--timeout=1", "task", "add", "--input", source, stdin=silence))
                for source, where in (("missing", "missing"), (".", r"\."), ("", ""), ("-", "time"),
                                      ("fifo", "fifo.*time"), ("/dev/zero", "1048576"))]):
            self.refused(p, f"--input.*({where})")
        os.close(silence)

    def test_a_bad_argument_or_a_missing_confirmation_sends_nothing(self):
        add = ["task", "add", "--input", "manifest.json"]
        rows = [(["task", "add"], "--input"), (["task", "list", "--input", "-"], "--input"),
                (["task", "add", '{"title": "x"}'], "add"), (add + ["--title", "x"], "--title"),
                (["task", "list", "--operation-id", "x"], "operation-id"),
                *((["operation", "get", text], "operation_id|UTF-8") for text in (
                    "", ".", "..", b"\xff")),
                *((add + ["--operation-id", text], "operation-id|idempotency-key") for text in (
                    "", "a b", "a\r", "a\nX-Evil: 1", "\u00e9", "x" * 256))]
        for (_, says), answer in zip(rows, self.calls(*(args for args, _ in rows))):
            self.refused(answer, says)
        self.told(self.start("task", "clear"), (3, "error", "approval_required"))
        self.assertEqual(self.service.requests, [])

    def test_positionals_fill_the_path_and_flags_the_query(self):
        env = {"LEDGER_BASE_URL": self.service.url + "/api/"}
        for args, target in (
                (["operation", "get", "a/b ?#%&\u00e9~"], "operations/a%2Fb%20%3F%23%25%26%C3%A9~"),
                (["operation", "get", "a\r\nb\x7f"], "operations/a%0D%0Ab%7F"),
                (["operation", "get", "--", "-x"], "operations/-x"), (["task", "list"], "tasks"),
                (["task", "list", "--done", "--tag", "a&b", "--text=\u00e9 +", "--tag=c"],
                 "tasks?text=%C3%A9+%2B&tag=a%26b&tag=c&done=true")):
            self.told(self.start(*args, env=env))
            q, ids = self.took()
            self.assertEqual((q.path, ids[0]), ("/api/v1/" + target, None))

    def test_every_request_has_an_id_of_its_own_and_every_write_an_operation_id(self):
        uuid7, seen = r"[\da-f]{8}-[\da-f]{4}-7[\da-f]{3}-[89ab][\da-f]{3}-[\da-f]{12}", set()
        for arg, name in (("--json", "op_" + uuid7), ("--json", "op_" + uuid7),
                          ("--operation-id=~", "~"), ("--idempotency-key=" + "x" * 255, "x{255}")):
            self.told(self.add(arg))
            _, ids = self.took()
            self.assertRegex("{} {}".format(*ids), rf"\A{name} cli_{uuid7}\Z")
            seen.update(ids)
        self.assertEqual(len(seen), 8)


class ReplyTest(HttpCase):
    def test_an_envelope_is_printed_as_it_is_whatever_its_status_and_form(self):
        plain, pretty = reply(200, operation()), json.dumps(operation(), indent=2).encode()
        wild = json.dumps(operation()).replace(
            "{}", '{{"i": -{}, "f": [0.1, -0.0, 5e-324, 1.7976931348623157e+308, 1E2], "t": "{}"}}'
            .format("7" * 5000, "\u00e9\U0001f363\\ud83c\\udf63\\ud800")).encode()
        for code, data in (
                (6, reply(202, operation())), (6, reply(409, operation("partial"))),
                (3, reply(200, operation("needs_clarification"))), (0, reply(200, wild)),
                (1, reply(504, dict(operation("error", "forbidden"), data=[None, True]))),
                (0, reply(200, dict(operation(), warnings=[{"code": "", "message": "", "n": 1}]))),
                (0, b"HTTP/1.0 500 X\r\n\r\n" + pretty), (0, b"HTTP/1.1 100 X\r\n\r\n" + plain),
                (0, b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + plain),
                (0, CHUNKED + b"%x;x=y\r\n%s\r\n0\r\nT: 1\r\n\r\n" % (len(pretty), pretty))):
            self.service.reply = data
            answer = self.end(self.add())
            given = "{" + data.decode().partition("{")[2].replace("\\ud800", "\\ufffd")
            out, given = (repr(json.JSONDecoder(parse_int=str).raw_decode(text)[0])
                          for text in (answer.out.decode("ascii"), given))
            self.assertEqual((out, answer.code), (given, code))
            pending = b"; look operation op_[-0-9a-f]+ up"
            self.assertRegex(answer.err, pending if code == 6 else b"^$")

    def test_any_other_reply_becomes_an_envelope_and_no_redirect_is_followed(self):
        other = Service(self, reply(200, operation()))
        for end, kept, data in (
                (OK, [1], reply(201, b" [1] ")), (OK, None, reply(200)),
                (OK, None, b"HTTP/1.1 204 X\r\n\r\n"), ((6, "ok", None), 7, reply(202, 7)),
                *(((exit_code, "error", code), {} if status % 2 else None, reply(
                    status, {} if status % 2 else b"<html>", "Location: " + other.url))
                  for status, (exit_code, code) in OF_STATUS.items() if code),
                ((2, "error", "invalid_input"), None, reply(
                    400, b"--b", "Content-Type: multipart/mixed; boundary=b"))):
            self.service.reply = data
            del self.service.requests[:]
            e = self.told(self.add(env=self.token), end)
            self.assertEqual(e["data"], kept)
            if e["error"]:  # what a mutation's failure is about
                self.assertEqual(e["error"]["operation_id"], self.took()[1][0])
                self.assertNotIn("operation_id", self.told(self.call("task", "list"), end)["error"])
        self.assertEqual(other.requests, [])

    def test_what_is_almost_an_envelope_is_no_success(self):
        w = {"code": "w", "message": "m"}
        for wrong in ({"schema_version": 2}, {"schema_version": True}, {"request_id": ""},
                      {"status": "done"}, {"status": "error"}, {"more": 1}, {"warnings": [{}]},
                      {"warnings": {}}, {"warnings": ""}, {"warnings": None},
                      {"warnings": [dict(w, item_id=5)]}, {"error": dict(w, retryable=False)},
                      {"status": "error", "error": dict(w, code="Not Found", retryable=False)}):
            self.service.reply = reply(200, dict(operation(), **wrong))
            self.unknown(self.add(), self.service)
            e = self.told(self.call("task", "list"), UNAVAILABLE)
            self.assertEqual(e["data"], dict(operation(), **wrong))
            self.took()
        for keys in "schema_version status", "status error", "schema_version status request_id":
            whole = operation("error", "failed")
            self.service.reply = reply(200, {key: whole[key] for key in keys.split()})
            self.unknown(self.add(), self.service)
        five = operation("partial")
        del five["schema_version"]
        for bare in {"status": "needs_clarification"}, five:
            self.service.reply = reply(200, bare)
            self.unknown(self.add(), self.service)

    def test_what_is_almost_an_envelope_keeps_its_meaning_beside_an_http_error(self):
        error = {"code": "approval_required", "message": "m", "retryable": False}
        odd = {"more": 1}
        for status, body, end in (
                (403, dict(operation("error"), error=dict(error, operation_id=None)), 3),
                (403, {"status": "error", "error": error}, 3), (403, {"error": error}, 1),
                (422, dict(operation("needs_clarification"), **odd), 3),
                (422, dict(operation("error", "not_known_here"), **odd), 2),
                (422, {"status": "error", "error": "text"}, 2), (500, {"status": "error"}, 1),
                (422, dict(operation("error"), error={"code": ["x"]}), 2),
                (409, dict(operation("partial"), **odd), 6), (503, {"status": "partial", "error": {
                    "code": "partial_apply"}, "schema_version": 1}, 6),
                (409, dict(operation("error", "operation_unknown"), **odd), 6)):
            with self.subTest(status=status, body=body):
                self.service.reply = reply(status, body)
                answer = self.end(self.add())
                e = json.loads(answer.out.decode())
                self.assertEqual((answer.code, e["error"]["retryable"]), (end, False), e)
                self.assertEqual(e["error"]["operation_id"], self.took()[1][0])
                self.assertEqual(e["status"], "partial" if end == 6 else "error")

    def test_a_programs_default_socket_timeout_is_not_the_calls(self):
        self.service.reply = reply(200, operation())
        code = "import agentcli, socket, sys; socket.setdefaulttimeout(30)\n" \
               "sys.exit(agentcli.main(sys.argv[1:]))"
        self.told(self.call("--timeout=9", "task", "add", "--input=manifest.json",
                            run=["-c", code], cwd=self.dir, env={"PYTHONPATH": FOLDER}))
        self.took()

    def test_a_resource_that_has_a_status_or_an_error_of_its_own_is_data(self):
        for data in ({"id": 3, "status": "error", "error": "full"}, {"status": "ok", "data": 1},
                     {"data": [], "error": None, "request_id": "r", "status": "success"},
                     {"status": "partial", "error": None}, {"schema_version": 3, "status": "done"}):
            self.service.reply = reply(200, data)
            self.assertEqual(self.told(self.add())["data"], data)
            self.took()

    def test_a_refusal_that_comes_while_the_body_is_being_sent_is_read(self):
        for pem, then in (None, b""), (None, None), (self.pem, None):
            service = Service(self, reply(413, b"<html>"), then, True, pem)
            env = dict(service.env, SSL_CERT_FILE=self.pem)
            p = self.add("--timeout", "9", body=MEBIBYTE, env=env)
            self.told(p, (2, "error", "limit_exceeded"))

    def test_a_refusal_in_pieces_or_behind_interim_replies_is_read(self):
        refusal = reply(413, b"<html>")

        def slowly(*pieces):
            def send(request):
                for piece in pieces:
                    request.wfile.write(piece)
                    time.sleep(0.06)  # longer than a look: what is tried is that it looks again
            return send

        for pieces in ([refusal[:1], refusal[1:]], [refusal[:10], refusal[10:]],
                       [b"HTTP/1.1 100 Continue\r\n\r\n", refusal],
                       [b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" + refusal]):
            service = Service(self, slowly(*pieces), b"", True)
            p = self.add("--timeout", "9", body=MEBIBYTE, env=service.env)
            self.told(p, (2, "error", "limit_exceeded"))

    def test_an_interim_reply_does_not_end_the_sending(self):
        def late(request):
            request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = request.rfile.read(int(request.headers["Content-Length"]))
            request.wfile.write(reply(200, operation(size=len(body))))

        service = Service(self, late, deaf=True)
        e = self.told(self.add("--timeout", "9", body=MEBIBYTE, env=service.env))
        self.assertEqual(e["data"], {"size": len(MEBIBYTE)})

    def test_a_reply_that_is_cut_short_in_its_head_is_no_reply(self):
        for head in (b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 201 X\r\nDate: Mon",
                     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chun", b"HTTP/1.1 400 X\r\nA: b\r\n",
                     b"HTTP/1.1 103 X\r\n\r\nHTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 X\r\n",
                     CHUNKED + b"2\r\n{}\r\n0", CHUNKED + b"0000", CHUNKED + b"-1\r\n{}",
                     CHUNKED + b"-0\r\n\r\n", CHUNKED + b"-%s\r\n{}" % (b"f" * 18),
                     CHUNKED[:-2] + b"Transfer-Encoding: gzip\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
                     b"HTTP/1.1 200 OK\r\nX: a\rContent-Length: 0\r\n\r\n{",
                     *(b"HTTP/1.1 200 OK\r\n%s\r\nContent-Length: 500\r\n\r\n" % line for line in (
                         b"junk without colon", b"X: a\rb", b"X-\xc3\xa9: a", b"X : 6",
                         b"Content-Length: 0", b"Transfer-Encoding: gzip, chunked"))):
            with self.subTest(head):
                self.service.reply = head
                p = self.add()
                self.unknown(p, self.service)
                self.told(self.call("task", "list"), UNAVAILABLE)
                self.service.requests.clear()
        service = Service(self, OPEN + b"12", pem=self.pem)  # which then breaks off
        self.unknown(self.add(env=dict(service.env, SSL_CERT_FILE=self.pem)), service)

    def test_what_else_an_error_holds_is_printed_as_it_is(self):
        for more in {"suggestion": None}, {"suggestion": ["a"]}, {"fix_required": True}:
            envelope = operation("partial", "partial_apply")
            envelope["error"].update(more)
            self.service.reply = reply(200, envelope)
            for args in ["--json"], ["--format=text"]:
                answer = self.end(self.add(*args))
                self.assertEqual(answer.code, 6, answer.err)
                self.assertNotIn(b"Traceback", answer.err)

    def test_a_deep_or_long_value_ends_in_time_and_in_text_too(self):
        self.service.reply = reply(200, b"[" * 900 + b"]" * 900)
        answer = self.end(self.add("--format=text"))
        self.assertEqual((answer.code, answer.out.count(b"[")), (0, 900), answer.err)
        self.took()
        for depth in (*range(988, 998), *range(1490, 1496), *range(9992, 9997)):  # Python's limits
            self.service.reply = reply(200, b"[" * depth + b"]" * depth)
            answer = self.end(self.add())
            self.assertIn(answer.code, (0, 6))
            self.assertEqual(answer.err, b"")
            self.took()
        for data in b"7" * 900000, b"[%s]" % b",".join([b"7" * 99999] * 40):
            self.service.reply = reply(200, data)
            self.unknown(self.add("--timeout=30"), self.service)
        self.service.reply = reply(200, b"7" * 99999)
        self.assertRegex(self.end(self.add("--timeout=30")).out, b'"ok".*"data": 7{99999},')

    def test_text_mode_prints_data_on_stdout_and_errors_in_plain_lines_on_stderr(self):
        wild = operation("error", "etag_conflict", "was\n\x1b[31mchanged\r\u00e9", title="buy milk")
        for data, out, err in ((reply(200, operation(title="buy milk")), b"buy milk", b""),
                               (b"\x1b[31mSSH\r\n\r\n", b"unknown", b"ledger: .*operation.*\n"),
                               (reply(409, wild), b"buy milk", b"ledger: was.*changed.*\n")):
            self.service.reply = data
            answer = self.end(self.add("--format", "text"))
            self.assertRegex(answer.out, out)
            self.assertRegex(answer.err, rb"\A%s\Z" % err)
            self.assertNotRegex(answer.out + answer.err, b"\x1b|request_id")
        del self.service.requests[:]
        lost = operation("error", "operation_unknown", "uncertain")
        lost["error"]["operation_id"] = "op_zz"
        warned = dict(operation(), warnings=[{"code": "w", "message": "it\nrains"}])
        for code, data, says in ((6, reply(200, operation("partial")), b"a part"),
                                 (3, reply(200, operation("needs_clarification")), b"asks back"),
                                 (6, reply(202, operation()), b"202"),
                                 (0, reply(200, warned), rb"warning: it\\nrains"),
                                 (6, reply(200, dict(operation("partial"), warnings=[
                                     {"code": "w", "message": "slow"}])), b"slow&a part"),
                                 (6, reply(200, lost), b"uncertain.*op_zz")):
            self.service.reply = data
            answer = self.end(self.add("--format", "text"))
            listed = self.call("task", "list", "--format", "text")
            for said in answer.err, listed.err:
                self.assertRegex(said, rb"\A(ledger: [^\n]*\n)+\Z")
                for words in says.split(b"&"):
                    self.assertRegex(said, words)
            self.assertEqual((answer.code, listed.code), (code, code))
            operation_id = self.service.requests.pop(0).headers["Idempotency-Key"]
            if code == 6 and b"op_zz" not in answer.err:  # what to look up
                self.assertIn(operation_id.encode(), answer.err)
            self.took()

    def test_a_reader_that_left_gets_no_traceback_and_the_exit_code_stands(self):
        p = self.add()
        p.stdout.close()
        self.assertEqual((p.wait(20), p.stderr.read()), (0, b""))

    def test_a_certificate_must_be_trusted_and_fit_the_name(self):
        service = Service(self, reply(200, operation()), pem=self.pem)
        trusted = dict(service.env, SSL_CERT_FILE=self.pem)
        other = dict(trusted, LEDGER_BASE_URL=service.url.replace("127.0.0.1", "localhost"))
        for env, end in (service.env, UNAVAILABLE), (other, UNAVAILABLE), (trusted, OK):
            self.told(self.add(env=env), end)
        self.took(service)

    def test_proxy_variables_hold_off_loopback_and_never_on_it(self):
        proxies = {"http_proxy": self.service.url, "https_proxy": self.service.url}
        self.told(self.add(env=dict(proxies, LEDGER_BASE_URL="http://tasks.invalid/api")))
        self.assertEqual(self.took()[0].path, "http://tasks.invalid/api/v1/tasks")
        self.told(self.add(env={"http_proxy": "http://127.0.0.1:1"}))
        self.took()
        self.service.reply = reply(502, b"<html>")  # to CONNECT: the request itself never leaves
        env = dict(self.token, LEDGER_BASE_URL="https://tasks.invalid", **proxies)
        self.told(self.add(env=env), UNAVAILABLE)
        q, _ = self.took()
        self.assertEqual((q.command, q.headers["Authorization"]), ("CONNECT", None))


class UncertainTest(HttpCase):
    def test_without_a_usable_reply_in_time_a_write_is_unknown_and_a_read_unavailable(self):
        services = [Service(self, *args) for args in (
            (b"",), (b"SSH-2.0\r\n\r\n",), (HEAD[:-3],), (HEAD + b"{",), (HEAD + b"{}",),
            (HEAD + json.dumps(operation()).encode(),), (CHUNKED + b"9\r\n{",),
            (CHUNKED + b"2\r\n{}\r\n",), (CHUNKED + b"z\r\n{}\r\n0\r\n\r\n",),
            (HEAD.replace(b"500", b"-1") + b"{}",), (HEAD.replace(b"500", b"x") + b"{}",),
            (lambda q: q.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack(
                "ii", 1, 0)) or os.close(q.connection.detach()),),  # a reset
            (reply(200, b'{"n": NaN}'),), (reply(200, b"[" * 100000),), (reply(200, b'"\xff"'),),
            (reply(200, b"<html>"),), (reply(502, b"<html>"),), (reply(504, b"<html>"),),
            (reply(504, {}),), (reply(200, {}, *["X-%d: y" % n for n in range(300)]),),
            (reply(200, {}, "X: " + "y" * 100000),), (OPEN, b" " * 2 ** 22), (HEAD, b" "),
            (OPEN[:-2] + b"X-Slow: ", b"y"), (b"", b""))]
        for s, p in [(s, self.add("--timeout", "01"[s.then in (b"", b" ", b"y")], env=s.env))
                     for s in services]:
            self.unknown(p, s)
        for p in [self.add("--timeout", "1", env=services[-1].env) for _ in range(2)]:
            self.told(p, UNKNOWN)  # without a session no call waits for another, alike or not
        for s, p in [(s, self.start("task", "list", env=s.env)) for s in services[:20:4]]:
            self.told(p, UNAVAILABLE)
            self.took(s)

    def test_when_nothing_was_sent_the_call_may_be_repeated(self):
        full, silent = (socket.create_server(("127.0.0.1", 0), backlog=1) for _ in range(2))
        fillers = [socket.socket() for _ in range(8)]
        for sock in fillers:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        urls = ["http://127.0.0.1:%d" % full.getsockname()[1], "http://127.0.0.1:1",
                "https://127.0.0.1:%d" % silent.getsockname()[1], "http://tasks.invalid"]
        signalled = self.add(env={"LEDGER_BASE_URL": urls[0]})
        until(self.in_doubt)
        signalled.terminate()
        for call in signalled, self.add(preexec_fn=held([signal.SIGTERM])):
            self.told(call, CANCELLED)
        for p in [self.add("--timeout", "2", env={"LEDGER_BASE_URL": url}) for url in urls]:
            self.assertIs(self.told(p, UNAVAILABLE)["error"]["retryable"], True)
        self.assertEqual((self.service.requests, self.in_doubt(), self.running()), ([], [], []))
        for sock in (full, silent, *fillers):
            sock.close()

    def test_a_signal_between_sending_and_answer_leaves_it_open(self):
        p, service = self.in_flight()
        p.send_signal(signal.SIGINT)
        self.unknown(p, service, 130)
        p = self.start("task", "list", env=service.env)
        until(lambda: service.requests)
        p.terminate()
        self.told(p, (143, *UNAVAILABLE[1:]))

    @on_linux
    def test_the_journal_tells_every_end(self):
        for code, answer in ((6, reply(202)), (6, reply(200, operation("partial"))),
                             (3, reply(200, operation("needs_clarification"))),
                             (6, reply(202, operation())),
                             (0, reply(200, operation("error", "not_found")))):
            self.service.reply = answer
            self.assertEqual(self.end(self.add()).code, code)
            entry = self.call("journal", "--limit=1").on_stdout["data"]["entries"][0]
            self.assertEqual((entry["state"], entry["exit_code"]), ("finished", code))
        self.assertEqual(self.in_doubt(), [])

    def test_after_a_kill_the_journal_names_the_operation_and_its_sender_ends_in_time(self):
        p, service = self.in_flight("--timeout", "2", "--session", "s")
        p.kill()
        self.assertEqual((p.wait(), self.in_doubt()), (-9, [self.took(service)[1]]))
        until(lambda: not self.running(), 10)

    def test_a_repeat_in_a_session_has_the_same_operation_id_unless_it_is_a_rerun(self):
        self.service.reply, names = b"", []
        for args, body in (("--session=a", b"1"), ("--session=a", b"1"), ("--session=a", b"2"),
                           ("", b"1"), ("--session=b", b"1"), ("--session=a --rerun", b"1")):
            self.told(self.add(*args.split(), body=body), UNKNOWN)
            names.append(self.took()[1][0])
        self.assertEqual((names[0], len(set(names))), (names[1], 5))
        for option in "--operation-id", "--idempotency-key":  # what the caller names is sent
            self.told(self.add("--session=a", option + "=op_mine", body=b"1"), UNKNOWN)
            self.assertEqual(self.took()[1][0], "op_mine")
        moved = Service(self, reply(200, operation()))  # to another port, as after a restart
        self.told(self.add("--session=a", "--rerun", body=b"3"), UNKNOWN)
        self.told(self.add("--session=a", body=b"3", env=moved.env))
        self.assertEqual(self.took()[1][0], self.took(moved)[1][0])

    def test_an_operation_stays_in_doubt_though_a_rerun_sent_another_one(self):
        self.service.reply = b"HTTP/1.1 200"
        _, lost = self.unknown(self.add("--session=s"), self.service)
        self.service.reply = reply(200, operation())
        self.told(self.add("--session=s", "--rerun"))
        self.assertEqual(self.in_doubt(), [lost])
        self.told(self.add("--operation-id", lost[0]))
        self.assertEqual(self.in_doubt(), [])

    def test_a_journal_that_cannot_be_written_warns_and_in_a_session_sends_nothing(self):
        env = {"LEDGER_STATE_DIR": str(self.dir / "manifest.json" / "state")}
        self.told(self.add("--session", "s", env=env), (5, "error", "journal_unavailable"))
        for args in [], ["--session", "s", "--rerun"], ["--operation-id", "op_1"]:
            answer = self.end(self.add(*args, env=env))
            self.assertEqual(self.told(answer), operation())
            self.assertRegex(answer.err, rb"\Aledger: warning: [^\n]*journal[^\n]*\n\Z")
            self.took()
        self.service.reply = b""
        self.assertIn("state_unavailable", str(self.told(self.add(env=env), UNKNOWN)["warnings"]))


class TokenTest(HttpCase):
    def test_the_token_is_sent_as_it_stands_in_its_file(self):
        self.write("home/.config/token", b"tok ~!" + b"x" * 8186, 0o400)
        self.save(root={"base_url": self.service.url, "token_file": "~/.config/token"})
        for env, token in ({}, "tok ~!" + "x" * 8186), (self.token, "tok-123456"):
            self.told(self.add(env=env))
            self.assertEqual(self.took()[0].headers["Authorization"], "Bearer " + token)

    def test_a_faulty_base_url_or_token_file_sends_nothing_and_shows_no_secret(self):
        self.save()
        os.mkfifo(self.dir / "fifo", 0o600)
        paths = [self.dir / "fifo", self.dir, self.dir / "missing", *(
            self.write(f"{mode:o}", b"secret", mode) for mode in (0o640, 0o604)), *(
            self.write("%d" % len(text), text, 0o600) for text in (
                b"", b"secret\xe9", b"secret\n\n", b"secret\t??", b"secret\nsecret", b"s" * 8193))]
        if os.geteuid() == 0:
            paths.append(self.write("owner", b"secret", 0o600))
            os.chown(paths[-1], 12345, -1)
        for p in [self.start("task", "list", env=env) for env in (
                *({"LEDGER_BASE_URL": url} for url in (
                    "ftp://h", "//h", "h:80", "http://", "http://:80", "http://u@h", "http://[::1",
                    "http://u:secret@h", "http://h?q=1", "http://h#f", "http://h:0", "http://h:x",
                    "", "http://h:99999", "http://a b", "http://h/\u00e9", "http://h/\r\nX: y",
                    "http://a..b", "http://%s.test" % ("a" * 64),
                    "http://127.0.0.1%20", "http://x[::1]", "http://[::1]x", "http://h:+80")),
                *(dict(self.service.env, LEDGER_TOKEN_FILE=str(path)) for path in paths),
                dict(self.token, LEDGER_BASE_URL="http://h.invalid", http_proxy=self.service.url))]:
            answer = self.end(p)
            self.refused(answer, "(?i)base.url|token file.*test", "configuration_invalid")
            self.assertNotIn(b"secret", answer.out + answer.err)

    @on_linux
    def test_neither_payload_nor_token_is_seen_or_kept_anywhere(self):
        p, service = self.in_flight("--session", "s", body=b'{"title": "my secret title"}',
                                    env=dict(self.token, LEDGER_AUDIT_LOG="1"))
        seen = [(self.dir / "/proc" / str(pid) / name).read_bytes() for pid in self.running()
                for name in ("cmdline", "environ")]
        self.assertEqual(len(seen), 4)  # of agentcli and its sender
        p.terminate()
        answer = self.end(p)
        q, ids = self.unknown(answer, service, 143)
        state = self.dir / "home/.local/state/ledger"
        seen += [path.read_bytes() for path in state.glob("**/*") if path.is_file()]
        for secret, sent in (b"my secret title", q.body), (b"tok-123456", bytes(q.headers)):
            self.assertIn(secret, sent)
            self.assertNotIn(secret, b"".join(seen) + answer.out + answer.err)
        entry = json.loads((state / "audit.jsonl").read_text())
        logged = entry["args"]["input"], entry["args"]["operation_id"], entry["request_id"]
        self.assertEqual(logged, ("[OMITTED]", *ids))


# ---- a task service to try agentcli against: `python3 test_agentcli.py demo` ---------------------

def tasks(request):
    """The reply of a service that keeps tasks by the id of the operation that added them."""
    known, name = request.server.known, request.path.rpartition("/")[2]
    if request.command == "GET":
        return reply(200, operation(tasks=[known[name]] if name in known else [*known.values()]))
    name, task = request.headers["Idempotency-Key"], json.loads(request.body.decode())
    if not task.get("title"):
        return reply(422, operation("error", "invalid_input", "a task needs a title"))
    if task.get("price", 0) > 100:
        return reply(403, operation("error", "approval_required", "a person must approve it"))
    if known.setdefault(name, task) != task:
        return reply(409, operation("error", "idempotency_conflict", name + " is another task"))
    return {"hang up": b"", "be busy": reply(503)}.get(
        task.get("then"), reply(201, operation(operation_id=name, task=task)))


def demo():
    """Call a task service through agentcli, once for each outcome; 0 when each is as expected."""
    case, wrong, unknown, add = HttpCase(), 0, "", "task add --input -"
    case.setUp()
    case.service.reply = tasks
    case.env.update(AGENTCLI_MANIFEST=os.path.join(FOLDER, "manifest.example.json"),
                    EXAMPLE_BASE_URL=case.service.url)
    for expected, words, body in (
            (0, add, '{"title": "buy milk"}'), (0, "task list", ""), (2, add, '{"title": '),
            (2, add, '{"title": ""}'), (3, add, '{"title": "buy a boat", "price": 9000}'),
            (0, add + " --operation-id op_1", '{"title": "water the plants"}'),
            (4, add + " --operation-id op_1", '{"title": "water the lawn"}'),
            (6, add, '{"title": "call home", "then": "hang up"}'), (0, "operation get {}", ""),
            (5, add, '{"title": "sleep", "then": "be busy"}')):
        answer = case.call(*words.format(unknown).split(), given=body.encode())
        print("\n$ %spython3 agentcli.py %s\n%sexit code %d (expected: %d)" % (
            f"echo '{body}' | " if body else "", words.format(unknown), answer.out.decode(),
            answer.code, expected))
        wrong += answer.code != expected
        unknown = (json.loads(answer.out.decode())["error"] or {}).get("operation_id", "")
    case.doCleanups()
    return 1 if wrong else 0


# ---- Python: App, declared and destructive commands ----------------------------------------------

APP = rb"""
import agentcli, itertools, os, signal, subprocess, sys, time
app = agentcli.App("ledger", "1.4.0", "Tools of a test")
SHUT = agentcli.Failure(agentcli.ExitCode.PERMISSION_DENIED, "SHUT", "It is shut", [1])
def flag(kind, *env, **more):
    more.update({"env_vars": [{"name": name} for name in env]} if env else {})
    return dict({"type": kind, "required": False, "description": "A flag"}, **more)
def command(path, danger_level="safe", **entry):
    app.register(path, description="Do " + path, danger_level=danger_level, **entry)
    return app.handler(path)
def do(what, **data):
    with open("done", "a") as file:
        file.write(what)
    return data
WHAT, N, MUST = flag("string", name="what"), flag("integer", name="n"), {"required": True}
command("echo", positionals=[WHAT, N], flags={
    "greet": flag("string", "GREET", "GREETING", short="g"), "count": flag("integer", short="n"),
    "loud": flag("boolean", "LOUD", short="l"), "quiet": flag("boolean", short="q"),
    "tag": flag("array", "TAG", short="t"), "level": flag("enum", enum_values=["low", "high"]),
    "rate": flag("number"), "code": flag("string", pattern="^[a-z]{3}$")})(lambda args, ctx: args)
command("strict", option_placement="strict", positionals=[WHAT],
        flags={"size": flag("integer", "SIZE", default=10)})(lambda args, ctx: args)
command("find", flags={"name": flag("string", short="n")})(lambda args, ctx: args)
command("find.add", flags={"now": flag("boolean", short="n")})(lambda args, ctx: args)
command("tags", flags={"tag": flag("array", "TAGS", pattern="^[a-z]+$")})(lambda args, ctx: args)
command("digit", flags={"offset": flag("number"), "ipv4": flag("boolean", short="4"), "all": flag(
    "boolean", short="a")}, positionals=[flag("number", name="n")])(lambda args, ctx: args)
command("need", flags={"must": flag("string", **MUST)}, positionals=[dict(WHAT, **MUST)])(do)
command("task.ping")(lambda args, ctx: {"pong": True})
command("unbound")
app.register("sh", description="A shell", danger_level="safe", arguments="passthrough", argv=["sh"])
command("put", "mutating", positionals=[WHAT, N])(lambda args, ctx: do(
    "p", **({"effect": "created", "kept": "x" * args.get("n", 0)} if args else {})))
@command("drop", "destructive", positionals=[WHAT])
def drop(args, ctx):
    if not args:
        raise SHUT
    return {"would": "drop", "args": args} if ctx.dry_run else do("d", effect="deleted")
@command("wild", "mutating", positionals=[dict(WHAT, **MUST)])
def wild(args, ctx):  # what the test says, as the body of a function
    names = dict(globals(), ctx=ctx)
    exec("def body():\n " + args["what"].replace("\n", "\n "), names)
    return names["body"]()
"""
MANY = "import os, sys, app; [os.write(1, b'%d\\n' % app.app.run(a)) for a in eval(sys.argv[1])]"
PROGRAM, WELL = ["-c", "import app; app.app.main(); print(1)"], '\nreturn {"effect": "noop"}'


def end(e):
    return e["meta"]["exit_code"], (e["error"] or {}).get("code")


class AppCase(Case):
    @classmethod
    def setUpClass(cls):
        cls.compiled = tempfile.mkdtemp(prefix="agentcli-")
        cls.addClassCleanup(shutil.rmtree, cls.compiled)

    def setUp(self):
        super().setUp()
        self.write("app.py", APP)
        self.env.update(PYTHONPATH=f"{self.dir}:{FOLDER}", PYTHONPYCACHEPREFIX=self.compiled)

    def tell(self, *lines, **options):
        """The envelopes of several command lines, run one after the other in one process."""
        lines = [line.split(" ") if isinstance(line, str) else line for line in lines]
        r = self.call(MANY, ascii(lines), run=["-c"], **options)
        out, self.err = r.out.split(b"\n"), r.err
        self.assertEqual((r.code, len(out)), (0, 2 * len(lines) + 1), r.err)
        return [Answer(int(n), line + b"\n").on_stdout for line, n in zip(out[::2], out[1::2])]

    def wild(self, *bodies):
        return self.tell(*[["wild", body] for body in bodies])

    def gives(self, rows, **options):
        for line, e in zip(rows, self.tell(*rows, **options)):
            with self.subTest(line):  # as JSON, where true is not 1
                self.assertEqual(*(json.dumps(v, sort_keys=True) for v in (e["data"], rows[line])))

    def python(self, code, **options):
        r = self.call("import agentcli, json, os, signal, time\n" + code, run=["-c"], **options)
        self.assertEqual(r.code, 0, r.err)
        return r.out.decode()


class AppTest(AppCase):
    def refused(self, rows):
        out = self.python(f"""from app import app; App = agentcli.App
for expression in {[*rows]!r}:
    try: print("accepted", eval(expression))
    except agentcli.RegistrationError as error: print(ascii(error.faults))""")
        for expression, faults in zip(rows, out.split("\n")):
            with self.subTest(expression):
                self.assertRegex(faults, rows[expression])

    def test_registration_is_as_strict_as_in_a_file(self):
        rows = [("bad", fields, rule) for fields, rule in REFUSED if rule != "bind"]
        rows += [(path, {}, "kebab") for path in ("Upper", "two..dots", "a b", "")]
        rows += [("manifest", {}, "built-in"), ("task", {}, "group"), ("task.ping", {}, "already"),
                 ("two", {"timeout": -1, "colour": 1}, "timeout.*colour")]
        self.refused({f"app.register({path!r}, **{self.entry('true', **fields)})":
                      f'"{path}".*({rule})' for path, fields, rule in rows})
        self.refused({f"app.register('o', description='o', danger_level='safe', **{odd})": '"o"'
                      for odd in ("{'flags': {'ff': {1: 2}}}", "{'flags': {1: {}}}",
                                  "{'arguments': 'passthrough', 'argv': ['o'], 'env': {1: 2}}")})
        self.refused({"App('Big')": "name", "App('a', timeout=-1)": "timeout", "App(x=1)": "x",
                      "App(audit_log='x')": "audit_log", "app.handler('gone')": "gone",
                      "app.handler('sh')": "sh", "app.handler('manifest')": "manifest"})

    def test_flags_and_positionals_that_break_a_rule_are_refused(self):
        def one(kind="string", **more):
            return dict(FLAG, type=kind, **more)
        ab, low = one(name="ab"), {"enum_values": ["low"]}
        rows = [{"flags": {"ab": spec}} for spec in (
            one("text"), one(shrot="a"), one("enum"), one(short="V"), one(short="ab"),
            one(pattern="["), one(env_vars=["A"]), one(default=5),
            one(env_vars=[{"name": "A", "nmae": "B"}]), one("integer", default="5"),
            one("boolean", default="no"), one("array", default="x"), {"type": "string"},
            one("enum", default="x", **low), one(pattern="^a$", default="b"))]
        rows += [{"flags": {"ab": spec}} for spec in (
            one("number", default=float("nan")), one("array", default=[1]),
            one("array", default=["x"], pattern="^y"), one("integer", default=7, pattern="^5"),
            one(env_vars=[{"name": "A", "x": 1}]))]
        rows += [{"flags": dict.fromkeys(names, one(short="a"))} for names in (
            ["ab", "cd"], ["output"], ["manifest"], ["dry-run"], ["A_b"])]
        rows += [{"positionals": places, "flags": {"cd": one()}} for places in (
            [one()], [dict(ab, type="array")], [ab, ab], [one(name="cd")],
            [ab, dict(ab, name="b", required=True)])]
        nan = "__import__('math').nan"
        rows = [repr(row).replace("nan", nan) for row in rows]
        self.refused({f"app.register('bad', description='X', danger_level='destructive', **{row})":
                      '"bad".*(flag|positional)' for row in rows})

    def test_what_agentcli_brings_to_some_commands_is_a_flag_like_others_for_the_rest(self):
        out = self.python("""from app import app, command, flag
for danger in "safe", "mutating":
    command("own-" + danger, danger, flags={name: flag("string", default=name) for name in (
        "operation-id", "dry-run", "confirm-destructive", "input")})(
            lambda args, ctx: dict(args, dry=ctx.dry_run))
    app.run(["own-" + danger, "--operation-id", "x", "--dry-run=v"])""")
        for e in map(json.loads, out.splitlines()):
            self.assertEqual((e["data"], e["meta"].get("dry_run")), ({
                "operation-id": "x", "dry-run": "v", "input": "input", "dry": False,
                "confirm-destructive": "confirm-destructive"}, None))

    def test_what_the_schema_of_flags_allows_is_taken(self):
        out = self.python("""from app import app, command, flag
command("odd", flags={"none": flag("string", default=None), "few": flag(
    "array", enum_values=["a", "b"])})(lambda args, ctx: args)
print([app.run(["odd", *more]) for more in ([], ["--few=a", "--few=b"], ["--few=c"])])""")
        self.assertRegex(out, r'(?s)"data": \{\}.*"few": \["a", "b"\].*one of a, b.*\[0, 0, 2\]')

    def test_a_fault_of_agentclis_own_is_told_everywhere_as_any_other_end(self):
        self.env["LEDGER_AUDIT_LOG"] = f"{self.dir}/log"
        out = self.python("""from app import app
app.commands["sh"].entry["argv"] = 5  # as no caller can
print(app.run(["--output=copy", "sh"]))""")
        copy, log = [json.loads((self.dir / name).read_bytes()) for name in ("copy", "log")]
        self.assertEqual((out, end(copy), log["exit_code"]), ("1\n", (1, "INTERNAL_ERROR"), 1))

    def test_a_command_line_of_its_own_making_leaves_the_programs_signals_alone(self):
        self.python("""from app import app
before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
try: app.main(["put", "x"])
except SystemExit as end: assert end.code == 0
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before""")

    def test_what_a_program_printed_stays_before_the_envelope(self):
        out = self.python("""from app import app
for argv in ["--version"], ["put"], ["nope"], ["journal"]: print("before"); app.run(argv)""")
        self.assertRegex(out, r"\A(before\n\{.*\}\n){4}\Z")

    def test_two_apps_in_one_process_share_nothing(self):
        out = self.python("""from app import app
two = agentcli.App("two", "2.0")
two.register("echo", description="E", danger_level="safe")
two.handler("echo")(lambda args, ctx: ctx.warn("TWO", "w") or [])
print([a.run(argv) for a, argv in (
    (app, ["echo", "x"]), (two, ["echo"]), (two, ["need"]), (app, ["echo"]))])
""", env={"TWO_FORMAT": "text"})
        self.assertRegex(out, r'\{.*: \{"what": "x"\}.*\n\[\]\n\{"ok": true, "data": \{\}, "error":'
                              r' null, "warnings": \[\], .*"1.4.0".*\n\[0, 0, 2, 0\]\n\Z')

    def test_a_run_leaves_the_process_as_it_was(self):
        out = self.python("""from app import app
for default in signal.SIG_IGN, signal.SIG_DFL:
    for number in signal.SIGCHLD, signal.SIGWINCH: signal.signal(number, default)
    assert app.run(["echo"]) == 0 and {default} == {*map(
        signal.getsignal, (signal.SIGCHLD, signal.SIGWINCH))}
for number in signal.SIGCHLD, signal.SIGUSR1, signal.SIGHUP: signal.signal(number, print)
signal.signal(signal.SIGWINCH, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
child = os.fork() or os._exit(7)
def state():
    return ([signal.getsignal(n) for n in signal.valid_signals()], os.listdir("/dev/fd"),
            signal.pthread_sigmask(signal.SIG_BLOCK, []), dict(os.environ), os.getcwd())
before = state()
codes = [app.run(line.split()) for line in (
    "echo", "--session s put", "nope", "--help", "sh -c false", "doctor", "wild 1/0",
    "--timeout=0.2 wild time.sleep(60)")]
print(codes, state() == before, os.waitpid(-1, 0) == (child, 7 << 8))
try: print(os.waitpid(-1, 0))
except ChildProcessError: print("no other child")""").split("\n")
        self.assertEqual(out[-3:], ["[0, 0, 2, 0, 1, 0, 1, 10] True True", "no other child", ""])

    def test_where_nobody_can_wait_for_a_signal_and_a_time_at_once(self):
        out = self.python("""import _signal, threading; from app import app
for name in "sigtimedwait", "sigwaitinfo":
    if hasattr(_signal, name): delattr(_signal, name)
other = threading.Thread(target=time.sleep, args=(1.5,))
other.start()
signal.alarm(60)
codes = [app.run(["--timeout=0.5", "sh", "-c", line]) for line in ("exit 7", "sleep 300")]
other.join()
codes += [app.run(["--timeout=9", "sh", "-c", f"kill -{name} {os.getpid()}; sleep 300"])
          for name in ("TERM", "ALRM")]
print(codes, 0 < signal.alarm(0) <= 60)""")
        self.assertEqual(out, "[7, 10, 143, 142] True\n")

    @on_linux
    def test_what_the_kernel_says_of_its_own_time_is_not_told_to_the_tool(self):
        out = self.python("""import resource; from app import app
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXCPU])
used = sum(os.times()[:2])
resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1, 60))
while signal.SIGXCPU not in signal.sigpending(): pass
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
print(app.run(["sh", "-c", "sleep 0.3; exit 7"]))""")
        self.assertEqual(out, "7\n")

    @on_linux
    def test_what_failed_before_a_handler_began_leaves_nothing_behind(self):
        out = self.python("""import resource, sys; from app import app
sys.stdout.close(); sys.stdout = object()
print(app.run(["put"]), file=sys.stderr)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), hard[1]))
print(app.run(["--session=s", "put", "x"]), file=sys.stderr)
resource.setrlimit(resource.RLIMIT_AS, hard)
app.run(["--session=s", "put", "x"])
os._exit(0)""")
        ends = [json.loads(line) for line in out.splitlines()]
        self.assertEqual([e["error"] and e["error"]["code"] for e in ends],
                         [None, "INTERNAL_ERROR", None])
        self.assertNotIn("idempotency_hit", ends[2]["meta"])

    def test_a_handler_runs_in_a_thread_of_a_pool_too(self):
        out = self.python("""from app import app; import asyncio
async def main():
    return await asyncio.get_running_loop().run_in_executor(None, app.run, ["put", "x"])
print(asyncio.run(main()))""")
        self.assertRegex(out, r'\A\{"ok": true.*"created".*\}\n0\n\Z')

    def test_what_a_handler_prints_is_on_stderr_wherever_the_program_prints(self):
        r = self.call("""from app import app; import agentcli, contextlib, io, os, sys
for stdout in (io.StringIO(), open(os.dup(1), "w"), None):
    print("before")
    with contextlib.redirect_stdout(stdout): code = app.run(["wild", 'print("said"); return {}'])
    assert code == 0 and not (stdout and stdout.seekable() and stdout.getvalue())
    print("after", flush=True)""", run=["-c"])
        self.assertRegex(r.out.decode(), r'\A(before\n\{"ok": true.*\}\nafter\n){3}\Z')
        self.assertEqual(r.err.count(b"said"), 3)

    def test_failures_and_faults_can_be_handed_over_by_a_pools_worker(self):
        out = self.python("""import pickle
class Own(agentcli.Failure):
    def __init__(self, more): super().__init__(5, "NOPE", "no such thing", [more], suggestion="s")
for error in (agentcli.Failure(3, "HALF", "half", {"a": 1}, True, context={"b": 2}), Own(7),
              agentcli.RegistrationError(["one", "two"])):
    again = pickle.loads(pickle.dumps(error))
    print(type(again) is type(error), str(again) == str(error), vars(again) == vars(error))
print(again, again.faults)""")
        self.assertEqual(out, "True True True\n" * 3 + "one; two ['one', 'two']\n")

    def test_a_handlers_signals_do_not_wake_the_programs_loop(self):
        out = self.python("""import signal, socket
from app import app
mine, loops = socket.socketpair()
mine.setblocking(False)
loops.setblocking(False)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.set_wakeup_fd(loops.fileno())
print(app.run(["wild", "os.kill(os.getpid(), signal.SIGUSR1); return {}"]))
try: print(mine.recv(9))
except BlockingIOError: print("asleep")""")
        self.assertRegex(out, r"\n0\nasleep\n\Z")

    def test_a_programs_own_timer_is_not_the_tools(self):
        out = self.python("""import signal
from app import app
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(os.getpid()))
signal.setitimer(signal.ITIMER_REAL, 0.1)
print(app.run(["sh", "-c", "sleep 0.3"]), app.run(["put"]), seen == [os.getpid()])""")
        self.assertRegex(out, r"\n0 0 True\n\Z")

    def test_it_works_in_a_zip_archive(self):
        shutil.copy(AGENTCLI, self.write("packed/agentcli.py", b""))
        self.write("packed/__main__.py", (self.dir / "app.py").read_bytes() + b"\napp.main()\n")
        zipapp.create_archive(self.dir / "packed", self.dir / "app.pyz")
        env = {"PYTHONPATH": None}
        answers = [self.call(*args, run=["app.pyz"], env=env) for args in (
            ["--version"], ["put", "x"], ["manifest"], ["doctor"], ["--help"])]
        self.assertEqual([answer.code for answer in answers], [0] * 5)
        version = answers[0].on_stdout["data"]
        self.assertEqual((version["version"], version["agentcli_sha256"]), ("1.4.0", None))

    def test_it_runs_in_another_thread_beside_a_busy_one(self):
        out = self.python("""import sys, threading; from app import app
sys.setswitchinterval(0.002)
stop, codes = threading.Event(), []
def run():
    codes.extend(app.run(["--timeout=5", "sh", "-c", "exit 0"]) for _ in range(25))
    stop.set()
threading.Thread(target=run).start()
while not stop.is_set(): pass
print(set(codes))""")
        self.assertIn("{0}", out)

    def test_a_program_binds_functions_to_what_a_file_declares(self):
        self.save(**{name: self.entry(**DECLARED) for name in ("note.add", "nobody")})
        self.write("bad.json", b'{"commands": {"a": {}}, "nmae": 1}')
        out = self.python("""app = agentcli.load("manifest.json")
app.handler("note.add")(lambda args, ctx: {"name": app.name})
print([app.run(argv) for argv in (["note", "add"], ["nobody"], ["task", "show"])])
print(agentcli.main(["nope"]))
bad = agentcli.load("bad.json")
bad.handler("a")(print)
bad.register("svc", description="x", danger_level="safe", http={"method": "GET", "path": "/"})
print([bad.run(argv) for argv in (["a"], ["--version"], ["svc"], ["journal"])])""")
        self.assertRegex(out, r'(?s)"name": "ledger"\}.*NO_HANDLER.*\ntask\n\[0, 4, 0\]\n\{'
                              r'.*"INVALID_MANI.*\}\n2\n'
                              r'\{.*"INVALID_MANI.*nmae.*name.*"a\\".*descrip.*\}\n'
                              r'\{"ok": true.*\n\{"schema_version": 1.*\n\{"ok": false.*'
                              r'\[2, 0, 2, 2\]')

    def test_every_public_name_has_a_docstring_and_annotations(self):
        self.assertEqual(self.python("""from inspect import isfunction, signature
for name in agentcli.__all__:
    thing = getattr(agentcli, name)
    for part, one in [(name, thing), *vars(thing).items()]:
        if part == name or isfunction(one) and (part[0] != "_" or part == "__init__"):
            has = {"self", *getattr(one, "__annotations__", ())}
            asked = {"return", *signature(one).parameters} if isfunction(one) else has
            if not (one.__doc__ or part == "__init__") or asked - has: print(name, part, asked)
print(*agentcli.__all__, *[c.name for c in agentcli.ExitCode][8:])"""), (
            "App Context ExitCode Failure RegistrationError load main read_input resolve_exit_code "
            "AUTH_REQUIRED PAYMENT_REQUIRED TIMEOUT RATE_LIMITED UNAVAILABLE REDIRECTED\n"))

    def test_the_bounded_reader_reads_at_most_one_byte_past_its_limit(self):
        with open(self.write("file", b"x" * 100), "rb") as stdin:
            out = self.python("""
for args in ("file", 100), ("file", 99), ("gone",), ("-", 100), ("-", 50):
    os.lseek(0, 0, 0)
    try: print(len(agentcli.read_input(*args)), end=" ")
    except agentcli.Failure as failure: print(failure.exit_code, failure, end=" ")
    print(os.lseek(0, 0, 1))""", stdin=stdin)
        self.assertRegex(out, r"\A100 0\n2 .*99.* 0\n2 .*gone.* 0\n100 100\n2 .*50.* 51\n\Z")

    def test_the_readmes_examples_run_as_they_stand(self):
        readme = pathlib.Path(FOLDER, "README.md").read_text(encoding="utf-8")
        first, more = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
        shutil.copy(AGENTCLI, self.dir)
        books = self.write("books.csv", b"a\nb\nc\n")
        for example in first, first.replace("\nif __name__", f"\n{more}\n\nif __name__"):
            self.write("example.py", example.encode())
            r = self.call("balance", run=["example.py"])
            self.assertEqual(r.on_stdout["data"], {"currency": "EUR", "balance": "12.50"})
            r = self.call("balance", "--currency=USD", run=["example.py"])
            self.assertEqual(end(r.on_stdout)[:2], (5, "NO_SUCH_CURRENCY"))
        drop, line = ["entry", "drop", "1"], "b\n"
        for option, code, data, left in (
                ("--dry-run", None, {"would_drop": line}, b"a\nb\nc\n"),
                ("--json", "CONFIRMATION_REQUIRED", {"would_drop": line}, b"a\nb\nc\n"),
                ("--confirm-destructive", None, {"effect": "deleted", "dropped": line}, b"a\nc\n")):
            e = self.call(*drop, option, run=["example.py"]).on_stdout
            self.assertEqual((end(e)[1], e["data"], books.read_bytes()), (code, data, left), e)

    def test_a_program_that_has_no_descriptor_left_gets_an_answer_to_each_call(self):
        out = self.python("""import resource; from app import app
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
app.register("away", description="d", danger_level="safe", arguments="passthrough",
             argv=["/bin/sh", "-c", "exit 7"])
held = []
try:
    while True: held.append(os.dup(0))
except OSError: os.dup2(1, 2)
for line in ("away", "wild 1", "manifest", "--version", "journal", "doctor"):
    print("code", app.run(["--format", "json", *line.split()]), flush=True)
""")
        answers = [json.loads(line) for line in out.split("\n") if line[:1] == "{"]
        self.assertEqual(out.count("code "), 6, out)
        self.assertEqual([e["meta"]["exit_code"] for e in answers],
                         [int(code) for code in re.findall("code ([0-9]+)", out)], out)
        self.assertEqual(answers[0]["data"], {"exit_code": 7})


class DeclaredTest(AppCase):
    def test_every_type_of_argument_its_letter_and_its_place(self):
        self.gives({
            "echo --greet= -n +3 --rate 2.5 --loud --tag a --level low --code abc --tag=b x 2": {
                "greet": "", "count": 3, "rate": 2.5, "loud": True, "tag": ["a", "b"],
                "level": "low", "code": "abc", "what": "x", "n": 2},
            "echo -g hi -n3 -lq -ta -t a": {
                "greet": "hi", "count": 3, "loud": True, "quiet": True, "tag": ["a", "a"]},
            "echo -n 5 --count=+5 -l --loud": {"count": 5, "loud": True}, "strict": {"size": 10},
            "echo a -5": {"what": "a", "n": -5}, "echo --rate -.5": {"rate": -0.5},
            "echo a -n -5 2": {"count": -5, "what": "a", "n": 2}, "echo -- --": {"what": "--"},
            "echo -- --help -5": {"what": "--help", "n": -5}, "echo --greet=-h": {"greet": "-h"}})

    def test_the_value_of_an_option_is_no_part_of_a_path(self):
        self.gives({"find -n add": {"name": "add"}, "find --name add": {"name": "add"},
                    "find -nadd": {"name": "add"}, "find add -n": {"now": True},
                    "find --json add": {}})
        e, = self.tell("find -n x add")
        self.assertEqual(end(e), (2, "ARG_ERROR"))

    def test_letters_and_numbers_mean_the_same_on_every_version_of_python(self):
        self.gives({"digit --offset -3": {"offset": -3}, "digit --offset -1e5 -4": {
            "offset": -1e5, "ipv4": True}, "digit -a4 -.5": {"all": True, "ipv4": True, "n": -.5},
            "digit -5.": {"n": -5.0}, "echo -ln5": {"loud": True, "count": 5},
            "echo -lg=x": {"loud": True, "greet": "x"}, "echo -n=5": {"count": 5},
            "echo -g -": {"greet": "-"}, "echo -g=": {"greet": ""}})
        for line, says in {"digit -a=": "-=", "digit -4=1": "-=", "digit -ax": "-x",
                           "digit -5a": "-5", "digit -a5": "-5", "echo -l1": "-1",
                           "echo -l-json": "-l takes no", "echo -l-": "-l takes no",
                           "echo -g": "needs", "echo -g -l": "needs"}.items():
            e, = self.tell(line)
            self.assertEqual(end(e), (2, "ARG_ERROR"), line)
            self.assertRegex(e["error"]["message"], says)

    def test_global_options_may_stand_anywhere_unless_placement_is_strict(self):
        for e in self.tell("--timeout 7 task --json ping", "task ping --timeout=7 --format json",
                           "--json task --timeout=7 ping", env={"LEDGER_FORMAT": "text"}):
            self.assertEqual((e["data"], e["meta"]["timeout_ms"]), ({"pong": True}, 7000))
        rows = self.tell("--timeout 7 strict --size 1 x", "strict x --timeout 7",
                         "strict --timeout 7 x", "strict --json")
        self.assertEqual([end(e)[0] for e in rows], [0, 2, 2, 2])

    def test_a_bad_argument_and_the_nearest_names_are_told_before_any_side_effect(self):
        rows = {"put --timeout=" + n: "--timeout" for n in ("", "nan", "-1", "1_0")}
        rows.update(("echo --rate=" + n, "--rate") for n in ("", "nan", "inf", "1e999", "1_0"))
        rows.update(("echo -n" + n, "--count") for n in ("2.5", "1e3", "0x1", "\u0663", "1_0", "="))
        rows.update({
            "echo --level mid": "--level.*low.*high", "echo --code abcd": "--code", "echo -z": "-z",
            "need": "what", "echo a b": "n must", "echo a 2 third": "third", "strict": "SIZE must",
            "need x": "--must", "need x --must": "--must needs a value", "echo -lz": "no option -z",
            "need x --mus=x": "--mus ", "echo --loud=yes": "--loud.*no value", "put x y": "n must",
            "--version=1": "--version.*no value", "echo -g a --greet b": "--greet.*twice",
            "put --dry-run": "--dry-run", "task ping --idempotency-key k": "--idempotency-key",
            "put --output=e.json --bogus": "--bogus", "echo -n1 --count 2": "--count.*twice",
            "--timeout 1 put --timeout 2": "--timeout.*twice", "drop --dry-run x y": "y"})
        rows.update({
            "echo --gret x": "--gret .*--greet", "ehco": "ehco.*echo", "drop --dry-rn": "--dry-run",
            "task pign": "task ping", "echo --level hihg": "Did you mean high"})
        for line, e in zip(rows, self.tell(*rows, env={"LEDGER_SESSION_ID": "s", "SIZE": "x"})):
            with self.subTest(line):
                self.assertEqual((end(e), e["error"]["phase"]), ((2, "ARG_ERROR"), "validation"))
                self.assertRegex(json.dumps(e["error"]), rows[line])
        self.assertEqual(sorted(os.listdir(self.dir)), ["app.py", "manifest.json"])

    def test_the_environment_stands_between_option_and_default(self):
        for e in self.tell("tags", "strict", env={"TAGS": "B 1", "SIZE": "x"}):
            self.assertEqual(end(e), (2, "ARG_ERROR"))
        self.gives({"strict": {"size": 7}, "strict --size 1": {"size": 1},
                    "echo": {"greet": "env", "loud": True, "tag": ["a"]},
                    "echo -g x -t b": {"greet": "x", "tag": ["b"], "loud": True}}, env={
                        "GREET": "", "GREETING": "env", "SIZE": "7", "LOUD": "1", "TAG": "a"})


class HandlerTest(AppCase):
    def test_what_it_warned_of_is_told_however_it_ends(self):
        warn = "ctx.warn('ONE', '1'); ctx.warn('TWO', 'x' * 99999)\n"
        rows = (("time.sleep(60)", 10), ("os._exit(3)", 1), ("os.kill(os.getpid(), 9)", 1),
                ("raise SHUT", 7), ("return {'effect': 'noop'}", 0), ("return 5", 1))
        told = self.tell(*[["--timeout=1", "wild", warn + body] for body, _ in rows])
        for e, (body, code) in zip(told, rows):
            with self.subTest(body):
                self.assertEqual(e["meta"]["exit_code"], code)
                self.assertEqual([w["code"] for w in e["warnings"]], ["ONE", "TWO"])

    def test_its_threads_are_waited_for_though_it_fails(self):
        e, = self.wild("import threading\ndef slow(): time.sleep(0.3); open('slow', 'w').close()\n"
                       "threading.Thread(target=slow).start()\nraise SHUT")
        self.assertEqual((end(e), os.path.exists(self.dir / "slow")), ((7, "SHUT"), True))

    def test_what_it_returns_is_the_data_whatever_it_does_to_its_process(self):
        rows = {r'return {"a\udc00": "x\ud800y\U0001f600"}': {"a\ufffd": "x\ufffdy\U0001f600"},
                "return None": None, 'return [1, 2.5, None, {"b": []}]': [1, 2.5, None, {"b": []}]}
        rows.update((body + WELL, {"effect": "noop"}) for body in (
            "os.fork()", "print(1); os.close(1)", "os.closerange(0, 99)", "sys.stdout.close()",
            "sys.stdout = sys.stderr = None", "os.environ.clear()", "app.run(['echo'])",
            "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
            "sys.modules.clear()", "if not os.fork(): 1 / 0\nos.wait()"))
        for body, data in rows.items():
            with self.subTest(body):
                e, = self.wild(body)
                self.assertEqual((end(e), e["data"]), ((0, None), data))

    def test_whatever_else_it_does_is_an_internal_error_with_a_traceback(self):
        gone = {"os._exit(3)": "code 3", "os._exit(0)": "code 0", "os.kill(os.getpid(), 9)": "KILL",
                "if os.fork(): os._exit(4)" + WELL: "code 4", "os.kill(os.getpid(), 15)": "TERM"}
        rows = dict.fromkeys((
            'return {"a": float("nan")}', 'return [float("inf")]', 'return {"a": b"x"}', "return 3",
            'return b"x"', "return {1}", 'return {"a": {1}}', "a = []; a.append(a); return a",
            "a = []\nfor _ in range(99999): a = [a]\nreturn a", "1 / 0", "sys.exit(3)",
            "raise KeyboardInterrupt", "raise KeyError('\\udc00')", "ctx.warn('LOW', 5)"),
            "handler")
        for how, e in zip([*rows.values(), *gone.values()], self.wild(*rows, *gone)):
            self.assertRegex(f"{end(e)} {e['error']['message']}", "1, 'INTERNAL_ERR.*" + how)
            self.assertEqual(e["data"], {"partial": True} if how in gone.values() else None)
        self.assertGreaterEqual(self.err.count(b"Traceback"), len(rows))

    def test_what_it_prints_goes_to_stderr_and_its_warnings_are_told(self):
        e, bare = self.wild(
            "print('1', end='', flush=True); os.write(1, b'2'); ctx.log('3\\udcff')\n"
            "subprocess.call(['echo', '4']); print('5'); ctx.warn('SIX', 's')" + WELL, "return {}")
        self.assertRegex(self.err, rb"\A123.*\n4\n5\n\Z")
        self.assertEqual(e["warnings"], [{"code": "SIX", "message": "s"}])
        self.assertIn("effect", str(bare["warnings"]))
        for body in 'return {"effect": "banana"}', 'return {"effect": None}', "return []":
            e, = self.wild(body)
            self.assertEqual([w["code"] for w in e["warnings"]], ["EFFECT_MISSING"])

    def test_its_own_failure_goes_to_the_output_file_whatever_its_code(self):
        for code in "ARG_ERROR", "INVALID_MANIFEST", "OWN":
            body = f"raise agentcli.Failure(2, '{code}', 'bad')"
            e, = self.tell(["--output", f"{code}.json", "wild", body])
            self.assertEqual(json.loads((self.dir / f"{code}.json").read_bytes()), e)

    def test_descriptors_that_the_caller_closed_change_no_answer(self):
        for closed in {0}, {2}, {0, 2}:
            r = self.call("wild", "print(1)" + WELL, run=PROGRAM, preexec_fn=lambda fds=closed: [
                os.close(fd) for fd in fds] and None)
            self.assertTrue(r.on_stdout["ok"], closed)

    def test_what_it_has_begun_is_done_before_its_end_is_told(self):
        for body in ("import threading\nthreading.Thread(target=lambda: (time.sleep(0.3), do('t')))"
                     ".start()" + WELL,
                     "from concurrent.futures import ThreadPoolExecutor as Pool\n"
                     "pool = Pool(); pool.submit(lambda: (time.sleep(0.3), do('t')))" + WELL):
            e, = self.wild(body)
            self.assertTrue(e["ok"])
        if sys.version_info >= (3, 9):  # before that, Python's pools ended with their process
            self.assertEqual((self.dir / "done").read_text(), "tt")

    def test_a_reader_of_stderr_that_left_does_not_stop_it(self):
        r, w = os.pipe()
        os.close(r)
        e, = self.tell(["wild", "ctx.log('x' * 9)\ndo('l')" + WELL], stderr=w)
        os.close(w)
        self.assertEqual((e["ok"], (self.dir / "done").read_text()), (True, "l"))

    def test_an_answer_that_only_its_own_limits_let_pass_is_told_as_none(self):
        e, = self.wild("getattr(sys, 'set_int_max_str_digits', int)(0); n = 10 ** 5000\n"
                       "return {'effect': 'noop', 'n': n}")
        has_limit = hasattr(sys, "set_int_max_str_digits")
        self.assertEqual(end(e), (1, "INTERNAL_ERROR") if has_limit else (0, None))

    def test_fifty_megabytes(self):
        r = self.call("wild", 'return {"effect": "noop", "x": "x" * 50000000}', run=PROGRAM)
        self.assertEqual(len(r.on_stdout["data"]["x"]), 50000000)

    def test_a_failure_tells_all_its_fields_and_no_others(self):
        error = {"code": "NO_TASK", "message": "None \u00e9", "retryable": True,
                 "suggestion": "Look", "phase": "execution", "fix_required": "Make one",
                 "fix_command": "ledger put", "context": {"id": 7}, "retry_after_ms": 1500}
        e, = self.wild(f"raise agentcli.Failure(255, data={{'seen': [1]}}, **{error})")
        self.assertEqual((end(e)[0], e["data"], e["error"]), (255, {"seen": [1]}, error))
        for wrong in ("0, 'AB', 'm'", "256, 'AB', 'm'", "-1, 'AB', 'm'", "5, 'A', 'm'",
                      "5, 'AB', ''", "5, 'AB', 'm', 'text'", "5, 'AB', 'm', phase='x'",
                      "5, 'AB', 'm', {1}", "5, 'AB', 'm', context=3", "5, 'AB', 'm', None, 'yes'"):
            with self.subTest(wrong):  # `tell` checks the shape
                self.assertFalse(self.wild(f"raise agentcli.Failure({wrong})")[0]["ok"])
        for wrong in "'no code', 'm'", "'CODE', ''", "5, 'm'", "'CODE', None":
            self.assertFalse(self.wild(f"ctx.warn({wrong})" + WELL)[0]["ok"])

    @on_linux
    def test_timeout_and_signals_end_it_whatever_it_does_and_nothing_survives(self):
        say, sleep, term = "print('ready', flush=True)", "time.sleep(300)", signal.SIGTERM
        bodies = {
            f"{say}; {sleep}": term, f"os.system({TREE!r})": term,
            f"signal.signal(15, print)\n{say}; all(itertools.repeat(1))": term,  # one C call
            f"try: {say}; {sleep}\nexcept BaseException: pass{WELL}": signal.SIGINT,
            f"if not os.fork():\n os.setsid()\n if not os.fork(): os.closerange(0, 9); {sleep}\n"
            f" {say}\n os._exit(0)\nos.wait(); {sleep}": term,  # an orphan in its session
            "if not os.fork():\n os.setsid(); signal.signal(15, signal.SIG_IGN)\n"  # or not yet one
            f" {say}; time.sleep(0.2)\n if os.fork(): os._exit(0)\n {sleep}\n{sleep}": term}
        calls = [(self.start("--timeout=3", "wild", body, run=PROGRAM), None) for body in bodies]
        for body, number in bodies.items():
            calls.append((self.start("wild", body, run=PROGRAM), number))
            read_to(calls[-1][0].stderr.fileno(), b"ready\n")
            calls[-1][0].send_signal(number)
        for p, number in calls:
            e = self.end(p).on_stdout
            self.assertEqual(end(e), (128 + number, "CANCELLED") if number else (10, "TIMEOUT"))
            self.assertEqual(e["data"], {"partial": True})
        self.gone()

    def test_signals_that_come_while_the_answer_is_told_do_not_change_the_exit_code(self):
        for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
            p = self.start("wild", "print('ready', flush=True); time.sleep(300)", run=PROGRAM)
            read_to(p.stderr.fileno(), b"ready\n")
            while p.poll() is None:
                p.send_signal(number)
                time.sleep(0.001)
            self.assertEqual(end(self.end(p).on_stdout), (128 + number, "CANCELLED"))

    def test_ctrl_c_on_a_terminal_ends_it(self):
        app = ("/bin/sh", "-c", 'python=$1; shift 2; exec "$python" -c "$0" "$@"', PROGRAM[1])
        t = Terminal(self, "--json", "wild", "print('ready'); time.sleep(300)", wrap=app)
        t.ready()
        os.write(t.fd, b"\x03")
        self.assertEqual(end(t.end().on_stderr), (130, "CANCELLED"))

    def test_a_repeat_in_a_session_or_with_a_key_returns_the_data_and_does_nothing(self):
        most = 65536 - len(json.dumps({"effect": "created", "kept": ""}))
        put, key = "--session s put a %d", "--idempotency-key k put "
        less, more, fail = put % most, put % (most + 1), ["--session", "s", "wild", "raise SHUT"]
        rows = self.tell(less, less, less + " --rerun", "put a", "--session t put a", key + "a",
                         key + "a --session u", key + "b", more, more, fail, fail)
        self.assertEqual([e["data"]["effect"] for e in rows[:7]], [
            "created", "noop", "created", "created", "created", "created", "noop"])
        self.assertEqual(rows[1]["data"]["kept"], "x" * most)
        self.assertIs(rows[1]["meta"]["idempotency_hit"], True)
        self.assertEqual([end(e) for e in rows[7:]], [  # over 64 KiB are not kept
            (6, "IDEMPOTENCY_CONFLICT"), (0, None), (3, "OUTCOME_UNKNOWN"), *[(7, "SHUT")] * 2])
        self.assertEqual((rows[11]["data"], (self.dir / "done").read_bytes()), ([1], b"pppppp"))
        self.assertIn("--rerun", rows[11]["error"]["suggestion"])

    def test_data_that_looks_like_a_record_is_none(self):
        self.tell("--session=s put x")
        file, = (self.dir / "home/.local/state/ledger/journal").glob("*.jsonl")
        name = json.loads(file.read_text().splitlines()[0])["id"]
        file.write_bytes(b"")
        body = 'return {"id": "%s", "effect": "noop", "event": "finished"}' % name
        self.tell(["--session=s", "wild", body], "--session=s put x", "--session=s put x")
        self.assertEqual((self.dir / "done").read_text(), "pp")

    def test_a_failure_that_is_replayed_as_text_did_not_end_well(self):
        lines = [["--session=s", "--format=text", "wild", "raise SHUT"]] * 2
        r = self.call(MANY, ascii(lines), run=["-c"])
        self.assertEqual((r.out.count(b"\n7\n"), r.out.count(b"well")), (2, 0), r.out)
        self.assertIn(b"--rerun", r.err)

    def test_a_repeat_as_text_prints_the_data_and_says_so_beside_it(self):
        lines = [["--session=s", "--format=text", "put", "x", "2"]] * 2
        r = self.call(MANY, ascii(lines), run=["-c"])
        self.assertRegex(r.out, rb'(?s)\A\{.*"created".*"xx".*\n0\n\{.*"noop".*\}\n0\n\Z')
        self.assertRegex(r.err, rb"\Aledger: not run again.*--rerun[^\n]*\n\Z")

    def test_a_large_failure_is_told_as_one_that_ended(self):
        body = "raise agentcli.Failure(5, 'BAD', 'm', context={'x': 'y' * 1500000})"
        first, again = self.tell(*[["--session=s", "wild", body]] * 2)
        self.assertEqual((end(first), end(again)), ((5, "BAD"), (3, "OUTCOME_UNKNOWN")))
        self.assertIn("too large", again["error"]["message"])
        entries = self.tell("journal")[0]["data"]["entries"]
        self.assertEqual([e["error_code"] for e in entries], ["BAD"])

    def test_many_warnings_leave_an_entry_in_the_audit_log(self):
        log = self.dir / "log"
        self.tell(["wild", "for n in range(3000): ctx.warn('LOW_%d' % n, 'm')" + WELL],
                  env={"LEDGER_AUDIT_LOG": str(log)})
        entry, = log.read_bytes().splitlines()
        self.assertLess(len(entry), 16384)
        self.assertTrue(json.loads(entry)["truncated"])

    def test_another_folder_or_file_on_stdin_is_another_call(self):
        read = ["--session", "s", "wild", "return {'effect': 'noop', 'read': sys.stdin.read()}"]
        for name in "one", "two":
            with open(self.write(name + "/in", name.encode()), "rb") as stdin:
                self.assertEqual(self.tell(read, stdin=stdin)[0]["data"]["read"], name)
            self.gives({"--session s put": {}}, cwd=self.dir / name)


class DestructiveTest(AppCase):
    def test_it_previews_until_it_is_confirmed_and_is_then_done_once_in_a_session(self):
        dry, sure, asks = " --dry-run", " --confirm-destructive", (2, "CONFIRMATION_REQUIRED")
        more, does = ("", dry, dry + sure, sure, sure, ""), {"would": "drop", "args": {"what": "x"}}
        *rows, fails, bad = self.tell(*["--session s drop x" + s for s in more], "drop", "drop x y")
        self.assertEqual([end(e) for e in (*rows, fails, bad)], [
            asks, *[(0, None)] * 4, asks, (7, "SHUT"), (2, "ARG_ERROR")])
        self.assertEqual([e["data"] for e in rows], [
            does, does, does, {"effect": "deleted"}, {"effect": "noop"}, does])
        self.assertEqual([e["meta"].get("dry_run") for e in rows[1:4]], [True, True, None])
        self.assertIn("--confirm-destructive", str(rows[0]["error"]))
        self.assertEqual((self.dir / "done").read_bytes(), b"d")


class SpecTest(AppCase):
    def test_every_outcome_is_one_envelope_help_off_stdout_no_colour_no_wait_on_stdin(self):
        rows = {"--help": 0, "task -h": 0, "echo -lh": 0, "--version": 0, "task ping": 0, "task": 2,
                "nope": 2, "--nope": 2, "put a": 0, "drop": 7, "drop x": 2, "unbound": 4,
                "doctor": 0, "wild 1/0": 1, "wild os._exit(0)": 1, "journal": 0, "manifest": 0,
                "audit-log": 4, "--timeout=.2 wild time.sleep(60)": 10, "--schema put": 0}
        silent, other = socket.socketpair()
        with silent, other:
            told = self.tell(*rows, [], stdin=silent, env={"FORCE_COLOR": "1"})
        self.assertEqual([end(e)[0] for e in told], [*rows.values(), 0])
        self.assertEqual([e["meta"].get("help") for e in told], [True] * 3 + [None] * 17 + [True])
        self.assertRegex(self.err.decode(), "(?s)Do echo.*Do task.ping.*--level")
        shown = Terminal(self, env={"NO_COLOR": "1", "TERM": "xterm"}).end().err
        self.assertNotIn(b"\x1b", self.err + shown)


class DoctorTest(Case):
    def doctor(self, failing, says, *args, env=(), **root):
        """The names of all checks; that these fail, with a fix, and what is told of them."""
        self.save(root=root)
        e = self.call(*args, "doctor", env=env).on_stdout
        self.assertEqual(end(e), (4, "CHECKS_FAILED") if failing else (0, None))
        bad = [c for c in e["data"]["checks"] if not c["ok"]]
        self.assertEqual(", ".join(c["name"] for c in bad if c["fix"]), failing)
        self.assertRegex(json.dumps([e["error"], bad]), f"{failing}.*{says}")
        self.assertNotIn("secret-1", str(e))
        return [c["name"] for c in e["data"]["checks"]]

    def test_each_failure_is_named_with_its_fix_in_data_of_one_shape(self):
        del self.commands["gone"]
        file = str(self.dir / "manifest.json")
        with socket.socket() as service:
            service.bind(("127.0.0.1", 0))
            fine = {"base_url": f"http://127.0.0.1:{service.getsockname()[1]}",
                    "token_file": str(self.write("token", b"secret-1", 0o600))}
            names = self.doctor("service", "127.0.0.1", **fine)
            service.listen(9)
            for failing, fix, env, root in (
                    ("", "", {}, {}), ("token file", "no-such", {}, {"token_file": "/no-such"}),
                    ("token file", "chmod 600", {}, {"token_file": file}),
                    ("token file, service", "http://", {}, {"base_url": "ftp://x"}),
                    ("state folder", "absolute", {"LEDGER_STATE_DIR": "x"}, {}),
                    ("audit log", "absolute", {"LEDGER_AUDIT_LOG": "x"}, {}),
                    ("state folder", file, {"LEDGER_STATE_DIR": file + "/x"}, {})):
                self.assertEqual(self.doctor(failing, fix, env=env, **dict(fine, **root)), names)
        self.commands = {"get": self.entry(**dict(DECLARED, http={
            "method": "GET", "path": "/x"})), "gone": self.entry("no-such-program")}
        self.doctor("tool of gone, service", "no-such-program.*base_url")
        self.commands = {"there": self.entry("{python}", "{manifest_dir}/manifest.json"),
                         "missing": self.entry("{python}", "{manifest_dir}/gone.py")}
        self.doctor("tool of missing", "gone.py")
        self.commands.clear()
        self.doctor("service", "no URL", base_url="http://" + "a" * 64 + ".example")
        self.doctor("", "", base_url="http://service.invalid", env={"http_proxy": "http://x:1"})

    def test_it_shows_a_person_no_escape_sequence(self):
        r = self.call("--format=text", "--manifest", "\x1b[31mgone.json", "doctor")
        self.assertRegex(r.out.decode(), r"(?s)\Aok   python: [^\x1b]+MEND manifest[^\x1b]+\n\Z")

    def test_it_runs_with_a_broken_or_missing_manifest(self):
        broken = self.write("bad.json", b'{"commands": {}, "nmae": 1}')
        self.doctor("manifest", "nmae", "--manifest", broken)
        self.doctor("manifest", "gone.json", "--manifest", "gone.json")


# ---- what strangers may write: seeded, bounded; `make fuzz` does the same for minutes ------------

FUZZ_ATOMS = (None, True, 0, -1, 1e308, "", "x", "a b", "\0", "\ud800", "\u00e9", "{x}", "/",
              "strict", "passthrough", [], {}, [1], {"a": 1})
FUZZ_WORDS = """task add list ingest lint operation get manifest journal audit-log doctor --json x -
--format text json --format=json --timeout 5 -h --help -V --input --operation-id --etag --limit 3
--cursor W10= --since 1h --rerun --session --schema --manifest -x -nh -5 --state open -- \udcff
--output /dev/null --idempotency-key \u00e9"""
FUZZ_RECORD = {"id": "0" * 32, "event": "finished", "run": "r", "at": 1.0, "command": "c", "end": 2,
               "exit": 1, "data": {}, "error": {"code": "X"}}


class FuzzTest(Case):
    """Whatever comes through a door, it ends in a value or in one of agentcli's own failures."""

    def setUp(self):
        super().setUp()
        self.addCleanup(sys.path.remove, FOLDER)
        sys.path.insert(0, FOLDER)
        self.agentcli = __import__("agentcli")
        self.random = random.Random(int(os.environ.get("FUZZ_SEED") or 1))
        self.deadline = time.monotonic() + float(os.environ.get("FUZZ_SECONDS") or 1)

    def places(self, value):
        """Every (container, key) inside a JSON value."""
        keys = list(value) if isinstance(value, dict) else range(len(value)) \
            if isinstance(value, list) else ()
        for key in keys:
            yield value, key
            yield from self.places(value[key])

    def mutant(self, value):
        value = json.loads(json.dumps(value))
        for _ in range(self.random.randint(1, 3)):
            inside, key = self.random.choice(list(self.places(value)) or [([0], 0)])
            kind = self.random.random()
            if kind < .6:
                inside[key] = json.loads(json.dumps(self.random.choice(FUZZ_ATOMS)))
            elif kind < .8 or isinstance(inside, list):
                del inside[key]
            else:
                other = self.random.choice(["flags", "http", "argv", "env", "A", "..", "timeout"])
                inside[other] = inside.pop(key)
        return value

    def ends_well(self, function, *args):
        try:
            function(*args)
        except (self.agentcli.Failure, ValueError):
            return
        except Exception as problem:  # noqa: BLE001  # any other is what this looks for
            self.fail(f"{function.__name__}{args!r:.500}: {problem!r}")

    def app(self, path):
        app = self.agentcli.App()
        app.flags = dict(self.agentcli.GLOBAL_FLAGS)
        return self.agentcli.load(str(path), app)

    def test_manifests_and_what_they_let_through(self):
        with open(os.path.join(FOLDER, "manifest.example.json")) as f:
            example = json.load(f)

        def use():
            app = self.app(self.dir / "m.json")
            for command in app.commands.values():
                self.agentcli.manifest_entry(command)
            for words in "task add --input -", "operation get x", "ingest x", "task list --state x":
                self.agentcli.parse(self.agentcli.Call(app, words.split()))

        while time.monotonic() < self.deadline:
            text = json.dumps(self.mutant(example)).encode()
            if self.random.random() < .1:
                text = text.replace(b'"', bytes([self.random.randrange(256)]), 1)
            self.write("m.json", text)
            self.ends_well(use)

    def test_argv_bodies_times_and_records(self):
        app = self.app(os.path.join(FOLDER, "manifest.example.json"))
        while time.monotonic() < self.deadline:
            words = self.random.choices([*FUZZ_WORDS.split(), ""], k=self.random.randint(0, 7))
            self.ends_well(self.agentcli.parse, self.agentcli.Call(app, words))
            blob = bytes(self.random.choice(b'{}[]",:0123456789eE+-.NaInfity\\u truefls\0\xff')
                         for _ in range(self.random.randint(0, 60)))
            self.ends_well(self.agentcli.parse_json, blob)
            self.ends_well(self.agentcli.since, blob.decode("latin-1"))
            lines = [json.dumps(self.mutant(FUZZ_RECORD)).encode(), blob] * 2
            with open(self.write("j.jsonl", b"\n".join(lines)), "rb") as f:
                for record in self.agentcli.whole_records(f.fileno()):
                    self.ends_well(self.agentcli.replay, record)


class KillTest(Case):
    @on_linux
    def test_killed_at_any_instant_nothing_runs_twice_and_no_end_is_untold(self):
        dice = random.Random(int(os.environ.get("FUZZ_SEED") or 1))
        for n in range(20 * int(float(os.environ.get("FUZZ_SECONDS") or 1))):
            ran = self.dir / f"ran{n}"
            words = ["--session=s", "sh", f"echo ran >>ran{n}; sleep 0.03"]
            p = self.start(*words)
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(dice.uniform(0, 0.2))
            p.kill()
            self.end(p)
            until(lambda: not self.running())
            e = self.call(*words).on_stderr
            told = e["error"]["code"] if e["error"] else e["data"].get("effect", "ran")
            times = len(ran.read_bytes().split()) if ran.exists() else 0
            self.assertIn((told, times), [("ran", 1), ("noop", 1), ("OUTCOME_UNKNOWN", 0),
                                          ("OUTCOME_UNKNOWN", 1)])


# ---- what once went wrong ------------------------------------------------------------------------

class MendedTest(HttpCase):
    """Faults that a stranger found, each as a kind."""

    def test_checking_a_body_takes_no_longer_for_many_keys(self):
        keys = ",".join(f'"{n}": 1' for n in range(60000))
        self.refused(self.add(body=("{%s, \"0\": 2}" % keys).encode()), "occurs twice")

    def test_what_only_begins_like_a_number_or_a_constant_is_refused(self):
        for text in b"[NaNx]", b"[1e999abc]", b"Infinityy", b'{"a NaN": NaN}', b"-Infinity":
            with self.subTest(text):
                self.refused(self.add(body=text), "JSON")
                self.write("manifest.json", b'{"commands": %s}' % text)
                self.ends(self.call("sh", ""), 2, "INVALID_MANIFEST")
                self.assertEqual(self.call("--version").code, 0)
                self.save(root={"base_url": self.service.url})

    def test_a_positional_is_never_taken_for_an_option(self):
        spec = dict(FLAG, type="string", required=True)
        get = {"description": "Get", "danger_level": "safe",
               "http": {"method": "GET", "path": "/v1/{input}"},
               "positionals": [dict(spec, name="input")]}
        self.save(root={"base_url": self.service.url}, get=get)
        self.told(self.call("get", str(self.dir / "token")))
        self.assertEqual(self.took()[0].body, b"")
        self.save(get=dict(get, http=dict(get["http"], input="optional")))
        self.ends(self.call("get", "x"), 2, "INVALID_MANIFEST")

    def test_a_signal_that_ends_nothing_ends_no_request(self):
        p, _ = self.in_flight("--timeout=2")
        for number in signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM, signal.SIGALRM:
            p.send_signal(number)
        self.assertRegex(self.end(p).out, b"limit of 2 s")

    def test_a_mistyped_command_is_one_whatever_follows(self):
        for more in ["--sort-keys"], ["--version"], ["-h"], ["x", "--help"]:
            fault = self.ends(self.call("shh", *more), 2, "ARG_ERROR")["error"]
            self.assertIn("sh", fault["suggestion"].split("mean ")[1])

    def test_a_closed_stdout_is_no_fault(self):
        close = f"exec {sys.executable} {AGENTCLI} task list >&-"
        p = subprocess.run(["sh", "-c", close], env=self.env, stderr=subprocess.PIPE, check=False)
        self.assertEqual((p.returncode, p.stderr), (0, b""))

    def test_a_relative_path_in_a_deleted_folder_is_not_found(self):
        for option, code in (("manifest", "INVALID_MANIFEST"), ("output", "ARG_ERROR")):
            go = f"mkdir g; cd g; rmdir ../g; exec {sys.executable} {AGENTCLI} --{option} m.json sh"
            out = subprocess.run(["sh", "-c", go], env=self.env, cwd=self.dir, check=False,
                                 stdout=subprocess.PIPE).stdout
            self.assertEqual(json.loads(out)["error"]["code"], code)

    @on_linux
    def test_a_folder_whose_name_is_no_text_is_filled_in_as_it_is(self):
        folder = os.fsencode(self.dir) + b"/\xff\xc3\xa9"
        os.mkdir(folder)
        with open(folder + b"/m.json", "w") as f:
            json.dump({"commands": {"say": self.entry("echo", "{manifest_dir}/\u00e9")}}, f)
        for env in {}, {"LC_ALL": "C", "LANG": None}:
            r = self.call("--manifest", folder + b"/m.json", "say", env=env)
            self.assertEqual((r.code, r.out), (0, folder + b"/\xc3\xa9\n"))

    @on_linux
    def test_a_tool_whose_name_is_not_ascii_is_found_in_every_locale(self):
        self.write("b\u00efn/t\u00f6\u00f6l", b"#!/bin/sh\necho $1\n", 0o755)
        path = {"PATH": f"{self.dir}/b\u00efn"}
        self.save(beside=self.entry("./b\u00efn/t\u00f6\u00f6l", "\u00e9"),
                  found=self.entry("t\u00f6\u00f6l", "\u00e9", env=path))
        for env in {}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}:
            for name in "beside", "found":
                r = self.call(name, env=env)
                self.assertEqual((r.code, r.out), (0, b"\xc3\xa9\n"), r.err)
            log = self.dir / "b\u00efn" / "log"
            self.write("b\u00efn/token", b"tok-123456\n", 0o600)
            self.save(root={"base_url": self.service.url, "token_file": "b\u00efn/token",
                            "audit_log": str(log)})
            self.told(self.call("task", "list", env=env))
            self.assertEqual(self.took()[0].headers["Authorization"], "Bearer tok-123456")
            self.assertEqual(log.read_bytes().count(b'"task.list"'), 1)
            log.unlink()
            self.assertEqual(self.call("audit-log", env=env).on_stdout["data"], {"entries": []})

    def test_who_has_no_state_folder_is_told_how_to_set_one(self):
        self.env["LEDGER_STATE_DIR"] = "relative"
        told = self.call("journal").on_stdout, self.call("--session=s", "sh", "").on_stderr
        for e in told:
            self.assertEqual(end(e), (4, "STATE_UNAVAILABLE"))
            self.assertIn("'relative'", e["error"]["message"])
            self.assertIn("LEDGER_STATE_DIR to", e["error"]["fix_required"])
        check, = [c for c in self.call("doctor").on_stdout["data"]["checks"] if not c["ok"]
                  and "state" in c["name"]]
        self.assertIn("LEDGER_STATE_DIR to", check["fix"])

    def test_what_is_wrong_on_the_command_line_is_told_before_what_is_wrong_around_it(self):
        env = {"LEDGER_FORMAT": "yaml", "LEDGER_AUDIT_LOG": "1",
               "LEDGER_STATE_DIR": f"{self.dir}/state"}
        e = self.told(self.call("--timeout", "x", "task", "list", "--done", env=env),
                      (2, "error", "invalid_input"))
        self.assertIn("--timeout", e["error"]["message"])
        e = self.told(self.call("--timeout=5", "task", "list", env=env),
                      (2, "error", "invalid_input"))
        self.assertIn("LEDGER_FORMAT", e["error"]["message"])
        log = self.dir / "state/audit.jsonl"
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        self.assertEqual([entry["args"] for entry in entries], [{}, {"timeout": 5}])

    def test_a_manifest_that_is_a_dangling_link_is_not_replaced_by_the_example(self):
        for name in "agentcli.py", "manifest.example.json":
            shutil.copy(os.path.join(FOLDER, name), self.dir)
        for target in "nowhere", "manifest.json":
            (self.dir / "manifest.json").unlink()
            (self.dir / "manifest.json").symlink_to(target)
            r = self.call("ingest", "--help", run=["agentcli.py"], env={"AGENTCLI_MANIFEST": None})
            self.assertIn("link", self.ends(r, 2, "INVALID_MANIFEST")["error"]["message"])

    def test_a_program_in_a_deleted_folder_gets_an_answer(self):
        for code in ("agentcli.main(['--json', 'sh', 'exit 3'])", "agentcli.App('ledger').run([])",
                     f"agentcli.load({AGENTCLI!r}).run(['--json'])"):
            go = f"mkdir g; cd g; rmdir ../g; exec {sys.executable} -c \"import agentcli; {code}\""
            p = subprocess.run(["sh", "-c", go], env=dict(self.env, PYTHONPATH=FOLDER), check=False,
                               cwd=self.dir, capture_output=True)
            self.assertNotIn(b"Traceback", p.stderr)
            self.assertIn(b'{"ok": ', p.stdout + p.stderr)

    @on_linux
    def test_a_signal_before_the_end_of_the_input_is_what_ended_the_call(self):
        for body in b" ", b'{"title":', b'{"title": "x"}':
            p = self.start("task", "add", "--input", "-", stdin=subprocess.PIPE)
            p.stdin.write(body)
            p.stdin.flush()
            until(lambda p=p: not any(fcntl.ioctl(p.stdin, termios.FIONREAD, bytes(4))))
            p.terminate()  # and at once, as communicate() does, the input's end
            self.told(self.end(p), (143, "error", "cancelled"))
        self.assertEqual(self.service.requests, [])

    @on_linux
    def test_an_answer_as_text_that_stdout_cannot_take_goes_to_stderr(self):
        with open("/dev/full", "wb") as full:
            for words in ["task", "list"], ["manifest"], ["--version"]:
                json_form = self.call("--json", *words, stdout=full).err
                text = self.call("--format=text", *words, stdout=full).err
                self.assertTrue(json_form and text, words)

    def test_a_reply_without_content_has_none_whatever_its_header_says(self):
        self.service.then = b""
        for header in "Transfer-Encoding: chunked", "Content-Length: 5":
            for status, expected in (204, OK), (304, (1, "error", "redirect_refused")):
                self.service.reply = f"HTTP/1.1 {status} X\r\n{header}\r\n\r\n".encode()
                self.assertIsNone(self.told(self.add("--timeout=5"), expected)["data"])

    def test_plain_http_needs_no_tls(self):
        code = ("import sys; sys.modules.update(ssl=None, _ssl=None); import agentcli; "
                "sys.exit(agentcli.main(['--json', 'task', 'list']))")
        self.told(self.call(run=["-c", code], env={"PYTHONPATH": FOLDER}))

    def test_a_repeated_request_says_so(self):
        for args, codes in ("", []), ("", ["operation_id_reused"]), ("--rerun", []):
            self.service.reply = reply(201, {"id": 1})
            e = self.told(self.add("--session=s", *args.split()))
            self.assertEqual([w["code"] for w in e["warnings"]], codes)
        self.service.reply = reply(200, operation())
        answer = self.end(self.add("--session=s"))
        self.told(answer)
        self.assertRegex(answer.err, rb"\Aledger: warning: The same call began at [^\n]+\n\Z")

    def test_no_password_of_a_url_is_told(self):
        for url in ("http://user:[tok-123456]@host/", "http://user:tok-123456\u2100pw@host",
                    "http://user:tok-123456@host", "http://user:tok-123456%40host",
                    "http://host/?key=tok-123456", "http://host/#tok-123456"):
            answer = self.end(self.add(env={"LEDGER_BASE_URL": url}))
            self.told(answer, (2, "error", "configuration_invalid"))
            self.assertNotIn(b"tok-123456", answer.out + answer.err)
        for proxy in ("http:/user:tok-123456@h:1", "http://user:tok-123456@127.0.0.1:1",
                      "http://user:p@s:tok-123456/et9@127.0.0.1:1", "http:/user:a\"tok-123456@h:1"):
            answer = self.end(self.add(env={"http_proxy": proxy,
                                            "LEDGER_BASE_URL": "http://198.51.100.1"}))
            self.assertEqual(answer.code, 5)
            self.assertNotIn(b"tok-123456", answer.out + answer.err)

    def test_arguments_of_one_name_are_logged_apart(self):
        names = "operation_id", "timeout", "input"
        self.save(root={"base_url": self.service.url}, stop={
            "description": "Stop", "danger_level": "mutating", "http": {
                "method": "POST", "path": "/v1/{operation_id}/{timeout}/{input}"},
            "positionals": [dict(FLAG, name=name, required=True) for name in names]})
        log = self.dir / "log"
        self.told(self.call("--timeout=7", "stop", "op_A", "b", "c",
                            env={"LEDGER_AUDIT_LOG": str(log)}))
        args = json.loads(log.read_text())["args"]
        self.assertEqual([args[name] for name in names], ["op_A", "b", "c"])
        self.assertEqual((args["--timeout"], args["--operation-id"]), (7, self.took()[1][0]))

    def test_a_pattern_that_python_cannot_compile_is_a_fault_of_the_manifest(self):
        self.save(bad=dict(TASKS["task.list"], flags={"a": dict(FLAG, pattern="[[a]")}))
        for options in [], ["-W", "error"]:
            r = self.call("sh", "", run=[*options, AGENTCLI])
            self.ends(r, 0)
            self.assertNotIn(b"Warning", r.err)
        for pattern in "a{99999999999999999999}", "(" * 3000 + ")" * 3000, "(?a)(?u)x":
            self.save(bad=dict(TASKS["task.list"], flags={"a": dict(FLAG, pattern=pattern)}))
            self.ends(self.call("sh", ""), 2, "INVALID_MANIFEST")
            self.assertEqual(self.call("--version").code, 0)

    def test_whatever_fails_in_the_audit_log_changes_no_outcome(self):
        deep = f"{self.dir}/manifest.json{'/a' * 1500}/log"
        for path in deep, "/" + "x" * 300, str(self.dir), f"{self.dir}/manifest.json/log":
            r = self.call("sh", "exit 3", env={"LEDGER_AUDIT_LOG": path})
            self.assertEqual(self.ends(r, 3, "DELEGATED_EXIT")["warnings"][0]["code"],
                             "AUDIT_LOG_UNAVAILABLE")
        self.ends(self.call("--session=s", "sh", "", env={"LEDGER_STATE_DIR": deep}), 4,
                  "STATE_UNAVAILABLE")
        for wrong in "/\ud800", {"path": "/x", "max_files": 300000000}:
            self.save(root={"audit_log": wrong})
            self.ends(self.call("sh", ""), 2, "INVALID_MANIFEST")

    def test_no_option_stands_inside_a_passthrough_path(self):
        for args in ["task", "--timeout=3", "show"], ["task", "--json", "show"]:
            self.assertIn("before", self.ends(self.call(*args), 2, "ARG_ERROR")["error"]["message"])

    def test_an_envelope_on_stderr_always_starts_on_a_fresh_line(self):
        for args in ["gone"], ["--session=s", "sh", ""], ["--session=s", "sh", ""]:
            self.assertEqual(self.call(*args).err[:2], b"\n{")

    def test_an_option_is_never_taken_for_the_value_of_another(self):
        for args in (["--output", "--help"], ["--session", "-h"], ["--timeout", "--version"],
                     ["audit-log", "--command", "--help"]):
            fault = self.ends(self.call(*args), 2, "ARG_ERROR")["error"]
            self.assertIn("needs a value", fault["message"])

    def test_a_time_limit_is_never_told_as_none(self):
        r = self.call("--timeout=0.0003", "sh", "sleep 9")
        e = self.ends(r, 10, "TIMEOUT")
        self.assertEqual((e["meta"]["timeout_ms"], e["error"]["context"]["timeout_ms"]), (1, 1))

    def test_an_empty_manifest_option_chooses_no_other(self):
        self.ends(self.call("--manifest", "", "sh", ""), 2, "INVALID_MANIFEST")

    def test_a_state_folder_that_is_relative_or_missing_is_as_one_that_cannot_be_written(self):
        env = {"LEDGER_STATE_DIR": "here"}
        e = self.told(self.add(env=env))
        self.assertEqual([w["code"] for w in e["warnings"]] or ["as it is"], ["as it is"])
        self.ends(self.call("--session=s", "sh", "", env=env), 4, "STATE_UNAVAILABLE")
        self.ends(self.call("--session=s", "--rerun", "sh", "", env=env), 0)

    @unittest.skipUnless(os.geteuid() == 0, "only root may become a user without an entry")
    def test_a_user_without_a_home_gets_an_envelope(self):
        self.dir.chmod(0o755)
        env = {"HOME": None, "LEDGER_AUDIT_LOG": "1"}
        try:
            r = self.call("sh", "", env=env, preexec_fn=lambda: os.setuid(54321))
        except PermissionError:
            self.skipTest("this Python is root's alone")
        self.assertEqual(r.on_stderr["warnings"][0]["code"], "AUDIT_LOG_UNAVAILABLE")
        r = self.call("--session=s", "sh", "", env=env, preexec_fn=lambda: os.setuid(54321))
        self.ends(r, 4, "STATE_UNAVAILABLE")

    @unittest.skipUnless(os.geteuid() == 0, "only root may give a folder to another user")
    def test_state_in_another_users_folder_is_not_trusted(self):
        self.dir.chmod(0o755)
        for name, depth in ("theirs", 0), ("ours", 1):
            self.write(f"{name}/state/journal/x", b"")
            for path, owner in (("", 54321), ("/state", 54321), ("/state/journal", 54321)):
                os.chown(f"{self.dir}/{name}{path}", owner, -1)
            os.chown(self.dir / name / ("state/journal" if depth else "state"), 12345, -1)
            (self.dir / name / "state/journal").chmod(0o777)
            (self.dir / name / "state").chmod(0o777)
            env = {"LEDGER_STATE_DIR": f"{self.dir}/{name}/state", "LEDGER_AUDIT_LOG": "1"}
            drop = {"env": env, "preexec_fn": lambda: os.setuid(54321)}
            try:
                e = self.ends(self.call("--session=s", "sh", "", **drop), 4, "STATE_UNAVAILABLE")
            except PermissionError:
                self.skipTest("this Python is root's alone")
            self.assertIn("another user", e["error"]["message"])
            warned = [w["code"] for w in e["warnings"]]
            self.assertEqual(warned, [] if depth else ["AUDIT_LOG_UNAVAILABLE"])
            checks = self.call("doctor", **drop).on_stdout["data"]["checks"]
            self.assertIn("state folder", [c["name"] for c in checks if not c["ok"]])

    @unittest.skipUnless(os.geteuid() == 0, "only root may give a link to another user")
    def test_output_through_another_users_link_follows_the_systems_rule(self):
        try:
            if pathlib.Path("/proc/sys/fs/protected_symlinks").read_text() != "1\n":
                self.skipTest("this system lets anybody choose")
        except OSError:
            self.skipTest("no Linux")
        victim, shared = self.write("victim", b"mine", 0o600), self.dir / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        os.symlink(victim, shared / "out.json")
        os.chown(shared / "out.json", 12345, -1, follow_symlinks=False)
        self.ends(self.call(f"--output={shared}/out.json", "sh", ""), 2, "ARG_ERROR")
        self.assertEqual(victim.read_bytes(), b"mine")

    def test_the_end_of_a_run_that_removed_its_own_journal_is_not_lost_in_silence(self):
        for what in "/*.jsonl", "":
            r = self.call("--session=s", "sh", f"rm -r ~/.local/state/ledger/journal{what}")
            e = self.ends(r, 0)
            self.assertEqual([w["code"] for w in e["warnings"]], ["STATE_UNAVAILABLE"])

    def test_what_the_journal_keeps_of_a_reply_is_small(self):
        self.service.reply = reply(409, operation("error", "a" * 3000000))
        self.told(self.add("--session=s"), (4, "error", "a" * 3000000))
        self.assertEqual(self.in_doubt(), [])
        for path in (self.dir / "home/.local/state/ledger/journal").glob("*.jsonl"):
            self.assertLess(path.stat().st_size, 9999)

    def test_output_to_a_redirected_stream_adds_to_its_file(self):
        with open(self.dir / "out", "wb") as f:
            self.call("--output=/dev/stdout", "sh", "echo said", stdout=f)
        said, envelope = (self.dir / "out").read_bytes().split(b"\n", 1)
        self.assertEqual((said, json.loads(envelope)["ok"]), (b"said", True))

    def test_what_a_passthrough_command_may_not_declare_it_may_not_leave_empty_either(self):
        for fields in {"confirm_flag": ""}, {"stdout": None}, {"stderr": False}, {"protocol": ""}:
            self.save(bad=self.entry("true", **fields))
            e = self.ends(self.call("bad"), 2, "INVALID_MANIFEST")
            self.assertIn(next(iter(fields)), e["error"]["message"])


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
                    self.assertEqual({"3", "6"} & set(shown["exit_codes"]),
                                     set() if shown["danger_level"] == "safe" else {"3", "6"})
                effects = {row["side_effects"] for row in shown["exit_codes"].values()}
                self.assertEqual("partial" in effects, shown["danger_level"] != "safe")
                for row in shown["exit_codes"].values():
                    effects = "none" if row["retryable"] else "none|partial|complete"
                    self.assertTrue(fits(row, {"name": CODE, "description": ".{1,120}",
                                               "retryable": bool, "side_effects": effects}), row)

    def test_what_a_passthrough_command_leaves_empty_is_not_shown(self):
        self.save(bare=self.entry("true", positionals=[], flags={}, help_argv=[]))
        shown = self.call("--schema", "bare").on_stdout["data"]
        self.assertNotIn("positionals", shown)
        self.assertEqual((shown["flags"], shown["help_argv"]), ({}, []))

    def test_an_http_command_says_that_it_needs_the_network_and_what_it_reads(self):
        self.save(root={"base_url": "http://127.0.0.1:9"}, **TASKS)
        shown = self.call("manifest").on_stdout["data"]["commands"]
        reads = {"mode": "buffered", "max_bytes": 1048576}
        for path, row in shown.items():
            entry = self.commands.get(path, {})
            self.assertEqual(row.get("has_network_io"), True if "http" in entry else None)
            body = entry.get("http", {}).get("input", "none")
            self.assertEqual(row.get("stdin"), None if body == "none" else reads)

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


# ---- README and example --------------------------------------------------------------------------

class ReadmeTest(Case):
    def setUp(self):
        super().setUp()
        self.text = pathlib.Path(FOLDER, "README.md").read_text("utf-8")
        self.copy = self.dir / "copy"
        for folder in "bin", "copy/path/to/your/repository":
            (self.dir / folder).mkdir(parents=True)
        (self.dir / "bin/python3").symlink_to(sys.executable)
        for name in "agentcli.py", "manifest.example.json", "Makefile":
            shutil.copy(os.path.join(FOLDER, name), self.copy)
        del self.env["AGENTCLI_MANIFEST"]
        self.env.update(PATH=f"{self.dir}/bin:{self.env['PATH']}", EXAMPLE_AUDIT_LOG="1")

    def shell(self, command):
        """Exit code and output, as a person or an agent sees them in one place."""
        done = subprocess.run(["sh", "-c", command], cwd=self.copy, env=self.env, timeout=40,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, start_new_session=True, check=False)
        return done.returncode, done.stdout.decode()

    def test_every_command_that_is_shown_runs_and_answers_as_shown(self):
        shown = []  # command, what is shown of its answer
        for kind, block in re.findall(r"(?ms)^```(sh|console)\n(.*?)^```", self.text):
            for line in block.splitlines():
                if kind == "sh" or line.startswith("$ "):
                    shown.append([line[2 * (kind != "sh"):].partition("  #")[0].strip(), ""])
                elif line:
                    shown[-1][1] += line + "\n"
        shown += [[" ".join(command.replace("\n>", "\n").split()), ""] for command in re.findall(
            r"`(python3 (?:-m agentcli|agentcli\.py)\b[^`]*|make [^`]+)`", self.text)]
        self.assertGreater(len(shown), 16)
        for command, answer in shown:
            name, _, value = command.partition("=")
            target = command.startswith("make ") and command.split()[1]
            if name.startswith("export "):
                self.env[name.split()[1]] = value
            elif target and target != "vendor":  # minutes long: only that there is such a target
                self.assertIn(f"\n{target}:", (self.copy / "Makefile").read_text())
            elif command != "python3 test_agentcli.py" and (not target or shutil.which("make")):
                with self.subTest(command):
                    code, said = self.shell(command)
                    like = ".*".join(re.escape(part)
                                     for part in re.split(r"\.{3}(?: .*? \.{3})?", answer))
                    self.assertRegex(said, re.compile(like, re.DOTALL))
                    if '"ok": false' not in answer and not command.endswith("doctor"):
                        self.assertEqual(code, 0, said)

    @unittest.skipUnless(shutil.which("make") and shutil.which("git"), "needs make and git")
    def test_an_edited_copy_is_not_overwritten_unasked(self):
        copy = self.copy / "path/to/your/repository/agentcli.py"
        git = "git -c user.name=n -c user.email=e"
        vendor = "make -s vendor DEST=path/to/your/repository"
        self.assertEqual(self.shell(f"git init -q && git add . && {git} commit -qm 1 && {vendor}"
                                    f"; echo '# new' >> agentcli.py; {git} commit -qam 2")[0], 0)
        self.assertEqual(self.shell(vendor)[0], 0)  # from an older version that git knows
        copy.write_bytes(copy.read_bytes() + b"# edited\n")
        code, said = self.shell(vendor)
        self.assertIn("FORCE=1", said)
        self.assertEqual((code, copy.read_bytes()[-9:]), (2, b"# edited\n"))
        self.assertEqual(self.shell(f"git add . && {git} commit -qm 3; {vendor}")[0], 2)
        self.assertEqual(self.shell(f"{vendor} FORCE=1")[0], 0)
        self.assertEqual(copy.read_bytes(), (self.copy / "agentcli.py").read_bytes())

    def test_the_manifest_that_is_shown_can_be_loaded(self):
        block, = re.findall(r"(?ms)^```json\n({\n.*?)^```", self.text)
        self.write("manifest.json", block.encode())
        r = self.call("--manifest", "manifest.json", "manifest")
        self.assertLessEqual({"ingest", "task.add"}, set(r.on_stdout["data"]["commands"]))

    def test_the_examples_run_as_written(self):
        manifest = json.loads((self.copy / "manifest.example.json").read_text("utf-8"))
        self.env["EXAMPLE_BASE_URL"] = "http://127.0.0.1:1"  # where nobody listens
        ran = 0
        for entry in manifest["commands"].values():
            for example in entry.get("examples", ()):
                code, said = self.shell(example["command"])
                expected = (5, 0) if "http" in entry else (0, 1)
                self.assertEqual((code, '"dependency_unavailable"' in said),
                                 (expected[0], "http" in entry), said)
                ran += 1
        self.assertGreater(ran, 4)

    def test_every_key_and_every_code_is_told(self):
        sys.path.insert(0, FOLDER)
        self.addCleanup(sys.path.remove, FOLDER)
        import agentcli
        names = {*agentcli._EXIT_OF_FAILURE, *agentcli._EXIT_OF_CODE}
        names.update(agentcli._CODE_OF_STATUS.values())
        for table in "ROOT", "COMMAND", "FLAG", "POSITIONAL", "HTTP", "AUDIT":
            names.update(key for key, rule in getattr(agentcli, f"_{table}_KEYS").items()
                         if rule[0] != "")  # what no kind may declare is no key
        untold = [name for name in names
                  if not re.search(rf"[`\"]({name}|{name.lower()})[`\"]", self.text)]
        self.assertEqual(untold, [])


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


# ---- measures: `python3 test_agentcli.py bench` and `... integration` --------------------------

def measure_environment(home):
    """The caller's environment without what would colour, slow down or configure a compared run."""
    dropped = ("PYTHON", "AGENTCLI", "MEASURED_", "FORCE_COLOR", "NO_COLOR", "TOOL_TRACE_ID")
    return dict({k: v for k, v in os.environ.items() if not k.startswith(dropped)}, HOME=home)


def measure_venv(folder, *options):
    """The interpreter of a new virtual environment, made by the one that runs this."""
    venv = os.path.join(folder, "venv")
    subprocess.run([sys.executable, "-m", "venv", *options, venv], check=True,
                   stdin=subprocess.DEVNULL)
    return os.path.join(venv, "bin", "python")


def measure_manifest(folder, **commands):
    """Write a manifest of mutating passthrough commands; each value gives an entry's other keys."""
    tool = {"description": "Run the measured tool", "danger_level": "mutating",
            "arguments": "passthrough"}
    entries = {name: entry if "http" in entry else dict(tool, **entry)
               for name, entry in commands.items()}
    with open(os.path.join(folder, "manifest.json"), "w", encoding="utf-8") as f:
        json.dump({"name": "measured", "version": "0.1.0", "description": "What is measured",
                   "commands": entries}, f)


# A sampler is a function without arguments that runs a program once and returns seconds.

def sample_run(argv, env):
    """Sampler: from the start of argv to its end, its streams on the null device."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]

    def once():
        began = time.perf_counter()
        status = os.waitpid(os.posix_spawn(argv[0], argv, env, file_actions=null), 0)[1]
        took = time.perf_counter() - began
        if status:  # the time of a failure would look like a good result
            raise SystemExit(f"bench: wait status {status} from {argv}")
        return took
    return once


def sample_flow(argv, env, size):
    """Sampler: from the first to the last of the `size` bytes that argv writes into a pipe.

    Starting and ending the programs is no part of it: the runs above measure that.
    """
    def once():
        with subprocess.Popen(argv, env=env, bufsize=0, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            pipe = process.stdout.fileno()
            seen = len(os.read(pipe, 1 << 16))
            began = ended = time.perf_counter()
            while True:
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    break
                seen += len(piece)
                ended = time.perf_counter()
        if (process.returncode, seen) != (0, size):
            raise SystemExit(f"bench: exit {process.returncode} after {seen} bytes from {argv}")
        return ended - began
    return once


def compare(first, second, pairs):
    """Medians of two samplers in seconds, and the quartiles of the ratios, run as ABAB...

    Whatever else the machine does then falls on both alike.
    """
    for sampler in (first, second) * 2:  # fills the page cache, writes compiled modules
        sampler()
    times = [(first(), second()) for _ in range(pairs)]
    ratios = statistics.quantiles([a / b for a, b in times], n=4)
    return [statistics.median(column) for column in zip(*times)] + ratios


def bench():
    """Print what agentcli costs, as ratios of runs measured side by side; 0 when all could run."""
    pairs = max(2, int(os.environ.get("BENCH_RUNS") or 40))
    start, flow, size = os.getcwd(), max(2, pairs // 4), 200 * 1000 * 1000
    with tempfile.TemporaryDirectory(prefix="agentcli-bench-") as folder:
        env = measure_environment(folder)
        # An empty environment: what is installed beside an interpreter may slow its every start.
        python = measure_venv(folder, "--without-pip")
        true = "/bin/true" if os.path.exists("/bin/true") else shutil.which("true")
        write = ("import sys; piece = bytes(100000)\n"
                 f"for _ in range({size // 100000}): sys.stdout.buffer.write(piece)")
        writer = [python, "-c", write]
        measure_manifest(folder, ok={"argv": [true]}, flow={"argv": writer}, **TASKS)
        shutil.copy(AGENTCLI, os.path.join(folder, "agentcli.py"))
        script = [python, os.path.join(folder, "agentcli.py"), "--format", "json"]
        module = [python, "-m", "agentcli", "--format", "json", "ok"]
        call = [python, "-c", f"import subprocess; subprocess.call([{true!r}])"]
        bare = [python, "-c", "pass"]

        def run(argv):
            return sample_run(argv, env)

        # label, A, B, pairs, goal for A/B ("" = for information)
        rows = [
            ("script run : subprocess.call", run(script + ["ok"]), run(call), pairs, "1.50"),
            ("module run : subprocess.call", run(module), run(call), pairs, "0.90"),
            *wrapper_rows(folder, python, env, lambda: run(module), true, pairs),
            ("script run : bare interpreter", run(script + ["ok"]), run(bare), pairs, ""),
            ("module run : bare interpreter", run(module), run(bare), pairs, ""),
            ("200 MB through agentcli : tool alone", sample_flow(script + ["flow"], env, size),
             sample_flow(writer, env, size), flow, "1.00"),
            *store_rows(folder, run, module, env, pairs),
        ]
        http, memory = http_measures(folder, python, module, env, pairs)
        rows.append(http)
        print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs."
              " A and B take turns; A ms, B ms and A/B are medians.")
        line = "{:38} {:>8} {:>8} {:>6}  {:13} {:>5} {:>5}"
        print(line.format("A : B", "A ms", "B ms", "A/B", "middle half", "goal", "pairs"))
        os.chdir(folder)  # the module run finds agentcli there
        try:
            for label, first, second, count, goal in rows:
                a, b, low, middle, high = compare(first, second, count)
                print(line.format(label, f"{a * 1e3:.1f}", f"{b * 1e3:.1f}", f"{middle:.2f}",
                                  f"{low:.2f} to {high:.2f}", goal or "-", count), flush=True)
            memory()
        finally:
            os.chdir(start)
    return 0


# ---- integration: a real tool behind agentcli ----------------------------------------------------

BEANGULP = "beangulp==0.2.0"
BEANGULP_IMPORTER = '''\
import beangulp
from beangulp.importers import csvbase


class Bank(csvbase.Importer):
    date = csvbase.Date("Date", "%Y-%m-%d")
    payee = csvbase.Column("Payee")
    narration = csvbase.Column("Text")
    amount = csvbase.Amount("Amount")
    balance = csvbase.Amount("Balance")

    def identify(self, filepath):
        with open(filepath, encoding="utf-8") as f:
            return f.readline().startswith("Date,Payee,Text,")


if __name__ == "__main__":
    beangulp.Ingest([Bank("Assets:Bank:Checking", "EUR")])()
'''
BEANGULP_FILES = {
    "downloads/january.csv": "Date,Payee,Text,Amount,Balance\n"
                             "2024-01-03,B\u00e4ckerei M\u00fcller,Br\u00f6tchen,-4.20,995.80\n"
                             "2024-01-09,\u5bff\u53f8\u306f\u306a,\u6587\u5b57 \U0001f363,-31.00,"
                             "964.80\n",
    "downloads/february.csv": "Date,Payee,Text,Amount,Balance\n"
                              '2024-02-01,"\u0141\u00f3d\u017a \u201eKawa\u201d, s.c.",'
                              '"a ""quoted"" text",-9.99,954.81\n',
    "downloads/notes.txt": "Not a statement\n",
    "broken.csv": "Date,Payee,Text,Amount,Balance\n2024-03-01,Caf\u00e9,,not a number,0\n",
    "documents/kept.txt": "Already here\n",
}
# label, tokens after the command path, exit code, what the tool is given when run alone
BEANGULP_RUNS = [
    ("identify", ["identify", "downloads"], 0, None),
    ("identify, verbose", ["identify", "--verbose", "--", "downloads", "broken.csv"], 0, None),
    ("extract", ["extract", "downloads"], 0, None),
    ("extract to a file", ["extract", "--output", "new.beancount", "downloads"], 0, None),
    ("archive, dry run", ["archive", "-n", "-o", "documents", "downloads"], 0, None),
    ("archive", ["archive", "-o", "documents", "downloads"], 0, None),
    ("a statement that cannot be read", ["extract", "downloads", "broken.csv"], 1, None),
    ("a usage error", ["extract", "--bogus", "statement.csv"], 2, None),
    ("an option that agentcli has too", ["extract", "--format", "json", "downloads"], 2, None),
    ("a missing file", ["archive", "gone-\u00e9.csv"], 2, None),
    ("lone --help", ["--help"], 0, ["extract", "--help"]),
    ("lone -h", ["-h"], 0, ["extract", "--help"]),
    ("--help with another token", ["archive", "--help"], 0, None),
]


def beangulp_python(folder):
    """The interpreter of a new virtual environment that holds beangulp."""
    try:
        python = measure_venv(folder)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check",
                        "--only-binary", ":all:", BEANGULP], check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise SystemExit(
            f"integration: {BEANGULP} could not be installed on Python {platform.python_version()}"
            " (that needs the venv module with pip, a package index that answers, and wheels for"
            f" this Python): {problem}") from None
    return python


def beangulp_tree(tree):
    """Make the working tree anew, at the same path: what the tool prints names it."""
    shutil.rmtree(tree, ignore_errors=True)
    for name, text in BEANGULP_FILES.items():
        path = os.path.join(tree, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        os.utime(path, (1700000000, 1700000000))


def tree_contents(tree):
    """Every file under a folder: relative name to bytes."""
    contents = {}
    for folder, _, names in os.walk(tree):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as f:
                contents[os.path.relpath(path, tree)] = f.read()
    return contents


def beangulp_faults(code, alone, door):
    """What differs between the tool's run alone and its run behind agentcli, in words.

    Both are (exit code, stdout, stderr, files afterwards); stderr ends with the envelope's line.
    """
    said, _, last = door[2].rstrip(b"\n").rpartition(b"\n")
    said = said.rstrip(b"\n")  # agentcli starts a fresh line: it cannot know whether it must
    try:
        envelope = json.loads(last.decode())
        error = envelope["error"] or {}
        seen = (envelope["ok"], envelope["data"], envelope["meta"]["exit_code"],
                error.get("code"), error.get("retryable"))
    except (ValueError, KeyError, TypeError) as problem:
        seen = f"no envelope on the last line of stderr ({problem!r})"
    expected = (code == 0, {"exit_code": code}, code,
                "DELEGATED_EXIT" if code else None, False if code else None)
    for what, got, want in (("exit code alone", alone[0], code), ("exit code", door[0], code),
                            ("stdout", door[1], alone[1]), ("stderr", said, alone[2].rstrip(b"\n")),
                            ("files", door[3], alone[3]), ("envelope", seen, expected)):
        if got != want:
            yield f"{what}: {got!r:.600} instead of {want!r:.600}"


def integration():
    """Run beangulp alone and behind agentcli, print a line a check; 0 when nothing differs."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="agentcli-integration-") as folder:
        folder = os.path.realpath(folder)
        tree, importer = os.path.join(folder, "tree"), os.path.join(folder, "import.py")
        python = beangulp_python(folder)
        with open(importer, "w", encoding="utf-8") as f:
            f.write(BEANGULP_IMPORTER)
        measure_manifest(folder, ingest={"argv": [python, "{manifest_dir}/import.py"],
                                         "help_argv": ["extract", "--help"], "timeout": 120})
        env = dict(measure_environment(folder), PYTHONUTF8="1")  # payees, whatever the locale

        def run(argv):
            beangulp_tree(tree)
            done = subprocess.run(argv, cwd=tree, env=env, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=180, check=False)
            return done.returncode, done.stdout, done.stderr, tree_contents(tree)

        print(f"{BEANGULP} on Python {platform.python_version()}", flush=True)
        for label, tokens, code, given in BEANGULP_RUNS:
            alone = run([python, importer] + (given or tokens))
            door = run([sys.executable, AGENTCLI, "--manifest",
                        os.path.join(folder, "manifest.json"), "--format", "json", "ingest"]
                       + tokens)
            faults = list(beangulp_faults(code, alone, door))
            if label == "extract" and "B\u00e4ckerei M\u00fcller".encode() not in door[1]:
                faults.append(f"stdout: a payee is missing: {door[1]!r}")
            failed += bool(faults)
            print(f"{'FAIL' if faults else 'ok':4} {label}: exit {door[0]}, {len(door[1])} bytes"
                  f" on stdout, {len(door[2])} on stderr, {len(door[3])} files afterwards",
                  *faults, sep="\n     ", flush=True)
    print(f"integration: {len(BEANGULP_RUNS) - failed} of {len(BEANGULP_RUNS)} checks hold")
    return 1 if failed else 0


# ---- integration: a real nginx between agentcli and the task service -----------------------------

NGINX_CONF = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen {address} reuseport;
        client_max_body_size 64k; proxy_read_timeout 1s;
        location /tasks/ {{ proxy_pass {tasks}/; }}
        location /silent/ {{ proxy_pass {silent}/; }}
        location /dead/ {{ proxy_pass http://127.0.0.1:1/; }}
    }}
}}
"""
NGINX_RUNS = (  # label, location, words, body, (exit code, status, error.code), of the message
    ("a task is added", "tasks", "task add --input -", b'{"title": "buy milk"}', OK, ""),
    ("and listed", "tasks", "task list", b"", OK, ""),
    ("an unknown path", "elsewhere", "task list", b"", (1, "error", "not_found"), "404"),
    ("a body over client_max_body_size", "tasks", "task add --input -", MEBIBYTE,
     (2, "error", "limit_exceeded"), "413"),
    ("a write past proxy_read_timeout", "silent", "task add --input -", b"1", UNKNOWN, "504"),
    ("a read past proxy_read_timeout", "silent", "task list", b"", UNAVAILABLE, "504"),
    ("a write to a dead upstream", "dead", "task add --input -", b"1", UNKNOWN, "502"),
    ("a read from a dead upstream", "dead", "task list", b"", UNAVAILABLE, "502"))


def integration_nginx():
    """Call the task service through a real nginx, print a line a check; 0 when all of them hold."""
    nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if not nginx:
        print("skipped: no nginx")
        return 0
    case, failed = HttpCase(), 0
    case.setUp()
    try:
        case.service.reply = tasks
        silent = Service(case, then=b"")
        folder = case.dir / "nginx"
        with socket.socket() as held_port:  # bound, but it does not listen: nginx does, beside it
            held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held_port.bind(("127.0.0.1", 0))
            address = "127.0.0.1:%d" % held_port.getsockname()[1]
            conf = case.write("nginx/conf", NGINX_CONF.format(
                folder=folder, address=address, tasks=case.service.url, silent=silent.url).encode())
            server = subprocess.Popen([nginx, "-c", str(conf), "-e", str(folder / "error.log")])
            case.addCleanup(server.wait, 20)
            case.addCleanup(server.terminate)
            until((folder / "pid").exists)
        version = subprocess.run([nginx, "-v"], check=True, stderr=subprocess.PIPE).stderr
        print(version.decode().strip())
        for label, where, words, body, expected, says in NGINX_RUNS:
            case.env["LEDGER_BASE_URL"] = f"http://{address}/{where}"
            answer = case.call(*words.split(), given=body)
            try:
                e = case.told(answer, expected)
                assert says in str((e["error"] or {}).get("message")), e
                if expected == UNKNOWN:
                    sent = silent.requests.pop() if where == "silent" else None
                    assert e["data"] == {"operation_id": e["error"]["operation_id"],
                                         "operation_state": "unknown"}, e
                    assert not sent or sent.headers["Idempotency-Key"] == e["error"]["operation_id"]
            except AssertionError as problem:
                failed += 1
                print(f"FAIL {label}: {problem}")
            else:
                print("ok   %s: exit %d %s" % (label, answer.code, expected[2] or ""))
        print("nginx: %d of %d checks hold" % (len(NGINX_RUNS) - failed, len(NGINX_RUNS)))
    finally:
        case.doCleanups()
    return 1 if failed else 0


def sample_new(argv, env, head=()):
    """Sampler: as sample_run, each run with a token that no run before it had."""
    count = iter(range(10 ** 9))

    def once():
        return sample_run([*argv, f"{os.getpid()}-{next(count)}", *head], env)()
    return once


def store_rows(folder, run, module, env, pairs):
    """What the journal, the audit log and their look-ups cost."""
    few, many = (dict(env, MEASURED_SESSION_ID="s", MEASURED_STATE_DIR=os.path.join(folder, name))
                 for name in ("few", "many"))
    logged = dict(few, MEASURED_AUDIT_LOG="1")
    for one in few, many, logged:
        subprocess.run(module, env=one, cwd=folder, check=True, stdin=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    journal, = pathlib.Path(folder, "many", "journal").glob("*.jsonl")
    record = json.loads(journal.read_text().splitlines()[-1])
    with journal.open("a") as f:
        for n in range(100000):
            record.update(id=f"{n:032x}", run=f"cli_00000000-0000-7000-8000-{n:012x}")
            f.write(json.dumps(record, separators=(",", ":")) + "\n")
    log = pathlib.Path(folder, "few", "audit.jsonl")
    line = log.read_text()
    full = dict(few, MEASURED_AUDIT_LOG=os.path.join(folder, "full.jsonl"))
    pathlib.Path(folder, "full.jsonl").write_text(line * (10 ** 7 // len(line)))
    query = [*module[:3], "audit-log", "--limit", "20"]
    return [
        ("journal and audit log on : off", sample_new(module, logged), run(module), pairs, "1.25"),
        ("repeat among 100,000 : among 1", sample_run(module, many), sample_run(module, few), pairs,
         "+15 ms"),
        ("audit-log --limit 20, 10 MB : 1 line", sample_run(query, full),
         sample_run(query, dict(few, MEASURED_AUDIT_LOG="1")), pairs, "1.50")]


def peak_memory(argv, env, given):
    """The largest resident set, in MiB, of one run of argv and of the processes it waited for."""
    with tempfile.TemporaryFile() as f:
        f.write(given)
        f.seek(0)
        run = "import resource, subprocess, sys; subprocess.call(sys.argv[1:])\n" \
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        out = subprocess.run([sys.executable, "-c", run, *argv], env=env, stdin=f, check=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    return int(out.split()[-1]) / (1024 if sys.platform != "darwin" else 1 << 20)


CLICK = """import subprocess, sys
import click

@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("tokens", nargs=-1, type=click.UNPROCESSED)
def ok(tokens):
    sys.exit(subprocess.call([%r, *tokens]))

ok()
"""
TYPER = """import subprocess
import typer

def ok(context: typer.Context):
    raise typer.Exit(subprocess.call([%r, *context.args]))

app = typer.Typer()
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(ok)
app()
"""


def wrapper_rows(folder, python, env, module, true, pairs):
    """A call by module against what people write by hand: a click and a typer wrapper."""
    packages = os.path.join(folder, "packages")
    if subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--target", packages,
                       "--disable-pip-version-check", "click", "typer"], check=False,
                      stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        print("not compared with click and typer, which pip could not install")
        return
    env = dict(env, PYTHONPATH=packages)
    for name, code in ("click", CLICK), ("typer", TYPER):
        path = os.path.join(folder, f"with_{name}.py")
        pathlib.Path(path).write_text(code % true)
        yield f"module run : {name} wrapper", module(), sample_run([python, path], env), pairs, ""


def http_measures(folder, python, module, env, pairs):
    """The row of one http command against a bare script, and the lines of the peak memory."""
    case = unittest.TestCase()
    plain = Service(case, reply(200, operation()))
    endless = Service(case, b"HTTP/1.1 200 X\r\n\r\n{" + b" " * (1 << 20), then=b" " * (1 << 20))
    fetch = f"import urllib.request; urllib.request.urlopen({plain.url + '/v1/tasks'!r}).read()"
    call = [*module[:3], "--format", "json", "--timeout", "20", "task"]
    env = dict(env, MEASURED_BASE_URL=plain.url)
    row = ("http command : bare urlopen script", sample_run([*call, "list"], env),
           sample_run([python, "-c", fetch], env), pairs, "1.30")

    def memory():
        body = b'{"x": "%s"}' % (b"a" * ((1 << 20) - 9))
        for label, url, goal in (("a body of 1 MiB", plain.url, 40),
                                 ("an endless reply", endless.url, 120)):
            used = peak_memory([*call, "add", "--input", "-"],
                               dict(env, MEASURED_BASE_URL=url), body)
            print(f"peak memory with {label}: {used:.0f} MiB (goal: at most {goal})", flush=True)
        case.doCleanups()
    return row, memory


def every_test(workers=3):
    """Run each class in a process of its own, a few at a time; 0 when all tests passed."""
    began, count, bad, idle, failed, running = time.monotonic(), 0, 0, 0, [], []
    classes = [name for name, value in globals().items()
               if isinstance(value, type) and issubclass(value, unittest.TestCase)
               and unittest.defaultTestLoader.getTestCaseNames(value)]
    while classes or running:
        while classes and len(running) < workers:
            name, out = classes.pop(0), tempfile.TemporaryFile()  # noqa: SIM115  # closed below
            running.append((name, out, subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), name], stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT)))
        pid, status = os.wait()
        name, out, process = next(row for row in running if row[2].pid == pid)
        running.remove((name, out, process))
        process.returncode = status
        out.seek(0)
        with out:
            said = out.read().decode("utf-8", "replace")
        count += sum(map(int, re.findall(r"^Ran (\d+) test", said, re.MULTILINE)))
        bad += sum(map(int, re.findall(r"(?:failures|errors)=(\d+)", said)))
        idle += sum(map(int, re.findall(r"skipped=(\d+)", said)))
        print(f"{'FAILED' if status else 'ok':6} {name}", flush=True)
        if status:
            failed.append(name)
            print(said, flush=True)
    print(f"\nRan {count} tests in {time.monotonic() - began:.0f}s", *failed)
    print(f"{count - bad - idle} passed, {bad or len(failed)} failed, {idle} skipped")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    jobs = {"bench": bench, "demo": demo, "": every_test,
            "integration": lambda: integration() or integration_nginx()}
    job = jobs.get(" ".join(sys.argv[1:]))
    if job:
        sys.exit(job())
    unittest.main()
