// Runs JavaScript for driver.py, by the REPL of Node.js: variables stay, and await works at the top level.
'use strict'
const fs = require('fs')
const net = require('net')
const path = require('path')
const repl = require('repl')
const readline = require('readline')
const { PassThrough } = require('stream')
const { createRequire } = require('module')
const { inspect } = require('util')

const [codePipe, replyPipe] = process.argv.slice(2).map(Number)
const MAX_TEXT = 1 << 20 // characters of a result's text
const shell = repl.start({ prompt: '', input: new PassThrough(), output: new PassThrough().resume(), useGlobal: true, breakEvalOnSigint: true, terminal: false })
global.require = createRequire(path.join(process.cwd(), 'cell.js'))

// Math.random of forks would continue with the same numbers: their memory is the same. The kernel's differ.
const urandom = fs.openSync('/dev/urandom', 'r')
let numbers = new Uint32Array(0)
let used = 0
Math.random = function random() {
  if (used + 2 > numbers.length) {
    numbers = new Uint32Array(256)
    fs.readSync(urandom, numbers)
    used = 0
  }
  return ((numbers[used++] >>> 5) * 67108864 + (numbers[used++] >>> 6)) / 9007199254740992
}

let displays = []
// display shows a bundle of MIME types, or any value.
global.display = (value, mime) => { displays.push(mime ? { [mime]: value } : bundle(value)) }

function bundle(value) {
  if (value && typeof value === 'object' && Object.keys(value).length && Object.keys(value).every((k) => /^(text|image|application)\/[\w.+-]+$/.test(k))) return value
  return { 'text/plain': inspect(value).slice(0, MAX_TEXT) }
}

// fail ends the code that runs. What throws later, such as a timer, does too, or is written if nothing runs.
const stray = (error) => process.stderr.write(`Uncaught ${inspect(error)}\n`)
let fail = stray
process.on('SIGINT', () => { if (fail !== stray) fail(Object.assign(new Error('interrupted'), { name: 'KeyboardInterrupt' })) })
process.on('unhandledRejection', (error) => fail(error))
process.on('uncaughtException', (error) => fail(error))
// The REPL reports errors to its domain, whose own listener writes them to the output.
shell._domain.removeAllListeners('error')
shell._domain.on('error', (error) => fail(error))

function evaluate(code) {
  return new Promise((resolve, reject) => {
    fail = reject
    const done = (error, value) => (error ? reject(error) : resolve(value))
    shell.eval(code + '\n', shell.context, 'cell', done)
  }).finally(() => { fail = stray })
}

// stack leaves out the frames of the REPL.
function stack(error) {
  return String(error.stack || error).split('\n').filter((line) => !/^ +at .*(node:|barchan_interpreter)/.test(line)).join('\n')
}

function describe(error) {
  if (error instanceof repl.Recoverable) error = error.err
  if (error && error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED') return { name: 'KeyboardInterrupt', value: 'interrupted', traceback: 'KeyboardInterrupt: interrupted' }
  if (error && typeof error === 'object' && 'message' in error) return { name: String(error.name || 'Error'), value: String(error.message), traceback: stack(error) }
  return { name: 'Error', value: inspect(error), traceback: `Uncaught ${inspect(error)}` }
}

async function run({ code, envs, env }) {
  displays = []
  used = numbers.length
  Object.assign(process.env, envs)
  const before = Object.keys(env).map((name) => [name, process.env[name]])
  Object.assign(process.env, env)
  const reply = { displays }
  try {
    const value = await evaluate(code)
    if (value !== undefined) reply.result = bundle(value)
  } catch (error) {
    reply.error = describe(error)
  }
  for (const [name, value] of before) {
    if (value === undefined) delete process.env[name]
    else process.env[name] = value
  }
  let data = Buffer.from(JSON.stringify(reply) + '\n')
  while (data.length) data = data.subarray(fs.writeSync(replyPipe, data))
}

let last = Promise.resolve()
readline.createInterface({ input: new net.Socket({ fd: codePipe, readable: true, writable: false }) }).on('line', (line) => {
  last = last.then(() => run(JSON.parse(line)))
})
