"""A context: one Jupyter kernel, its queue, and the translation of its messages to E2B's."""

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import time

import zmq.asyncio
from jupyter_client.manager import AsyncKernelManager

# The names of kernels. The last is Debian's.
LANGUAGES = {"python": "barchan-python", "javascript": "barchan-javascript", "bash": "barchan-bash", "r": "ir"}
ALIASES = {"py": "python", "python3": "python", "js": "javascript", "node": "javascript", "sh": "bash", "shell": "bash"}

MAX_OUTPUT = 64 << 20  # bytes of an execution
MAX_QUEUE = 64  # executions that wait for a context
START_SECONDS = 120
INTERRUPTS = 10  # of code whose client has gone, one every two seconds

FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}

# R's kernel is the distribution's, and takes neither variables nor a seed with its code.
R_SET = "Sys.setenv({})"
R_UNSET = "Sys.unsetenv(c({}))"
R_SEED = "set.seed(NULL)"


# What is run before the first request: the code of a client, and what removes its traces.
WARM = {
    "python": (
        "import sys, pandas, matplotlib.pyplot as plt\nprint(1); print(2, file=sys.stderr); plt.plot([1]); plt.show()\npandas.DataFrame({'a': [1]})",
        "import gc; get_ipython().reset(new_session=True); gc.collect(); gc.freeze()",
    ),
    "javascript": ("console.log(1); [1]", ""),
    "bash": ("echo 1", ""),
}


class Failure(Exception):
    """An answer other than success."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status, self.text = status, text


def language_of(name):
    """Returns the language of a request; the default is Python."""
    language = (name or "python").strip().lower()
    language = ALIASES.get(language, language)
    if language not in LANGUAGES:
        raise Failure(400, f"language: {name!r} is none of {', '.join(LANGUAGES)}")
    return language


def runtime_dir():
    """Returns the directory of the kernels' sockets, outside of the user's files."""
    path = os.path.join(tempfile.gettempdir(), f".interpreter-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


class Context:
    def __init__(self, ident, language, cwd):
        self.id, self.language, self.cwd = ident, language, cwd
        self.lock = asyncio.Lock()  # one execution, start or stop at a time
        self.waiting = 0
        self.manager = self.client = None
        self.tasks = []
        self.executions = {}  # by the id of the message that started them
        self.set = {}  # the sandbox's variables, as R has them
        self.host = socket.gethostname()
        self.stopped = self.used = False
        self.told = False  # an execution has reported that the kernel ended

    def describe(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self):
        async with self.lock:
            await self._start()

    async def _start(self):
        runtime = runtime_dir()
        env = dict(os.environ, IPYTHONDIR=os.path.join(runtime, "ipython"), LANG="C.UTF-8", PWD=self.cwd)
        self.manager = AsyncKernelManager(
            kernel_name=LANGUAGES[self.language], transport="ipc", context=zmq.asyncio.Context.instance()
        )
        self.manager.connection_file = os.path.join(runtime, f"{self.id}.json")
        self.manager.ip = os.path.join(runtime, self.id)
        try:
            await self.manager.start_kernel(cwd=self.cwd, env=env)
            self.client = self.manager.client()
            self.client.start_channels(stdin=False, hb=False)
            await self.client.wait_for_ready(timeout=START_SECONDS)
        except (OSError, RuntimeError) as e:
            await self._stop()
            raise Failure(500, f"start the kernel of {self.language}: {e}") from e
        self.set, self.host = {}, socket.gethostname()
        self.tasks = [asyncio.ensure_future(self._receive(c)) for c in (self.client.iopub_channel, self.client.shell_channel)]

    async def _stop(self):
        for task in self.tasks:
            task.cancel()
        self.tasks = []
        if self.client is not None:
            self.client.stop_channels()
            self.client = None
        if self.manager is not None:
            with contextlib.suppress(Exception):
                await self.manager.shutdown_kernel(now=True)
            self.manager = None

    async def stop(self):
        """Ends the kernel, and with it what runs."""
        self.stopped = True
        await self._end()
        async with self.lock:
            await self._stop()

    async def restart(self):
        """Starts the kernel again, without its variables; what runs ends."""
        await self._end()
        async with self.lock:
            await self._stop()
            await self._start()

    async def _end(self):
        if self.manager is not None and self.executions:
            with contextlib.suppress(Exception):
                await self.manager.signal_kernel(9)

    async def alive(self):
        return self.manager is not None and await self.manager.is_alive()

    async def warm(self):
        """Runs code as a client does, unless one has done so, and removes its traces."""
        async with self.lock:
            if self.used or not await self.alive():
                return
            code, clean = WARM[self.language]
            await self._drain(code, {"warm": True}, silent=False)
            if clean:
                await self._drain(clean, {}, silent=True)

    @contextlib.contextmanager
    def queued(self):
        if self.waiting >= MAX_QUEUE:
            raise Failure(429, f"{MAX_QUEUE} executions wait for context {self.id}")
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def execute(self, code, envs, env, gone):
        """Runs code, and yields lists of E2B's messages. Once gone is set, the code is interrupted."""
        self.used = True
        async with self.lock:
            if gone.is_set():
                return
            if self.stopped:
                raise Failure(404, f"Context {self.id} not found")
            if not await self.alive():
                told, self.told = self.told, False
                await self._stop()
                await self._start()
                if not told:
                    yield [stream("stderr", f"The {self.language} kernel had ended and was started again; its variables are lost.\n")]
            restore = await self._before(envs, env)
            run, ident = self._send(code, {"envs": envs, "env": env}, silent=False)
            interrupts = asyncio.ensure_future(self._interrupt(gone))
            try:
                while messages := await self._next(run):
                    yield messages
                yield [{"type": "end_of_execution"}]
            finally:
                # Without a reader, the context waits for the end of the code all the same.
                while not run.done:
                    gone.set()
                    await self._next(run)
                interrupts.cancel()
                self.executions.pop(ident, None)
                if restore and await self.alive():
                    await self._drain(restore, {}, silent=True)

    def _send(self, code, metadata, silent):
        run = Execution()
        request = self.client.session.msg(
            "execute_request",
            {"code": code, "silent": silent, "store_history": not silent, "user_expressions": {}, "allow_stdin": False, "stop_on_error": False},
            metadata={"barchan": metadata},
        )
        ident = request["header"]["msg_id"]
        self.executions[ident] = run
        self.client.shell_channel.send(request)
        return run, ident

    async def _drain(self, code, metadata, silent):
        run, ident = self._send(code, metadata, silent)
        while await self._next(run):
            pass
        self.executions.pop(ident, None)

    async def _next(self, run):
        """Returns the messages since the last call, or none at the end."""
        while True:
            try:
                return await asyncio.wait_for(run.get(), 1)
            except asyncio.TimeoutError:
                if not await self.alive():
                    self.told = True
                    run.died(self.language)
                elif run.replied:
                    run.end()  # a kernel drops what it publishes faster than it is read

    async def _interrupt(self, gone):
        await gone.wait()
        for _ in range(INTERRUPTS):
            if not await self.alive():
                return
            await self.manager.interrupt_kernel()
            await asyncio.sleep(2)

    async def _before(self, envs, env):
        """Prepares R, and returns what undoes it; other kernels do that themselves."""
        if self.language != "r":
            return ""
        steps, undo, host = [], [], socket.gethostname()
        if host != self.host:
            self.host = host
            steps.append(R_SEED)
        if envs != self.set:
            self.set = dict(envs)
            steps.append(r_set(envs))
        if env:
            steps.append(r_set(env))
            undo = [R_UNSET.format(", ".join(map(json.dumps, env))), r_set({k: envs[k] for k in env if k in envs})]
        if any(steps):
            await self._drain("\n".join(steps), {}, silent=True)
        return "\n".join(undo)

    async def _receive(self, channel):
        while True:
            message = await channel.get_msg(timeout=None)
            run = self.executions.get(message["parent_header"].get("msg_id"))
            if run is not None:
                run.take(message["msg_type"], message["content"])


def r_set(values):
    # R reads the escapes of JSON, but for those of surrogates.
    return R_SET.format(", ".join(f"`{k}`={json.dumps(v, ensure_ascii=False)}" for k, v in values.items())) if values else ""


def stream(name, text):
    return {"type": name, "text": text, "timestamp": time.time_ns()}


class Execution:
    """The messages of one execution."""

    def __init__(self):
        self.queue = asyncio.Queue()
        self.left = MAX_OUTPUT
        self.reported = None  # the error of the reply
        self.replied = self.idle = self.failed = self.done = False

    async def get(self):
        messages = []
        while not messages or not self.queue.empty():
            if self.done and self.queue.empty():
                return messages
            message = await self.queue.get()
            if message is None:
                return messages
            messages.append(message)
        return messages

    def take(self, kind, content):
        if kind == "status":
            self.idle = self.idle or content["execution_state"] == "idle"
        elif kind == "execute_reply":
            self.replied = True
            if content["status"] == "error":
                self.reported = (content["ename"], content["evalue"], content["traceback"])
            elif content["status"] != "ok":
                self.reported = ("ExecutionAborted", "The code was not run.", [])
        elif kind == "execute_input":
            self.put({"type": "number_of_executions", "execution_count": content["execution_count"]})
        elif kind == "stream":
            self.limited(stream(content["name"], content["text"]))
        elif kind in ("display_data", "execute_result"):
            self.limited(result(content["data"], kind == "execute_result"))
        elif kind == "error":
            self.error(content["ename"], content["evalue"], content["traceback"])
        if self.replied and self.idle:
            self.end()

    def error(self, name, value, traceback):
        if not self.failed:
            self.failed = True
            self.put({"type": "error", "name": name, "value": value, "traceback": "\n".join(traceback)[: 1 << 20]})

    def died(self, language):
        self.error("KernelDied", f"The {language} kernel ended while it ran the code; its variables are lost.", [])
        self.end()

    def end(self):
        if not self.done:
            # A kernel publishes an error in the order of the output, and replies with it.
            if self.reported:
                self.error(*self.reported)
            self.done = True
            self.queue.put_nowait(None)

    def put(self, message):
        if not self.done:
            self.queue.put_nowait(message)

    def limited(self, message):
        if self.left <= 0:
            return
        self.left -= len(message["text"]) if "text" in message and len(message) == 3 else len(json.dumps(message))
        if self.left > 0:
            self.put(message)
        else:
            self.put(stream("stderr", f"\nThe output was cut off after {MAX_OUTPUT >> 20} MiB.\n"))


def result(bundle, main):
    message = {"type": "result", "is_main_result": main}
    for mime, value in bundle.items():
        message[FORMATS.get(mime, mime)] = value
    text = message.get("text")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] == "'":
        message["text"] = text[1:-1]  # as upstream
    return message
