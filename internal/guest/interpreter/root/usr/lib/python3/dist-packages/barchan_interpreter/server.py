"""Serves the HTTP API of E2B's code interpreter on port 49999.

Each context is a Jupyter kernel. The server checks tokens with the sandbox's agent, from which it also reads the
sandbox's variables; it keeps no state besides the kernels.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
import string
import uuid

import tornado.httpserver
import tornado.iostream
import tornado.netutil
import tornado.web

from .context import Context, Failure, language_of

PORT = 49999
AGENT = ("127.0.0.1", 49983)
HOME = os.path.expanduser("~")

MAX_BODY = 8 << 20  # bytes of a request
MAX_CONTEXTS = 32
PREPARED = ("python", "javascript", "bash")  # kernels that run before the first request


class Contexts:
    """The contexts of the sandbox. Each language has a default one, which is made at its first use."""

    def __init__(self):
        self.all = {}
        self.defaults = {}
        self.making = asyncio.Lock()
        self.ready = False

    async def prepare(self):
        contexts = await asyncio.gather(*(self.default(language) for language in PREPARED))
        with contextlib.suppress(Failure):
            await variables(None)
        for context in contexts:
            await context.warm()
        gc.collect()
        gc.freeze()  # a collection would touch all memory of a sandbox that starts from this one's
        host = socket.gethostname()
        self.ready = True
        # A sandbox that starts from this one's memory has another name, and loads a page when it is first touched: better
        # now than when a client waits. Once a context is used, there is nothing to wait for.
        while socket.gethostname() == host and not any(c.used for c in contexts):
            await asyncio.sleep(0.1)
        for context in contexts:
            await context.warm()

    async def default(self, language):
        async with self.making:
            pending = self.defaults.get(language)
            if pending is None:
                pending = self.defaults[language] = asyncio.ensure_future(self.make(language, HOME))
        try:
            return await asyncio.shield(pending)
        except Exception:
            self.defaults.pop(language, None)  # the next request tries again
            raise

    async def make(self, language, cwd):
        if len(self.all) >= MAX_CONTEXTS:
            raise Failure(429, f"there are {MAX_CONTEXTS} contexts; remove one first")
        context = Context(str(uuid.uuid4()), language, cwd)
        self.all[context.id] = context
        try:
            await context.start()
        except BaseException:
            self.all.pop(context.id, None)
            raise
        return context

    def get(self, ident):
        context = self.all.get(ident)
        if context is None:
            raise Failure(404, f"Context {ident} not found")
        return context

    async def remove(self, ident):
        context = self.get(ident)
        del self.all[ident]
        for language, pending in list(self.defaults.items()):
            if pending.done() and not pending.exception() and pending.result() is context:
                del self.defaults[language]
        await context.stop()


async def variables(token):
    """Returns the sandbox's variables. The agent refuses a wrong token of a secure sandbox."""
    if token and any(c not in string.printable or c in "\r\n" for c in token):
        raise Failure(401, "Invalid X-Access-Token")
    try:
        reply = await asyncio.wait_for(ask_agent(token), 5)
        head, _, body = reply.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
    except (OSError, asyncio.TimeoutError, ValueError, IndexError) as e:
        raise Failure(503, f"the sandbox's agent does not answer: {e}") from e
    if status == 401:
        raise Failure(401, "Invalid or missing X-Access-Token")
    if status != 200:
        raise Failure(503, f"the sandbox's agent answers {status}")
    return json.loads(body)


async def ask_agent(token):
    # A connection and a request by hand take a third of the time that Tornado's client takes.
    reader, writer = await asyncio.open_connection(*AGENT)
    try:
        secret = f"X-Access-Token: {token}\r\n" if token else ""
        writer.write(f"GET /envs HTTP/1.0\r\nHost: agent\r\n{secret}\r\n".encode())
        return await reader.read()
    finally:
        writer.close()


class Handler(tornado.web.RequestHandler):
    def initialize(self, contexts):
        self.contexts = contexts

    def set_default_headers(self):
        self.set_header("Access-Control-Allow-Origin", "*")
        self.set_header("Access-Control-Allow-Headers", "*")
        self.set_header("Access-Control-Allow-Methods", "*")
        self.set_header("Server", "barchan-interpreter")

    async def prepare(self):
        # The client sends the token with code only, but a wrong one is refused everywhere.
        if self.request.method != "OPTIONS" and "X-Access-Token" in self.request.headers:
            await variables(self.request.headers["X-Access-Token"])

    def options(self, *_):
        self.set_status(204)

    def fields(self, **wanted):
        """Returns the fields of the JSON body; wanted has their types."""
        try:
            body = json.loads(self.request.body or b"{}")
        except ValueError as e:
            raise Failure(400, f"the body is no JSON: {e}") from e
        if not isinstance(body, dict):
            raise Failure(400, "the body is no JSON object")
        values = []
        for name, kind in wanted.items():
            value = body.get(name)
            if value is not None and not isinstance(value, kind):
                raise Failure(400, f"{name}: want {'an object' if kind is dict else 'a string'}")
            values.append(value)
        return values

    def write_error(self, status, exc_info=None, **_):
        error = exc_info[1] if exc_info else None
        if isinstance(error, Failure):
            self.set_status(error.status)
            text = error.text
        elif isinstance(error, tornado.web.HTTPError):
            text = error.log_message or self._reason
        else:
            text = f"{type(error).__name__}: {error}"
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(text)

    def log_exception(self, kind, value, trace):
        if not isinstance(value, Failure):
            super().log_exception(kind, value, trace)


class Health(Handler):
    async def prepare(self):
        pass

    def get(self):
        if not self.contexts.ready:
            raise Failure(503, "kernels start")
        self.finish("OK")


class ContextList(Handler):
    def get(self):
        self.finish(json.dumps([c.describe() for c in self.contexts.all.values()]))

    async def post(self):
        language, cwd = self.fields(language=str, cwd=str)
        language, cwd = language_of(language), cwd or HOME
        if not os.path.isabs(cwd):
            raise Failure(400, f"cwd: {cwd!r} is not absolute")
        if not os.path.isdir(cwd):
            raise Failure(400, f"cwd: there is no directory {cwd!r}")
        context = await self.contexts.make(language, cwd)
        self.finish(context.describe())


class One(Handler):
    async def delete(self, ident):
        await self.contexts.remove(ident)
        self.finish("")


class Restart(Handler):
    async def post(self, ident):
        await self.contexts.get(ident).restart()
        self.finish("")


class Execute(Handler):
    gone = None

    async def prepare(self):
        if self.request.method != "OPTIONS":
            self.envs = await variables(self.request.headers.get("X-Access-Token"))

    async def post(self):
        code, ident, language, env = self.fields(code=str, context_id=str, language=str, env_vars=dict)
        if code is None:
            raise Failure(400, "code: is missing")
        if ident and language:
            raise Failure(400, "context_id, language: want one of them")
        env = env or {}
        for name, value in env.items():
            if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
                raise Failure(400, f"env_vars: {name!r}: want a name without = and a string")
        context = self.contexts.get(ident) if ident else await self.contexts.default(language_of(language))
        self.gone = asyncio.Event()
        self.set_header("Content-Type", "application/x-ndjson")
        execution = context.execute(code, self.envs, env, self.gone)
        with context.queued():
            try:
                await self.flush()  # the client's time for the code starts with the headers
                async for messages in execution:
                    for message in messages:
                        self.write(json.dumps(message, allow_nan=False) + "\n")
                    await self.flush()
            except Failure as e:  # too late for a status
                self.write(json.dumps({"type": "error", "name": "ContextError", "value": e.text, "traceback": ""}) + "\n")
            except tornado.iostream.StreamClosedError:
                pass
            finally:
                # Without its reader the code is interrupted; the context is free once it has ended.
                await execution.aclose()

    def on_connection_close(self):
        if self.gone is not None:
            self.gone.set()


def application(contexts):
    give = {"contexts": contexts}
    return tornado.web.Application(
        [
            ("/health", Health, give),
            ("/execute", Execute, give),
            ("/contexts", ContextList, give),
            ("/contexts/([^/]+)", One, give),
            ("/contexts/([^/]+)/restart", Restart, give),
        ],
        log_function=lambda handler: None,
    )


async def main():
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    contexts = Contexts()
    server = tornado.httpserver.HTTPServer(application(contexts), max_buffer_size=MAX_BODY, max_body_size=MAX_BODY)
    server.add_sockets(tornado.netutil.bind_sockets(PORT, reuse_port=False))
    await contexts.prepare()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
