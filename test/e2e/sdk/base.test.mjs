// What E2B's base template has, and so must ours: compilers, Python with pip, Node.js with npm.
import test, { after, before } from 'node:test'
import assert from 'node:assert/strict'
import { CommandExitError, Sandbox } from 'e2b'

let sbx
before(async () => { sbx = await Sandbox.create('base', { timeoutMs: 300_000 }) })
after(async () => { await sbx?.kill() })
const run = async (command, opts) => (await sbx.commands.run(command, opts)).stdout

test('programs are there', async () => {
  assert.match(await run('node -v'), /^v20\./)
  assert.match(await run('npm -v'), /^10\./)
  assert.match(await run('npx --version'), /^10\./)
  assert.match(await run('python --version && python3 --version'), /^Python 3\.11\.\d+\nPython 3\.11\.\d+\n$/)
  assert.match(await run('pip --version && pip3 --version'), /^pip .*\npip .*python 3\.11/)
  for (const p of ['gcc', 'g++', 'make', 'git', 'curl', 'tput', 'sudo']) assert.match(await run(`command -v ${p}`), /^\//)
  assert.equal(await run('whoami; sudo -n whoami'), 'user\nroot\n')
})

test('C and C++ compile and run', async () => {
  await sbx.files.write('c/hello.c', '#include <stdio.h>\nint main(void) { puts("hello from C"); return 0; }\n')
  await sbx.files.write('c/hello.cc', '#include <iostream>\nint main() { std::cout << "hello from C++\\n"; }\n')
  await sbx.files.write('c/Makefile', 'all: c cc\nc: hello.c\n\tgcc -O1 -o c hello.c\ncc: hello.cc\n\tg++ -o cc hello.cc\n')
  assert.equal(await run('make -s -C c && c/c && c/cc'), 'hello from C\nhello from C++\n')
})

test('Node.js runs programs, modules, timers and workers', async () => {
  await sbx.files.write('n/main.mjs', `
    import { Worker } from 'node:worker_threads'
    import { createServer } from 'node:http'
    const server = createServer((_, res) => res.end('served')).listen(0)
    await new Promise((r) => server.once('listening', r))
    const text = await (await fetch('http://127.0.0.1:' + server.address().port)).text()
    server.close()
    const worker = new Worker('require("node:worker_threads").parentPort.postMessage(6*7)', { eval: true })
    console.log(text, await new Promise((r) => worker.once('message', r)))`)
  assert.equal(await run('node n/main.mjs'), 'served 42\n')
})

test('npm installs a package and its script runs', async () => {
  await sbx.files.write('lib/package.json', JSON.stringify({ name: 'tiny', version: '1.2.3', main: 'index.js', bin: { tiny: 'cli.js' } }))
  await sbx.files.write('lib/index.js', 'module.exports = () => "tiny works"\n')
  await sbx.files.write('lib/cli.js', '#!/usr/bin/env node\nconsole.log(require("./")())\n')
  const out = await run('mkdir -p app && cd app && npm init -y >/dev/null && npm install --offline --no-audit --no-fund "$(npm pack --silent ../lib)" >/dev/null && node -p "require(\'tiny\')()" && npx --no-install tiny', { timeoutMs: 120_000 })
  assert.equal(out, 'tiny works\ntiny works\n')
})

test('pip installs as user, compiled parts too, and in a virtual environment', async () => {
  await sbx.files.write('p/setup.py', 'from setuptools import setup, Extension\nsetup(name="tiny", version="1.2.3", py_modules=["tiny"], ext_modules=[Extension("_tiny", ["_tiny.c"])])\n')
  await sbx.files.write('p/tiny.py', 'import _tiny\ndef f(): return _tiny.f()\n')
  await sbx.files.write('p/_tiny.c', `#include <Python.h>
static PyObject *f(PyObject *self, PyObject *args) { return PyUnicode_FromString("tiny works"); }
static PyMethodDef methods[] = {{"f", f, METH_NOARGS, 0}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tiny", 0, -1, methods};
PyMODINIT_FUNC PyInit__tiny(void) { return PyModule_Create(&module); }
`)
  await run('pip install --no-index --no-build-isolation ./p', { timeoutMs: 120_000 })
  assert.equal(await run('python -c "import tiny; print(tiny.f())"'), 'tiny works\n')
  assert.equal(await run('python -m venv v && v/bin/python -c "import sys; print(sys.prefix)"', { timeoutMs: 120_000 }), '/home/user/v\n')
})

test('pip reports that it reaches no index', async () => {
  await assert.rejects(
    sbx.commands.run('pip install --retries 0 --timeout 2 --index-url http://127.0.0.1:9/simple no-such-package'),
    (e) => e instanceof CommandExitError && e.exitCode === 1 && /No matching distribution found for no-such-package/.test(e.stderr),
  )
})
