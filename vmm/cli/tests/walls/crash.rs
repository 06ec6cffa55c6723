//! Whatever is killed, whenever: nothing stays, and `ps` is right.

use std::collections::BTreeSet;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::common::cell::{Cell, pid, row};
use crate::common::host::{self, FileId, Namespace};
use crate::common::{
    Finished, IMAGE, LIMIT, Started, eventually, exocell, finish, run, unique, until,
};

/// Who is killed in a round.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Target {
    Supervisor,
    GuestKernel,
    Stub,
}

/// How a cell is started, and what happens to it.
#[derive(Debug, Clone, Copy)]
struct Round {
    target: Target,
    detach: bool,
    remove: bool,
    /// After the supervisor was seen.
    delay: Duration,
}

#[test]
fn kills_at_random_moments_leave_nothing() {
    let rounds = std::env::var("EXOCELL_TEST_CRASH_ROUNDS").ok();
    let rounds: u32 = rounds.map_or(30, |text| text.parse().expect("a number of rounds"));
    for number in 0..rounds {
        let round = Round {
            target: [Target::Supervisor, Target::GuestKernel, Target::Stub][number as usize % 3],
            detach: random() & 1 == 0,
            remove: random() & 1 == 0,
            delay: Duration::from_millis(random() % 600),
        };
        eprintln!("round {number}: {round:?}");
        play(round);
    }
}

/// Random bits from the host's kernel.
fn random() -> u64 {
    use std::io::Read;
    let mut bytes = [0; 8];
    let mut source = std::fs::File::open("/dev/urandom").expect("/dev/urandom");
    source.read_exact(&mut bytes).expect("random bytes");
    u64::from_ne_bytes(bytes)
}

fn play(round: Round) {
    let name = unique("crash");
    // Nothing is left behind by a failing test either.
    let _guard = Cell { name: name.clone() };
    let mut flags = vec!["run", "--name", &name];
    flags.extend(round.detach.then_some("-d"));
    flags.extend(round.remove.then_some("--rm"));
    flags.extend([IMAGE, "sleep", "100"]);
    let mut started = Started::new(&mut exocell(flags));
    started.close_stdin();
    let victim = Victim::find(&mut started, round.delay);
    let struck = victim.strike(round.target);
    if !struck.is_fatal() {
        // A stub's death is the death of the guest process it runs; the cell
        // may well survive that, but then it must work.
        still_works_or_ends(&name, &victim.namespace);
        finish(&mut exocell(["rm", "-f", &name]), b"");
    }
    let ended = started.finish(LIMIT).expect("run ends with its cell");
    check_run(round, struck, &ended);
    victim.is_gone();
    check_record(round, &name, &victim.id);
    assert!(!host::has_control_group(&victim.id), "its control group is left");
}

/// A cell as the host saw it before it was hit.
struct Victim {
    id: String,
    namespace: Namespace,
    files: BTreeSet<FileId>,
}

impl Victim {
    /// Waits for the supervisor of what `started` starts, and `delay` longer.
    fn find(started: &mut Started, delay: Duration) -> Self {
        let mut supervisor = None;
        eventually("there is a supervisor", || {
            supervisor = host::jailed_child(started.pid());
            supervisor.is_some()
        });
        let supervisor = supervisor.expect("just found");
        let namespace = host::namespace(supervisor).expect("it lives");
        std::thread::sleep(delay);
        let files = host::nameless_files(&host::processes(&namespace));
        Self { id: id_of(supervisor), namespace, files }
    }

    /// Kills the target, or the nearest thing there is so early in its life.
    fn strike(&self, target: Target) -> Target {
        let members = host::processes(&self.namespace);
        let place = match target {
            Target::Supervisor => 0,
            Target::GuestKernel => 1,
            Target::Stub if members.len() > 2 => 2 + random() as usize % (members.len() - 2),
            Target::Stub => 1,
        };
        let place = place.min(members.len() - 1);
        host::kill(members[place]);
        match place {
            0 => Target::Supervisor,
            1 => Target::GuestKernel,
            _ => Target::Stub,
        }
    }

    /// Asserts that no process, memory, disk or mount of the cell is left.
    fn is_gone(&self) {
        eventually("its processes are gone", || host::processes(&self.namespace).is_empty());
        let held = host::all_nameless_files();
        let left: Vec<&FileId> = self.files.intersection(&held).collect();
        assert!(left.is_empty(), "files still held: {left:?}");
        assert!(!host::is_mounted(&self.id), "mounts are left");
    }
}

impl Target {
    fn is_fatal(self) -> bool {
        self != Self::Stub
    }
}

/// The cell's id, from the supervisor's own record.
fn id_of(supervisor: i32) -> String {
    let mut found = None;
    eventually("the cell has an id", || {
        found = host::records().into_iter().find(|id| {
            let status = std::fs::read_to_string(host::record(id).join("spec.json"));
            let name = started_name(supervisor);
            status.is_ok_and(|text| name.as_ref().is_some_and(|name| text.contains(name.as_str())))
        });
        found.is_some()
    });
    found.expect("just found")
}

/// The `--name` on a supervisor's command line, which is its parent's.
fn started_name(supervisor: i32) -> Option<String> {
    let line = host::command_line(supervisor);
    line.split_ascii_whitespace().find(|word| word.starts_with("test-crash")).map(str::to_owned)
}

fn still_works_or_ends(name: &str, namespace: &Namespace) {
    let well = until(LIMIT, || {
        host::processes(namespace).is_empty()
            || row(name).is_none_or(|row| row["state"] == "exited")
            || run(["exec", name, "true"]).code == 0
    });
    let told = || run(["inspect", name]).stdout;
    assert!(well, "neither alive nor ended: {}", String::from_utf8_lossy(&told()));
}

/// A killed cell is 137; one that never came up may say 125. A program whose
/// stub was killed ends with SIGSEGV, by the guest kernel's own rule (139). A
/// detached start that was complete before the blow is a success.
fn check_run(round: Round, struck: Target, ended: &Finished) {
    let allowed: &[i32] = match (round.detach, struck) {
        (true, _) => &[0, 125],
        (false, Target::Stub) => &[137, 139, 125],
        (false, _) => &[137, 125],
    };
    assert!(allowed.contains(&ended.code), "{round:?}: {} {}", ended.code, ended.stderr);
    if ended.code != 0 && struck.is_fatal() {
        assert!(ended.stderr.contains("exocell: "), "{round:?}: {}", ended.stderr);
    }
}

fn check_record(round: Round, name: &str, id: &str) {
    let row = row(name);
    let directory = host::record(id);
    if round.remove {
        assert!(row.is_none(), "{round:?}: {row:?}");
    } else if let Some(row) = row {
        assert_eq!(row["state"], "exited", "{round:?}");
        let code = row["exit_code"].as_i64();
        assert!(code == Some(137) || code == Some(125), "{round:?}: {row}");
        assert!(!directory.join("control.sock").exists(), "{round:?}");
        run(["rm", name]).ok();
    }
    assert!(!directory.exists(), "{round:?}: {}", directory.display());
}

/// On a host under load a program may not run for seconds, while its guest kernel does.
#[test]
fn a_program_that_the_host_does_not_run_for_a_while_goes_on() {
    let cell = Cell::start("stalled", &[], &["sh", "-c", "while :; do :; done"]);
    let namespace = host::namespace(cell.supervisor()).expect("it lives");
    let mut busy = 0;
    eventually("a stub is busy", || {
        let stubs = host::processes(&namespace).into_iter().skip(2);
        busy = stubs.max_by_key(|pid| host::user_ticks(*pid)).unwrap_or(0);
        host::user_ticks(busy) > 20
    });
    host::send(busy, Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(5));
    host::send(busy, Signal::SIGCONT);
    let before = host::user_ticks(busy);
    eventually("it runs again", || host::user_ticks(busy) > before + 20);
    assert_eq!(cell.state(), "running");
}

#[test]
fn a_killed_guest_kernel_is_told_with_its_reason() {
    let name = unique("kernel");
    let _guard = Cell { name: name.clone() };
    run(["run", "-d", "--name", &name, IMAGE, "sleep", "100"]).ok();
    let told = run(["inspect", "--json", &name]).ok().one();
    host::kill(pid(&told, "guest_kernel_pid"));
    assert_eq!(run(["wait", &name]).ok().text(), "137");
    let told = run(["inspect", "--json", &name]).ok().one();
    run(["rm", &name]).ok();
    let reason = told["reason"].as_str().expect("a reason");
    assert!(reason.contains("guest kernel") && reason.contains("SIGKILL"), "{reason}");
}

#[test]
fn a_killed_supervisor_is_told_with_its_reason() {
    let name = unique("supervisor");
    let _guard = Cell { name: name.clone() };
    run(["run", "-d", "--name", &name, IMAGE, "sleep", "100"]).ok();
    let told = run(["inspect", "--json", &name]).ok().one();
    host::kill(pid(&told, "supervisor_pid"));
    assert_eq!(run(["wait", &name]).ok().text(), "137");
    let told = run(["inspect", "--json", &name]).ok().one();
    run(["rm", &name]).ok();
    assert_eq!(told["exit_code"], 137);
    assert!(told["reason"].as_str().is_some_and(|reason| reason.contains("supervisor")), "{told}");
}

/// What a program has flushed is there when the cell starts again, and the disk is whole.
#[test]
fn a_kept_disk_is_whole_after_a_kill() {
    let write = "import os\n\
                 for i in range(20):\n\
                 \x20   with open(f'/root/f{i}', 'w') as file:\n\
                 \x20       file.write('kept'); file.flush(); os.fsync(file.fileno())";
    let name = unique("flushed");
    let _guard = Cell { name: name.clone() };
    run(["run", "-d", "--name", &name, IMAGE, "sleep", "100"]).ok();
    for _ in 0..3 {
        run(["exec", &name, "python3", "-c", write]).ok();
        let told = run(["inspect", "--json", &name]).ok().one();
        host::kill(pid(&told, "supervisor_pid"));
        run(["wait", &name]).ok();
        run(["start", &name]).ok();
        let all = run(["exec", &name, "sh", "-c", "cat /root/f* | wc -c; ls -R / > /dev/null"]);
        assert_eq!(all.ok().text(), "80");
        let console = run(["logs", "--console", &name]).ok();
        assert!(!console.text().contains("EXT4-fs error"), "{}", console.text());
    }
}
