"""Jupyter kernels of languages whose interpreter is a program: Node.js and Bash.

A kernel starts the program, hands it code, and passes on what it writes. Node.js reads code from a pipe, and returns results
and errors as lines of JSON in another; Bash reads code from its standard input, and returns its status in the pipe.
"""

import json
import os
import select
import shlex
import signal
import socket
import subprocess

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

HERE = os.path.dirname(__file__)
CHUNK = 64 << 10
MAX_REPLY = 80 << 20


class Ended(Exception):
    """The program has ended."""


class Program:
    """A program with pipes for code, replies, and its output. argv returns its command for two descriptors."""

    def __init__(self, argv, on_output):
        code, self.code = os.pipe()
        self.reply, reply = os.pipe()
        self.on_output = on_output
        self.process = subprocess.Popen(
            argv(code, reply), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(code, reply),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(code)
        os.close(reply)
        self.outputs = {self.process.stdout.fileno(): "stdout", self.process.stderr.fileno(): "stderr"}
        self.tails = {name: b"" for name in self.outputs.values()}  # of a character that is not whole
        for fd in (self.reply, *self.outputs):
            os.set_blocking(fd, False)
        os.set_blocking(self.code, False)

    def run(self, code, end):
        """Sends code, and returns the reply, which ends with the byte end."""
        reply = b""
        while True:
            writes = [self.code] if code else []
            reads, writes, _ = select.select([self.reply, *self.outputs], writes, [])
            if writes:
                code = code[os.write(self.code, code[:CHUNK]) :]
            for fd in list(reads):
                if fd in self.outputs:
                    self.pass_on(fd)
            if self.reply in reads:
                data = os.read(self.reply, CHUNK)
                reply += data
                if not data or len(reply) > MAX_REPLY:
                    self.drain()
                    raise Ended
                if data.endswith(end):
                    self.drain()
                    return reply[:-1]

    def pass_on(self, fd):
        """Passes on a part of the output, and reports whether there was one."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.outputs.pop(fd, None)
            return False
        name = self.outputs[fd]
        data = self.tails[name] + data
        whole = len(data) - unfinished(data)
        self.tails[name], text = data[whole:], data[:whole].decode("utf-8", "replace")
        if text:
            self.on_output(name, text)
        return True

    def drain(self):
        for fd in list(self.outputs):
            while self.pass_on(fd):
                pass

    def end(self):
        self.process.kill()
        status = self.process.wait()
        for fd in (self.code, self.reply):
            os.close(fd)
        for file in (self.process.stdin, self.process.stdout, self.process.stderr):
            file.close()
        return status


def unfinished(data):
    """Returns the number of bytes at the end that begin a character of UTF-8."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back else 0
    return 0


class DriverKernel(Kernel):
    implementation = "barchan"
    implementation_version = "1"
    banner = ""
    interrupted = False

    def __init__(self, **options):
        super().__init__(**options)
        self.program = None
        self.envs = {}  # the sandbox's variables, as the program has them
        self.host = socket.gethostname()
        self.launch()

    def launch(self):
        self.program = Program(self.argv, self.output)

    def output(self, name, text):
        self.send_response(self.iopub_socket, "stream", {"name": name, "text": text})

    async def do_execute(self, code, silent, store_history=True, user_expressions=None, allow_stdin=False):
        values = (self.get_parent("shell").get("metadata") or {}).get("barchan") or {}
        if values.get("warm"):
            self.execution_count -= 1
        host = socket.gethostname()
        moved, self.host = host != self.host, host
        envs = values.get("envs", {})
        new, self.envs = {} if envs == self.envs else envs, envs
        # The program, which is in the same process group, gets the signal too, and ends the code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            failure = self.run(code, new, values.get("env", {}), moved)
        except (Ended, BrokenPipeError):
            status = self.program.end()
            self.envs = {}
            self.launch()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            failure = ("KernelDied", f"{self.program_name} ended with {how}; its variables are lost.", [])
        if failure is None:
            return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}
        name, value, traceback = failure
        content = {"ename": name, "evalue": value, "traceback": traceback}
        if not silent:
            self.send_response(self.iopub_socket, "error", content)
        return {"status": "error", "execution_count": self.execution_count, **content}

    def do_shutdown(self, restart):
        self.program.end()
        return {"status": "ok", "restart": restart}


class JavaScript(DriverKernel):
    language = "javascript"
    language_info = {"name": "javascript", "mimetype": "text/javascript", "file_extension": ".js"}

    program_name = "Node.js"

    def argv(self, code, reply):
        return ["node", "--no-warnings", os.path.join(HERE, "repl.js"), str(code), str(reply)]

    def run(self, code, envs, env, moved):
        request = json.dumps({"code": code, "envs": envs, "env": env})
        reply = json.loads(self.program.run(request.encode() + b"\n", b"\n"))
        for bundle in reply["displays"]:
            self.send_response(self.iopub_socket, "display_data", {"data": bundle, "metadata": {}})
        if reply.get("result") is not None:
            self.send_response(
                self.iopub_socket, "execute_result", {"data": reply["result"], "metadata": {}, "execution_count": self.execution_count}
            )
        error = reply.get("error")
        return error and (error["name"], error["value"], error["traceback"].split("\n"))


class Bash(DriverKernel):
    language = "bash"
    language_info = {"name": "bash", "mimetype": "text/x-sh", "file_extension": ".sh"}
    program_name = "Bash"

    def argv(self, code, reply):
        # Bash runs this command whenever code has ended, be it by a signal.
        self.prompt = f"PROMPT_COMMAND='printf \"%s\\0\" \"$?\" >&{reply}' PS1= PS2="
        return ["bash", "--noprofile", "--norc", "--noediting", "-i"]

    def launch(self):
        super().launch()
        # Without a terminal Bash warns that it has no control of jobs.
        outputs, self.program.on_output = self.program.on_output, lambda name, text: None
        self.line(f"{self.prompt}; set +m +H; unset HISTFILE")
        self.program.on_output = outputs

    def line(self, text):
        self.program.process.stdin.write(text.encode() + b"\n")
        self.program.process.stdin.flush()
        return self.program.run(b"", b"\0")

    def run(self, code, envs, env, moved):
        exports = "".join(f"export {n}={shlex.quote(v)}\n" for n, v in envs.items() if n.isidentifier())
        if moved:
            exports += "RANDOM=$((SRANDOM & 32767))\n"
        if exports:
            self.line("eval " + shlex.quote(exports))
        own = " ".join(f"{n}={shlex.quote(v)}" for n, v in env.items() if n.isidentifier())
        status = self.line(f"{own} eval {shlex.quote(code)} </dev/null").decode()
        return None if status == "0" else ("ExitError", f"exit status {status}", [])


def main():
    import sys

    language = [a.split("=", 1)[1] for a in sys.argv if a.startswith("--language=")][0]
    sys.argv = [a for a in sys.argv if not a.startswith("--language=")]
    kernel = {"javascript": JavaScript, "bash": Bash}[language]
    IPKernelApp.launch_instance(kernel_class=kernel)


if __name__ == "__main__":
    main()
