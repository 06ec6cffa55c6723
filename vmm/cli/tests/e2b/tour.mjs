// A tour of E2B's SDK for JavaScript, unmodified, against a server of sandboxes.

import assert from 'node:assert/strict'
import {
  CommandExitError, FileNotFoundError, FilesystemEventType, NotFoundError, Sandbox,
  SandboxNotFoundError, TimeoutError,
} from 'e2b'

const eventually = async (what, work) => {
  const until = Date.now() + 60_000
  while (Date.now() < until) {
    if (await work()) return
    await new Promise((done) => setTimeout(done, 50))
  }
  assert.fail(what)
}

const box = await Sandbox.create({ timeoutMs: 120_000, metadata: { kind: 'js' }, envs: { A: 'b c' } })
const info = await box.getInfo()
assert.equal(info.sandboxId, box.sandboxId)
assert.deepEqual(info.metadata, { kind: 'js' })
assert.equal(await box.isRunning(), true)
await box.setTimeout(600_000)
const listed = await Sandbox.list({ query: { metadata: { kind: 'js' } } }).nextItems()
assert.deepEqual(listed.map((it) => it.sandboxId), [box.sandboxId])
const [metrics] = await box.getMetrics()
assert.equal(metrics.memTotal, 256 << 20)
console.log('sandbox')

const told = await box.files.write('a/b.txt', 'words')
assert.equal(told.path, '/home/user/a/b.txt')
assert.equal(await box.files.read('a/b.txt'), 'words')
const many = await box.files.write([{ path: 'x', data: '1' }, { path: 'y', data: new Uint8Array([7, 0]).buffer }])
assert.deepEqual(many.map((it) => it.path), ['/home/user/x', '/home/user/y'])
assert.deepEqual([...await box.files.read('y', { format: 'bytes' })], [7, 0])
assert.equal(await box.files.makeDir('d/e'), true)
assert.equal(await box.files.makeDir('d/e'), false)
assert.deepEqual((await box.files.list('d')).map((it) => it.name), ['e'])
assert.equal((await box.files.rename('x', 'd/x')).path, '/home/user/d/x')
assert.equal((await box.files.getInfo('d/x')).size, 1)
assert.equal(await box.files.exists('x'), false)
await box.files.remove('d')
assert.equal(await box.files.exists('d'), false)
const url = await box.downloadUrl('a/b.txt', { useSignatureExpiration: 600 })
assert.equal(await (await fetch(url)).text(), 'words')
console.log('files')

const done = await box.commands.run('echo $A; echo err >&2; pwd')
assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['b c\n/home/user\n', 'err\n', 0])
await assert.rejects(box.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
const cat = await box.commands.run('cat', { background: true, stdin: true })
await box.commands.sendStdin(cat.pid, 'in')
await box.commands.closeStdin(cat.pid)
assert.equal((await cat.wait()).stdout, 'in')
const sleeper = await box.commands.run('sleep 1000', { background: true })
assert.equal((await box.commands.list()).some((it) => it.pid === sleeper.pid), true)
await sleeper.disconnect()
const again = await box.commands.connect(sleeper.pid)
assert.equal(await again.kill(), true)
await assert.rejects(again.wait(), CommandExitError)
await assert.rejects(box.commands.run('sleep 1000', { timeoutMs: 1_000 }), TimeoutError)
console.log('commands')

let heard = ''
const terminal = await box.pty.create({
  rows: 24, cols: 80, timeoutMs: 60_000, onData: (data) => { heard += Buffer.from(data).toString() },
})
await box.pty.resize(terminal.pid, { rows: 10, cols: 20 })
await box.pty.sendInput(terminal.pid, Buffer.from('stty size; echo x$((40 + 2))\nexit\n'))
await terminal.wait()
assert.match(heard, /10 20[^]*x42/)
console.log('pty')

await box.files.makeDir('watched')
const events = []
const watch = await box.files.watchDir('watched', (event) => { events.push(event) }, { recursive: true })
await box.files.write('watched/f', 'x')
await eventually('a write is told', () => events.some((it) => it.name === 'f' && it.type === FilesystemEventType.WRITE))
await watch.stop()
console.log('watch')

assert.equal(await box.pause(), true)
assert.equal((await box.getInfo()).state, 'paused')
await box.connect({ timeoutMs: 300_000 })
assert.equal(await box.files.read('watched/f'), 'x')
console.log('pause')

await assert.rejects(box.files.read('none'), FileNotFoundError)
await assert.rejects(Sandbox.connect('0'.repeat(32)), NotFoundError)
await assert.rejects(Sandbox.create({ apiKey: 'e2b_wrong' }), /key/i)
assert.equal(await box.kill(), true)
assert.equal(await box.isRunning(), false)
await assert.rejects(box.commands.run('true'), SandboxNotFoundError)
console.log('errors')
