//! What a cell's threads really call, against what their filters allow: no
//! rule without a use or a reason, no refusal that nobody knows of.
//!
//! Needs EXOCELL_TEST_BIN, strace, and what `make test` prepares: the guest
//! kernel and the image `exocell/base:latest`.

mod support;

use std::collections::BTreeSet;
use std::fs;

use exocell_cell::processes;
use exocell_cell::vmm::jail::ThreadClass::{self, Control, Device, Folder, GuestKernel};
use support::trace::Trace;
use support::{Cell, exocell};

/// Rules that the workload below does not reach, each with the path that does.
const RARE: &[(ThreadClass, &[&str], &str)] = &[
];

/// Calls that the filters refuse and whose callers do without.
const REFUSED: &[(ThreadClass, &[&str], &str)] = &[
];

fn listed(list: &[(ThreadClass, &[&str], &str)], class: ThreadClass, call: &str) -> bool {
    list.iter().any(|(of, calls, _)| *of == class && calls.contains(&call))
}

#[test]
fn rules_are_used_and_refusals_are_known() {
    let directory = tempfile::tempdir().unwrap();
    let shared = directory.path().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::write(shared.join("file"), "from the host\n").unwrap();
    let log = directory.path().join("strace");
    workload(&shared, &log);
    let trace = Trace::read(&fs::read_to_string(&log).unwrap());

    let mut wrong = BTreeSet::new();
    for class in ThreadClass::ALL {
        for rule in class.rules() {
            let used = trace.used(class).contains(rule.name);
            let rare = listed(RARE, class, rule.name);
            if !used && !rare {
                wrong.insert(format!("{}: nothing uses {} ({})", class.name(), rule.name, rule.why));
            }
        }
        for call in trace.refused(class) {
            if !listed(REFUSED, class, call) {
                wrong.insert(format!("{}: {call} was refused", class.name()));
            }
        }
    }
    let wrong: Vec<String> = wrong.into_iter().collect();
    assert!(wrong.is_empty(), "the filters and their use differ:\n{}", wrong.join("\n"));
}

/// Everything an operator and a guest do in the course of a day.
fn workload(shared: &std::path::Path, log: &std::path::Path) {
    let volume = format!("{}:/shared", shared.display());
    let cell = Cell::traced(log, &["-v", &volume, "--cpus", "2", "--timeout", "5m"]);
    cell.exec(&[], &["sh", "-ec", IN_THE_FOLDER]);
    cell.exec(&[], &["sh", "-ec", IN_THE_GUEST]);
    cell.exec(&["--tty"], &["sh", "-c", "test -t 1 && stty size"]);
    let copy = shared.with_file_name("copy");
    exocell(&["cp", &format!("{}:/etc", cell.name()), copy.to_str().unwrap()]);
    exocell(&["cp", copy.to_str().unwrap(), &format!("{}:/tmp", cell.name())]);
    exocell(&["stats", cell.name()]);
    exocell(&["logs", cell.name()]);
    exocell(&["kill", "--signal", "USR1", cell.name()]);
    exocell(&["update", "--revoke", "folder:/shared", cell.name()]);
    cell.end();
}

const IN_THE_FOLDER: &str = "
cd /shared
ls -la; cat file; df .
echo more >> file; echo new > new; chmod 600 new; touch -d @0 new; chown 0:0 new
mkdir dir; ln new dir/hard; ln -s ../new dir/soft; readlink dir/soft; cat dir/soft
mv new dir/moved; truncate -s 5 dir/moved
dd if=/dev/zero of=big bs=64k count=16 conv=fsync 2> /dev/null
dd if=/dev/zero of=big bs=64k count=1 conv=notrunc,fdatasync 2> /dev/null
dd if=big of=/dev/null bs=1M 2> /dev/null
rm -r dir big
";

const IN_THE_GUEST: &str = r"
dd if=/dev/zero of=/var/big bs=1M count=16 conv=fsync 2> /dev/null
sync; echo 3 > /proc/sys/vm/drop_caches 2> /dev/null || true
cat /var/big > /dev/null; rm /var/big; sync
dd if=/dev/hwrng of=/dev/null bs=64 count=1 2> /dev/null || true
echo to the console > /dev/console 2> /dev/null || true
python3 - <<'PYTHON'
import mmap, os, signal, threading, time
threads = [threading.Thread(target=lambda: sum(range(10000))) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
area = mmap.mmap(-1, 8 << 20); area[:] = b'x' * len(area); area.close()
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
for _ in range(5):
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
PYTHON
";

#[test]
fn every_thread_of_a_running_cell_is_confined() {
    let directory = tempfile::tempdir().unwrap();
    let volume = format!("{}:/shared", directory.path().display());
    let cell = Cell::started(&["-v", &volume, "--cpus", "2"]);
    cell.exec(&[], &["ls", "/shared"]);
    let processes = processes::of_cell(cell.supervisor_pid());
    assert!(processes.len() >= 3, "supervisor, guest kernel and stubs, not {processes:?}");
    for process in processes {
        for thread in fs::read_dir(format!("/proc/{}/task", process.pid)).unwrap().flatten() {
            let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
            let has = |line: &str| status.lines().any(|found| found == line);
            let name = status.lines().next().unwrap_or_default();
            assert!(has("Seccomp:\t2"), "a thread has no system call filter: {name}");
            assert!(has("NoNewPrivs:\t1"), "a thread may gain privileges: {name}");
        }
    }
}
