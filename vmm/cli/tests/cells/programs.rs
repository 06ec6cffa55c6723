//! Ordinary programs in a cell.

use std::path::Path;

use crate::common::{run, shell, text};

#[test]
fn sqlite_keeps_a_database() {
    let script = "cd /root && sqlite3 a.db 'create table t(x); insert into t values (1),(2),(39); \
                  pragma journal_mode=wal; select sum(x) from t;' && sqlite3 a.db 'pragma integrity_check'";
    assert_eq!(shell(&[], script).ok().text(), "wal\n42\nok");
}

#[test]
fn git_keeps_a_history() {
    let script = "git init -q /root/r && cd /root/r && git config user.email a@b && git config user.name n \
                  && echo one > f && git add f && git commit -qm first && echo two > f \
                  && git commit -qam second && git log --format=%s && git fsck 2>&1 && git status --short";
    assert_eq!(shell(&[], script).ok().text(), "second\nfirst");
}

#[test]
fn gcc_makes_a_program_that_runs() {
    let script = r#"cd /root && cat > a.c <<'C'
#include <pthread.h>
#include <stdio.h>
static void *add(void *n) { ++*(int *)n; return n; }
int main(void) {
    int n = 41; pthread_t t;
    if (pthread_create(&t, 0, add, &n) || pthread_join(t, 0)) return 1;
    printf("%d\n", n);
    return 0;
}
C
gcc -O2 -Wall -o a a.c -lpthread && ./a"#;
    assert_eq!(shell(&[], script).ok().text(), "42");
}

#[test]
fn python_runs_threads_processes_and_its_own_tests() {
    let script = "cd /root && cat > t.py <<'P'
import hashlib, multiprocessing, subprocess, threading, unittest
def square(n): return n * n
class Suite(unittest.TestCase):
    def test_processes(self):
        with multiprocessing.Pool(3) as pool:
            self.assertEqual(sum(pool.map(square, range(20))), 2470)
    def test_threads(self):
        seen = []
        threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(20)]
        [t.start() for t in threads]; [t.join() for t in threads]
        self.assertEqual(sorted(seen), list(range(20)))
    def test_child(self):
        self.assertEqual(subprocess.check_output(['echo', 'hi']), b'hi\\n')
    def test_hash(self):
        self.assertTrue(hashlib.sha256(b'').hexdigest().startswith('e3b0c442'))
unittest.main()
P
python3 t.py 2>&1 | grep -E '^(Ran 4|OK)' | cut -c1-11";
    assert_eq!(shell(&["--cpus", "2"], script).ok().text(), "Ran 4 tests\nOK");
}

#[test]
fn the_tools_of_procps_work() {
    for tool in ["ps aux", "ps -ef", "top -b -n 1", "uptime", "free", "vmstat", "pgrep sh", "w"] {
        let said = shell(&[], tool).ok();
        assert!(!said.text().is_empty() && said.stderr.is_empty(), "{tool}: {}", said.stderr);
    }
    let listed = shell(&[], "ps -eo comm=,args=").ok();
    assert!(listed.text().lines().any(|line| line.starts_with("ps ")), "{}", listed.text());
}

/// The values of `key` in the text of a `/proc/cpuinfo`.
fn values<'a>(cpuinfo: &'a str, key: &str) -> Vec<&'a str> {
    let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.filter(|(name, _)| name.trim_end() == key).map(|(_, value)| value.trim()).collect()
}

#[test]
fn the_processor_is_the_hosts() {
    let host = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let said = shell(&["--cpus", "2"], "cat /proc/cpuinfo").ok();
    let cell = said.text();
    assert_eq!(values(cell, "processor"), ["0", "1"]);
    assert_eq!(values(cell, "core id"), ["0", "1"]);
    for key in ["vendor_id", "cpu family", "model", "model name", "stepping", "clflush size"] {
        assert_eq!(values(cell, key)[0], values(&host, key)[0], "{key}");
    }
    let [in_cell, on_host] = [cell, &host].map(|of| values(of, "flags")[0]);
    let has = |flags: &str, flag| flags.split(' ').any(|one| one == flag);
    for flag in "fpu lm sse2 sse4_2 popcnt aes avx avx2 bmi2 fma sha_ni avx512f rdpid".split(' ') {
        assert_eq!(has(in_cell, flag), has(on_host, flag), "{flag}: {in_cell}");
    }
    for flag in ["vmx", "svm", "pku", "amx_tile"] {
        assert!(!has(in_cell, flag), "{flag}: programs can't use it");
    }
    assert!(values(cell, "cpu MHz")[0].parse::<f64>().unwrap() > 100.0, "{cell}");
}

#[test]
fn the_time_of_programs_is_the_users() {
    let script = "import os; sum(range(2 * 10**7)); print(*os.times()[:2])";
    for intra in ["aspace", "none"] {
        let said = shell(&["--intra", intra], &format!("python3 -c '{script}'")).ok();
        let times: Vec<f64> =
            said.text().split(' ').map(|seconds| seconds.parse().unwrap()).collect();
        assert!(times[0] > times[1], "{intra}: user and system time are {times:?}");
    }
}

#[test]
fn perl_and_pipes_work() {
    let script =
        "seq 1 1000 | perl -ne '$s += $_; END { print \"$s\\n\" }' | tee /tmp/sum && cat /tmp/sum";
    assert_eq!(shell(&[], script).ok().text(), "500500\n500500");
}

#[test]
fn node_runs_timers_workers_streams_and_a_server() {
    let script = r#"cd /root && cat > t.mjs <<'J'
import http from 'node:http'; import zlib from 'node:zlib'; import { once } from 'node:events'
import { execFileSync } from 'node:child_process'; import { Worker } from 'node:worker_threads'
const hot = n => { let s = 0; for (let i = 0; i < n; i++) s = (s + i * i) % 1000003; return s }
const code = `const { parentPort } = require('node:worker_threads'); (${hot}); parentPort.postMessage((${hot})(5e5))`
const worker = new Worker(code, { eval: true })
const [answer] = await once(worker, 'message')
console.log('worker', answer === hot(5e5))
const server = http.createServer((request, response) => request.pipe(response)).listen(0, '127.0.0.1')
await once(server, 'listening')
const body = 'x'.repeat(1 << 20)
const echo = await fetch(`http://127.0.0.1:${server.address().port}/`, { method: 'POST', body })
console.log('http', (await echo.text()).length)
server.close(); server.closeAllConnections()
console.log('zlib', zlib.gunzipSync(zlib.gzipSync(body)).length)
console.log('child', execFileSync('echo', ['hi'], { encoding: 'utf8' }).trim())
await new Promise(resolve => setTimeout(resolve, 20))
console.log('timer')
J
node t.mjs"#;
    let expected = "worker true\nhttp 1048576\nzlib 1048576\nchild hi\ntimer";
    assert_eq!(shell(&["-m", "512m", "--cpus", "2"], script).ok().text(), expected);
}

/// Debian's Go compiler takes 450 MB; the registry server, a Go program that
/// the image tests need anyway, has goroutines, a collector and a network of
/// its own too.
#[test]
fn a_go_program_serves_http() {
    let program = Path::new("/usr/bin/docker-registry");
    assert!(program.exists(), "docker-registry is missing: scripts/setup installs it");
    let script = r#"cd /root && printf 'version: 0.1
storage: {filesystem: {rootdirectory: /root/store}}
http: {addr: "127.0.0.1:5000"}
' > config.yml
/mnt/docker-registry serve config.yml > log 2>&1 & 
python3 - <<'P'
import hashlib, threading, time, urllib.request as web
at = 'http://127.0.0.1:5000/v2/'
for _ in range(600):
    try: web.urlopen(at); break
    except OSError: time.sleep(0.05)
def push(index):
    blob = bytes([index]) * (1 << 18)
    digest = 'sha256:' + hashlib.sha256(blob).hexdigest()
    post = web.Request(at + f'p{index}/blobs/uploads/', b'', method='POST')
    place = web.urlopen(post).headers['Location']
    put = web.Request(f'{place}&digest={digest}', blob, {'Content-Type': 'application/octet-stream'}, method='PUT')
    assert web.urlopen(put).status == 201
    assert web.urlopen(at + f'p{index}/blobs/{digest}').read() == blob
    done.append(index)
done = []
threads = [threading.Thread(target=push, args=(index,)) for index in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(sorted(done))
P"#;
    let volume = format!("{}:/mnt:ro", text(program.parent().expect("a directory")));
    let flags = ["run", "--rm", "--cpus", "2", "-m", "512m", "-v", &volume];
    let ended = run([&flags[..], &[crate::common::IMAGE, "sh", "-c", script]].concat()).ok();
    assert_eq!(ended.text(), "[0, 1, 2, 3, 4, 5, 6, 7]");
}
