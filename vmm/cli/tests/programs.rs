//! Ordinary programs in a cell.

mod common;

use common::shell;

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
fn perl_and_pipes_work() {
    let script =
        "seq 1 1000 | perl -ne '$s += $_; END { print \"$s\\n\" }' | tee /tmp/sum && cat /tmp/sum";
    assert_eq!(shell(&[], script).ok().text(), "500500\n500500");
}
