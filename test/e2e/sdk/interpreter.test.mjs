// Drives the code interpreter by E2B's own package. PLOT is a file for the picture of a plot; BARCHAN is the program of a
// server that stores memory at once, and has a pause last until that is done.
import test, { after, before } from 'node:test'
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { NotFoundError, Sandbox, SandboxError, TimeoutError } from '@e2b/code-interpreter'
import { until } from './lib.mjs'

let sbx
before(async () => { sbx = await Sandbox.create({ timeoutMs: 600_000, envs: { OWNER: 'of the sandbox' } }) })
after(async () => { await sbx?.kill() })
// run returns an execution, of which nothing has failed.
const run = async (code, opts, on = sbx) => {
  const e = await on.runCode(code, opts)
  assert.equal(e.error, undefined, `${code}: ${e.error?.traceback}`)
  return e
}
const text = async (code, opts, on) => (await run(code, opts, on)).text
const printed = async (code, opts, on) => (await run(code, opts, on)).logs.stdout.join('')

test('variables stay, and executions are counted', async () => {
  const first = await run('x = 20\nx + 1')
  assert.equal(first.text, '21')
  assert.equal(first.results[0].isMainResult, true)
  assert.equal((await run('x += 1; x')).executionCount, first.executionCount + 1)
  assert.equal(await text("'quoted'"), 'quoted')
  assert.equal((await run('x = 1')).results.length, 0)
})

test('output is streamed', async () => {
  const seen = []
  // Each line is printed after the one before it has arrived here.
  const e = await run("import os, sys, time\nfor i in range(3):\n  print('out', i); sys.stdout.flush()\n  while not os.path.exists(f'/tmp/seen{i}'): time.sleep(0.01)\nprint('bad', file=sys.stderr)\ni", {
    onStdout: async (m) => { seen.push(m.line); await sbx.files.write(`/tmp/seen${m.line.trim().slice(-1)}`, '') },
    onStderr: (m) => seen.push(m.error, m.line), onResult: (r) => seen.push(r.text),
  })
  assert.deepEqual(seen, ['out 0\n', 'out 1\n', 'out 2\n', true, 'bad\n', '2'])
  assert.deepEqual(e.logs, { stdout: ['out 0\n', 'out 1\n', 'out 2\n'], stderr: ['bad\n'] })
})

test('errors', async () => {
  let seen
  const e = await sbx.runCode('def f():\n  return 1 / 0\nf()', { onError: (err) => { seen = err } })
  assert.equal(e.error.name, 'ZeroDivisionError')
  assert.equal(e.error.value, 'division by zero')
  assert.match(e.error.traceback, /return 1 \/ 0/)
  assert.equal(seen.name, e.error.name)
  assert.equal((await sbx.runCode('if')).error.name, 'SyntaxError')
})

test('a table is text, HTML and data', async () => {
  const [r] = (await run("import pandas as pd\npd.DataFrame({'name': ['a', 'b'], 'when': pd.to_datetime(['2024-05-01', None]), 'n': [1.5, 2]})")).results
  assert.match(r.html, /<table/)
  assert.match(r.text, /0 +a 2024-05-01 +1\.5/)
  assert.deepEqual(r.data, { name: ['a', 'b'], when: ['2024-05-01T00:00:00', null], n: [1.5, 2] })
})

test('kinds of results', async () => {
  const e = await run(`from IPython.display import display, HTML, Markdown, SVG, Latex, JSON, Javascript
display(HTML('<b>h</b>'), Markdown('*m*'), SVG('<svg xmlns="http://www.w3.org/2000/svg"/>'), Latex('$l$'), JSON({'j': 1}), Javascript('1'))
display({'image/jpeg': 'anBlZw==', 'application/pdf': 'cGRm', 'custom/kind': 'c'}, raw=True)`)
  const [h, m, s, l, j, js, raw] = e.results
  assert.equal(h.html, '<b>h</b>')
  assert.equal(m.markdown, '*m*')
  assert.match(s.svg, /^<svg/)
  assert.equal(l.latex, '$l$')
  assert.deepEqual(j.json, { j: 1 })
  assert.equal(js.javascript, '1')
  assert.equal(raw.jpeg, 'anBlZw==')
  assert.equal(raw.pdf, 'cGRm')
  assert.deepEqual(raw.extra, { 'custom/kind': 'c' })
})

test('a plot is a picture and a chart', async () => {
  const e = await run(`import matplotlib.pyplot as plt
plt.plot([1, 2, 3], [2, 4, 8], marker='o', label='doubles')
plt.title('Growth'); plt.xlabel('Time (s)'); plt.ylabel('Cells'); plt.legend()
plt.show()`)
  const [r] = e.results
  const png = Buffer.from(r.png, 'base64')
  assert.equal(png.subarray(1, 4).toString(), 'PNG')
  if (process.env.PLOT) writeFileSync(process.env.PLOT, png)
  const { x_ticks: ticks, x_tick_labels: labels, y_ticks: _, y_tick_labels: __, ...chart } = r.chart
  assert.equal(ticks.length, labels.length)
  assert.deepEqual(chart, {
    type: 'line', title: 'Growth', x_label: 'Time (s)', x_unit: 's', x_scale: 'linear', y_label: 'Cells', y_unit: null, y_scale: 'linear',
    elements: [{ label: 'doubles', points: [[1, 2], [2, 4], [3, 8]] }],
  })
})

const charted = async (code) => (await run(`import matplotlib.pyplot as plt\n${code}\nplt.show()`)).results[0].chart

test('kinds of charts', async () => {
  const scatter = await charted("plt.scatter([1, 2], [3, 4], label='a'); plt.scatter([5], [6], label='b'); plt.yscale('log')")
  assert.equal(scatter.type, 'scatter')
  assert.equal(scatter.y_scale, 'log')
  assert.deepEqual(scatter.elements, [{ label: 'a', points: [[1, 3], [2, 4]] }, { label: 'b', points: [[5, 6]] }])
  const bar = await charted("plt.bar(['x', 'y'], [10, 20], label='Sold')")
  assert.equal(bar.type, 'bar')
  assert.deepEqual(bar.elements, [{ label: 'x', group: 'Sold', value: 10 }, { label: 'y', group: 'Sold', value: 20 }])
  const pie = await charted("plt.pie([1, 3], labels=['p', 'q']); plt.title('Pie')")
  assert.equal(pie.type, 'pie')
  assert.equal(pie.title, 'Pie')
  assert.deepEqual(pie.elements.map((e) => [e.label, Math.round(e.angle), e.radius]), [['p', 90, 1], ['q', 270, 1]])
  const box = await charted("plt.boxplot([[1, 2, 3, 4, 100], [4, 5, 6]], labels=['u', 'v'])")
  assert.equal(box.type, 'box_and_whisker')
  assert.deepEqual(box.elements[0], { label: 'u', min: 1, first_quartile: 2, median: 3, third_quartile: 4, max: 4, outliers: [100] })
  assert.equal(box.elements[1].label, 'v')
  const dates = await charted("import datetime\nplt.plot([datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)], [1, 2])")
  assert.equal(dates.x_scale, 'datetime')
  assert.match(String(dates.elements[0].points[0][0]), /^2024-01-01/)
  const names = await charted("plt.plot(['a', 'b'], [1, 2])")
  assert.equal(names.x_scale, 'categorical')
  const several = await charted("f, (a, b) = plt.subplots(1, 2); a.plot([1, 2]); b.bar(['x'], [1]); f.suptitle('Both')")
  assert.deepEqual([several.type, several.title, several.elements.map((e) => e.type)], ['superchart', 'Both', ['line', 'bar']])
})

test('contexts', async () => {
  await sbx.files.makeDir('/home/user/work')
  const ctx = await sbx.createCodeContext({ cwd: '/home/user/work' })
  assert.deepEqual({ language: ctx.language, cwd: ctx.cwd }, { language: 'python', cwd: '/home/user/work' })
  assert.equal(await text('import os; mine = 1; os.getcwd()', { context: ctx }), '/home/user/work')
  assert.equal((await sbx.runCode('mine')).error.name, 'NameError')
  assert.ok((await sbx.listCodeContexts()).some((c) => c.id === ctx.id && c.cwd === ctx.cwd))
  await sbx.restartCodeContext(ctx)
  assert.equal((await sbx.runCode('mine', { context: ctx })).error.name, 'NameError')
  await sbx.removeCodeContext(ctx)
  await assert.rejects(sbx.runCode('1', { context: ctx }), NotFoundError)
  await assert.rejects(sbx.removeCodeContext(ctx.id), NotFoundError)
  await assert.rejects(sbx.createCodeContext({ cwd: '/nowhere' }), SandboxError)
  await assert.rejects(sbx.createCodeContext({ language: 'cobol' }), SandboxError)
})

test('two executions in a context wait for each other', async () => {
  const order = []
  await Promise.all([
    run('import time; time.sleep(0.5); turn = 1').then(() => order.push(1)),
    new Promise((r) => setTimeout(r, 100)).then(() => run('turn += 1; turn')).then((e) => order.push(e.text)),
  ])
  assert.deepEqual(order, [1, '2'])
})

test('JavaScript', async () => {
  assert.equal(await text('const two = 2; let f = (x) => x * two; f(21)', { language: 'javascript' }), '42')
  const e = await run("console.log('out', two); console.error('err'); await new Promise((r) => setTimeout(r, 10)); ({ two })", { language: 'js' })
  assert.deepEqual([e.logs.stdout.join(''), e.logs.stderr.join(''), e.text], ['out 2\n', 'err\n', '{ two: 2 }'])
  const bad = await sbx.runCode("throw new TypeError('bad')", { language: 'javascript' })
  assert.deepEqual([bad.error.name, bad.error.value], ['TypeError', 'bad'])
  assert.equal((await run("display('<i>i</i>', 'text/html')", { language: 'javascript' })).results[0].html, '<i>i</i>')
  assert.equal((await sbx.runCode('process.exit(3)', { language: 'javascript' })).error.name, 'KernelDied')
  assert.equal(await text('typeof two', { language: 'javascript' }), 'undefined')
})

test('Bash and R', async () => {
  assert.equal(await printed('n=5; f() { echo "n is $n"; }; f; cd /tmp', { language: 'bash' }), 'n is 5\n')
  assert.equal(await printed("f; pwd; echo 'it''s'", { language: 'bash' }), 'n is 5\n/tmp\nits\n')
  assert.equal((await sbx.runCode('grep -q x /dev/null', { language: 'bash' })).error.value, 'exit status 1')
  assert.match((await run('x <- c(1, 2, 6); mean(x)', { language: 'r' })).results[0].text, /3/)
})

test('variables of the sandbox and of an execution', async () => {
  const code = { python: "import os; print(os.environ['OWNER'], os.environ.get('MINE'))", javascript: 'console.log(process.env.OWNER, process.env.MINE)', bash: 'echo $OWNER $MINE', r: "cat(Sys.getenv('OWNER'), Sys.getenv('MINE'))" }
  for (const [language, c] of Object.entries(code)) {
    assert.equal((await printed(c, { language, envs: { MINE: 'a "b" $c' } })).trim(), 'of the sandbox a "b" $c', language)
    assert.match(await printed(c, { language }), /^of the sandbox ?(None|undefined)?\n?$/, language)
  }
})

test('code and files of the sandbox are the same', async () => {
  await run("open('/home/user/by-code.txt', 'w').write('by code')")
  assert.equal(await sbx.files.read('/home/user/by-code.txt'), 'by code')
  await sbx.files.write('/home/user/by-sdk.txt', 'by sdk')
  assert.equal(await text("open('by-sdk.txt').read()"), 'by sdk')
  assert.equal((await sbx.commands.run('stat -c %U by-code.txt')).stdout, 'user\n')
})

test('a timeout interrupts the code and keeps the variables', async () => {
  await run('kept = 7')
  await assert.rejects(sbx.runCode('while True: pass', { timeoutMs: 1000 }), TimeoutError)
  assert.equal(await text('kept'), '7')
  for (const [language, code] of [['javascript', 'while (true) {}'], ['javascript', 'await new Promise(() => {})'], ['bash', 'while true; do sleep 1; done']]) {
    await assert.rejects(sbx.runCode(code, { language, timeoutMs: 1000 }), TimeoutError)
    assert.equal((await printed(language === 'bash' ? 'echo on' : "console.log('on')", { language })), 'on\n')
  }
})

test('a kernel that dies starts again', async () => {
  const ctx = await sbx.createCodeContext()
  const e = await sbx.runCode('import os; os.kill(os.getpid(), 9)', { context: ctx })
  assert.equal(e.error.name, 'KernelDied')
  assert.equal(await text('1 + 1', { context: ctx }), '2')
  await sbx.removeCodeContext(ctx)
})

test('long output is cut off', async () => {
  // A kernel drops what it publishes faster than it is read, so it publishes no faster than a busy machine reads.
  const e = await run("import time\nfor _ in range(80):\n    print('x' * (1 << 20), flush=True)\n    time.sleep(0.05)", { timeoutMs: 120_000 })
  const length = e.logs.stdout.join('').length
  assert.ok(length <= 64 << 20, `${length} characters`)
  assert.match(e.logs.stderr.join(''), /cut off after 64 MiB/, `after ${length} characters, ${e.error?.name}`)
})

test('a wrong or missing token is refused', async () => {
  const post = (headers) => fetch(`${process.env.E2B_SANDBOX_URL}/execute`, {
    method: 'POST', body: JSON.stringify({ code: '1' }), headers: { 'E2b-Sandbox-Id': sbx.sandboxId, 'E2b-Sandbox-Port': '49999', ...headers },
  })
  assert.equal((await post({})).status, 401)
  assert.equal((await post({ 'X-Access-Token': 'wrong' })).status, 401)
  assert.equal((await post({ 'X-Access-Token': sbx.envdAccessToken })).status, 200)
  const bad = (body) => fetch(`${process.env.E2B_SANDBOX_URL}/execute`, {
    method: 'POST', body, headers: { 'E2b-Sandbox-Id': sbx.sandboxId, 'E2b-Sandbox-Port': '49999', 'X-Access-Token': sbx.envdAccessToken },
  }).then(async (r) => `${r.status} ${await r.text()}`)
  assert.match(await bad('{"code": 1}'), /^400 code: want a string/)
  assert.match(await bad('{'), /^400 the body is no JSON/)
  assert.match(await bad('{"code": "1", "env_vars": {"A": 1}}'), /^400 env_vars/)
})

const draws = 'import random, numpy as np; [random.random(), np.random.rand(), random.random()]'

test('the clock is right, and two claims draw different numbers', async () => {
  const other = await Sandbox.create()
  try {
    const off = Math.abs(Number(await text('import time; time.time()', {}, other)) * 1000 - Date.now())
    assert.ok(off < 5000, `the clock is off by ${off} ms`)
    assert.notEqual(await text(draws, {}, other), await text(draws))
    const random = (on) => text('Math.random()', { language: 'javascript' }, on)
    assert.notEqual(await random(other), await random(sbx))
    const shell = (on) => printed('echo $RANDOM $RANDOM $RANDOM', { language: 'bash' }, on)
    assert.notEqual(await shell(other), await shell(sbx))
  } finally {
    await other.kill()
  }
})

test('pause and resume keep variables, and the state of generators', async () => {
  await run('import random; random.seed(5); before = random.random(); held = 11')
  await text('globalThis.held = 12', { language: 'javascript' })
  await sbx.pause()
  if (process.env.BARCHAN) await until('its memory is on disk', () => execFileSync(process.env.BARCHAN, ['show', sbx.sandboxId], { encoding: 'utf8' }).includes('Disk'))
  await sbx.connect()
  assert.equal(await text('held'), '11')
  assert.equal(await text('held', { language: 'javascript' }), '12')
  assert.equal(await text('drawn = random.random(); random.seed(5); [before, drawn] == [random.random(), random.random()]'), 'True')
})

test('forks keep variables, and diverge', async () => {
  await run('v = 1')
  await text('globalThis.w = 1', { language: 'javascript' })
  const forks = (await sbx.fork({ count: 2 })).map((f) => f.sandbox ?? f)
  try {
    assert.equal(await text('v += 10; v', {}, forks[0]), '11')
    assert.equal(await text('v', {}, forks[1]), '1')
    assert.equal(await text('v'), '1')
    assert.equal(await text('w', { language: 'javascript' }, forks[1]), '1')
    const [a, b] = [await text(draws, {}, forks[0]), await text(draws, {}, forks[1])]
    assert.notEqual(a, b)
    const random = (on) => text('Math.random()', { language: 'javascript' }, on)
    assert.notEqual(await random(forks[0]), await random(forks[1]))
  } finally {
    await Promise.all(forks.map((f) => f.kill()))
  }
})
