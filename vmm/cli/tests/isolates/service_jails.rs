//! The processes of `exocell serve --http`: who may what, and whom the end of one costs what.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::common::{eventually, program};

/// Adds; says its data; runs for ever.
const MODULE: &str = r#"(module (memory (export "memory") 1 1000)
  (data (i32.const 0) "TENANTS-OWN-BYTES")
  (func (export "add") (param i32 i32) (result i32) (i32.add (local.get 0) (local.get 1)))
  (func (export "data") (result i32) (i32.load (i32.const 0)))
  (func (export "spin") (loop $again (br $again))))"#;
/// What is looked for in memory: not a text of this program's, nor of a command line.
const MARK: [&str; 2] = ["TENANTS-", "OWN-BYTES"];
const NAMESPACES: [&str; 6] = ["user", "pid", "mnt", "net", "ipc", "uts"];

/// A service with a module `m-TENANT` of each tenant.
struct World {
    root: TempDir,
    server: Child,
    keys: BTreeMap<String, String>,
}

impl World {
    fn new(tenants: &[&str], flags: &[&str]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("m.wat");
        fs::write(&file, MODULE).unwrap();
        let caps = root.path().join("caps.toml");
        fs::write(&caps, "version = 1\n[memory]\nlimit = \"64M\"\n[time]\ndeadline = \"60s\"")
            .unwrap();
        let mut keys = BTreeMap::new();
        for tenant in tenants {
            let key = add(root.path(), tenant, &format!("m-{tenant}"), &file, &caps);
            keys.insert((*tenant).to_owned(), key);
        }
        let socket = root.path().join("http.sock").display().to_string();
        let mut server = exocell(root.path())
            .args(["serve", "--http", &socket])
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(&socket), "{line}");
        Self { root, server, keys }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.root.path().join("http.sock")).unwrap();
        stream.set_read_timeout(Some(crate::common::LIMIT)).unwrap();
        stream
    }

    fn request(&self, tenant: &str, function: &str, body: &str) -> String {
        let (key, length) = (&self.keys[tenant], body.len());
        format!(
            "POST /v1/call/m-{tenant}/{function} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
    }

    fn call(&self, tenant: &str, function: &str, body: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(self.request(tenant, function, body).as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[track_caller]
    fn is_well(&self, tenant: &str) {
        let answer = self.call(tenant, "add", "[40, 2]");
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("[42]"), "{answer}");
    }

    /// The processes of this service that have this name.
    fn processes(&self, name: &str) -> BTreeSet<u32> {
        descendants(self.server.id()).into_iter().filter(|pid| name_of(*pid) == name).collect()
    }

    fn worker(&self) -> u32 {
        let workers = self.processes("worker");
        assert_eq!(workers.len(), 1, "{workers:?}");
        *workers.first().unwrap()
    }

    /// The worker that this tenant's next call makes, or has.
    fn worker_of(&self, tenant: &str, others: &BTreeSet<u32>) -> u32 {
        self.is_well(tenant);
        let own: Vec<u32> = self.processes("worker").difference(others).copied().collect();
        assert_eq!(own.len(), 1, "{own:?} beside {others:?}");
        own[0]
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn exocell(root: &Path) -> Command {
    let mut command = Command::new(program());
    command.arg("--root").arg(root);
    command
}

/// Adds a module; the tenant's key, if it is new.
fn add(root: &Path, tenant: &str, name: &str, file: &Path, caps: &Path) -> String {
    let added = exocell(root)
        .args(["module", "add", "--tenant", tenant, "--caps"])
        .args([caps.as_os_str(), name.as_ref(), file.as_os_str()])
        .output()
        .unwrap();
    assert!(added.status.success(), "{added:?}");
    String::from_utf8(added.stdout).unwrap().trim().to_owned()
}

fn parents() -> BTreeMap<u32, u32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, status(pid, "PPid")?.parse().ok()?))).collect()
}

fn descendants(of: u32) -> BTreeSet<u32> {
    let parents = parents();
    let mut found = BTreeSet::from([of]);
    loop {
        let more: Vec<u32> = parents
            .iter()
            .filter(|(pid, parent)| found.contains(parent) && !found.contains(pid))
            .map(|(pid, _)| *pid)
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

fn status(process: impl std::fmt::Display, field: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

fn name_of(pid: u32) -> String {
    status(pid, "Name").unwrap_or_default()
}

fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}

/// Whether one of its threads runs whenever it is looked at: a short call does not.
fn is_busy(pid: u32) -> bool {
    (0..10).all(|_| {
        std::thread::sleep(Duration::from_millis(20));
        runs(pid)
    })
}

fn runs(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut tasks = tasks.map(|task| format!("{pid}/task/{}", task.file_name().display()));
    tasks.any(|task| status(task, "State").is_some_and(|state| state.starts_with('R')))
}

fn is_gone(pid: u32) -> bool {
    status(pid, "State").is_none_or(|state| state.starts_with('Z'))
}

#[track_caller]
fn has(answer: &str, status: u16, words: &str) {
    let right = answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(words);
    assert!(right, "not {status} with {words}: {answer}");
}

#[track_caller]
fn assert_jailed(pid: u32, server: u32) {
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let task = format!("{pid}/task/{}", task.file_name().display());
        let name = status(&task, "Name");
        for (field, value) in [("Seccomp", "2"), ("NoNewPrivs", "1")] {
            assert_eq!(status(&task, field).as_deref(), Some(value), "{field} of {name:?}");
        }
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            let value = status(&task, set).unwrap();
            assert_eq!(u64::from_str_radix(&value, 16), Ok(0), "{set} of {name:?}");
        }
    }
    for namespace in NAMESPACES {
        let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
        assert_ne!(of(pid), of(server), "{namespace} of {}", name_of(pid));
    }
    let root: Vec<_> = fs::read_dir(format!("/proc/{pid}/root")).unwrap().collect();
    assert!(root.is_empty(), "{root:?}");
}

#[test]
fn the_front_and_the_workers_are_jailed() {
    let world = World::new(&["alice", "bob"], &[]);
    world.is_well("alice");
    world.is_well("bob");
    let (front, workers) = (world.processes("front"), world.processes("worker"));
    assert_eq!((front.len(), workers.len()), (1, 2));
    for pid in front.iter().chain(&workers) {
        assert_jailed(*pid, world.server.id());
    }
    // As root each has an id that nobody else has.
    if nix::unistd::geteuid().is_root() {
        let ids: BTreeSet<_> = front.union(&workers).map(|pid| status(pid, "Uid")).collect();
        assert_eq!(ids.len(), 3, "{ids:?}");
        assert!(ids.iter().flatten().all(|ids| !ids.split('\t').any(|id| id == "0")), "{ids:?}");
    }
}

/// Whether a process has the module's bytes somewhere in its memory.
fn has_mark(pid: u32) -> bool {
    let mark = MARK.concat();
    let mut memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().any(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).unwrap());
        if !rest.starts_with('r') || end - start > 256 << 20 {
            return false;
        }
        let mut bytes = vec![0; (end - start) as usize];
        let read = memory.seek(SeekFrom::Start(start)).and_then(|_| memory.read_exact(&mut bytes));
        read.is_ok() && bytes.windows(mark.len()).any(|piece| piece == mark.as_bytes())
    })
}

/// Executable memory that is of no file, beside what the host's kernel shares with all.
fn own_code(pid: u32) -> Vec<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let is_code = |line: &&str| line.split(' ').nth(1).is_some_and(|mode| mode.contains('x'));
    let is_own = |line: &&str| !line.contains(" /") && !line.contains("[v");
    maps.lines().filter(is_code).filter(is_own).map(str::to_owned).collect()
}

#[test]
fn what_listens_has_no_tenants_code() {
    let world = World::new(&["alice", "bob"], &[]);
    let answer = world.call("alice", "data", "[]");
    has(&answer, 200, "\"results\":[1095648596]");
    world.is_well("bob");
    let front = *world.processes("front").first().unwrap();
    assert!(!has_mark(front));
    for pid in [front, world.server.id()] {
        assert_eq!(own_code(pid), Vec::<String>::new(), "{}", name_of(pid));
    }
    // And a worker has both.
    for worker in world.processes("worker") {
        assert!(has_mark(worker) && !own_code(worker).is_empty());
    }
}

#[test]
fn the_end_of_a_worker_costs_its_tenant_and_no_other() {
    let world = World::new(&["alice", "bob"], &[]);
    let alices = world.worker_of("alice", &BTreeSet::new());
    let bobs = world.worker_of("bob", &BTreeSet::from([alices]));
    std::thread::scope(|scope| {
        let spinning = scope.spawn(|| world.call("alice", "spin", "[]"));
        let bob = scope.spawn(|| world.call("bob", "spin", "[]"));
        for worker in [alices, bobs] {
            eventually("it runs", || is_busy(worker));
        }
        kill(alices);
        has(&spinning.join().unwrap(), 502, "was killed by signal 9");
        world.is_well("bob");
        assert_eq!(world.processes("worker"), BTreeSet::from([bobs]));
        let next = world.worker_of("alice", &BTreeSet::from([bobs]));
        assert_ne!(next, alices);
        // His call has gone on all the time.
        kill(bobs);
        has(&bob.join().unwrap(), 502, "was killed by signal 9");
        world.is_well("alice");
        assert!(world.processes("worker").contains(&next));
    });
    let stats = |tenant: &str| {
        let key = &world.keys[tenant];
        let mut stream = world.connect();
        let request = format!("GET /v1/stats HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    // Figures outlive workers.
    has(&stats("alice"), 200, "\"invocations\":3");
}

#[test]
fn memory_that_a_worker_does_not_get_costs_its_tenant_and_no_other() {
    let world = World::new(&["alice", "bob"], &[]);
    let alices = world.worker_of("alice", &BTreeSet::new());
    world.is_well("bob");
    // As if all that it may have were used up: what this body becomes has no place.
    let limited = Command::new("prlimit").args(["--data=1", "--pid", &alices.to_string()]).status();
    assert!(limited.unwrap().success());
    let numbers = format!("[{}1]", "1,".repeat(30_000));
    has(&world.call("alice", "add", &numbers), 502, "the worker was killed by signal");
    assert!(is_gone(alices));
    world.is_well("bob");
    world.is_well("alice");
    has(&world.call("alice", "add", &numbers), 400, "30001");
}

#[test]
fn tenants_have_workers_of_their_own_unless_they_share_one() {
    let tenants = ["alice", "bob"];
    for (flag, count) in [("tenant", 2), ("shared", 1)] {
        let world = World::new(&tenants, &["--workers", flag]);
        assert_eq!(world.processes("worker").len(), 0);
        for _ in 0..3 {
            tenants.iter().for_each(|tenant| world.is_well(tenant));
        }
        assert_eq!(world.processes("worker").len(), count, "{flag}");
        // A connection carries requests of both, each with its own key.
        let mut stream = world.connect();
        let both = world.request("alice", "add", "[1, 2]") + &world.request("bob", "add", "[3, 4]");
        let wrong = world.request("bob", "add", "[5, 6]").replace("m-bob", "m-alice");
        stream.write_all((both.repeat(2) + &wrong).as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answers = String::new();
        stream.read_to_string(&mut answers).unwrap();
        let found: Vec<_> = answers.split("HTTP/1.1 ").skip(1).collect();
        assert_eq!(found.len(), 5, "{answers}");
        for (answer, words) in found.iter().zip(["[3]", "[7]", "[3]", "[7]", "the key is not"]) {
            assert!(answer.contains(words), "{answer}: {words}");
        }
    }
}

#[test]
fn nothing_is_left_of_a_service_that_is_killed() {
    for victim in ["exocell", "front"] {
        let mut world = World::new(&["alice", "bob"], &[]);
        std::thread::scope(|scope| {
            let spinning = scope.spawn(|| {
                let mut stream = world.connect();
                let _ = stream.write_all(world.request("alice", "spin", "[]").as_bytes());
                let _ = stream.read_to_end(&mut Vec::new());
            });
            world.is_well("bob");
            eventually("both run", || world.processes("worker").len() == 2);
            let all = descendants(world.server.id());
            let victim = match victim {
                "front" => *world.processes("front").first().unwrap(),
                _ => world.server.id(),
            };
            kill(victim);
            spinning.join().unwrap();
            eventually("all are gone", || all.iter().all(|pid| is_gone(*pid)));
        });
        let _ = world.server.wait();
    }
}

/// A command that writes what is in the file `secret` of its folder.
const CAT: &str = r#"(module
  (import "wasi_snapshot_preview1" "path_open"
    (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 64) "secret")
  (func (export "_start")
    (if (call $open (i32.const 3) (i32.const 0) (i32.const 64) (i32.const 6) (i32.const 0)
          (i64.const 2) (i64.const 2) (i32.const 0) (i32.const 32)) (then unreachable))
    (i32.store (i32.const 0) (i32.const 1024))
    (i32.store (i32.const 4) (i32.const 100))
    (drop (call $read (i32.load (i32.const 32)) (i32.const 0) (i32.const 1) (i32.const 8)))
    (i32.store (i32.const 4) (i32.load (i32.const 8)))
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))))"#;

#[test]
fn a_link_in_the_place_of_a_folder_leads_no_worker_anywhere() {
    let place = tempfile::tempdir().unwrap();
    let base = place.path().canonicalize().unwrap();
    let (outer, inner) = (base.join("outer"), base.join("outer/inner"));
    fs::create_dir_all(&inner).unwrap();
    fs::write(base.join("secret"), "of the host").unwrap();
    fs::write(inner.join("secret"), "of the tenant").unwrap();
    let caps = base.join("caps.toml");
    let table = format!(
        "version = 1\n[memory]\nlimit = \"64M\"\n[time]\ndeadline = \"60s\"\n[stdio]\n\
         [[folder]]\nhost = {inner:?}\nguest = \"/inner\"\nrights = [\"read\"]"
    );
    fs::write(&caps, table).unwrap();
    let module = base.join("cat.wat");
    fs::write(&module, CAT).unwrap();
    let world = World::new(&["a"], &["--worker-idle", "1"]);
    let key = add(world.root.path(), "b", "cat", &module, &caps);
    let ask = || {
        let mut stream = world.connect();
        let request = format!(
            "POST /v1/run/cat HTTP/1.1\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\
             Content-Length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let rest = || eventually("its worker ends", || world.processes("worker").is_empty());
    eventually("it is served", || ask().contains("of the tenant"));
    // What a module of another tenant may do that has the folder around it.
    fs::rename(&inner, outer.join("moved")).unwrap();
    std::os::unix::fs::symlink(&base, &inner).unwrap();
    rest();
    let answer = ask();
    assert!(!answer.contains("of the host") && answer.contains("error"), "{answer}");
    rest();
    fs::remove_file(&inner).unwrap();
    fs::rename(outer.join("moved"), &inner).unwrap();
    eventually("it is there again", || ask().contains("of the tenant"));
}

#[test]
fn workers_are_bounded_and_idle_ones_end() {
    let world = World::new(&["alice", "bob"], &["--workers-max", "1", "--worker-idle", "6"]);
    let mut before = 0;
    for tenant in ["alice", "bob", "alice"] {
        world.is_well(tenant);
        eventually("one is left", || world.processes("worker").len() == 1);
        let worker = world.worker();
        assert_ne!(worker, before);
        before = worker;
    }
    std::thread::scope(|scope| {
        let spinning = scope.spawn(|| world.call("alice", "spin", "[]"));
        eventually("it runs", || world.processes("worker").iter().any(|pid| is_busy(*pid)));
        has(&world.call("bob", "add", "[1, 2]"), 503, "as many workers as may be (1) are busy");
        kill(world.worker());
        has(&spinning.join().unwrap(), 502, "signal 9");
    });
    world.is_well("bob");
    eventually("the idle one ends", || world.processes("worker").is_empty());
    world.is_well("bob");
}

#[test]
fn modules_come_and_go_in_a_worker_that_runs() {
    let world = World::new(&["alice"], &[]);
    let worker = world.worker_of("alice", &BTreeSet::new());
    let root = world.root.path();
    let (file, caps) = (root.join("m.wat"), root.join("caps.toml"));
    let post = |name: &str, function: &str| {
        let key = &world.keys["alice"];
        let mut stream = world.connect();
        let request = format!(
            "POST /v1/call/{name}/{function} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\
             Connection: close\r\nContent-Length: 2\r\n\r\n[]"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    add(root, "alice", "more", &file, &caps);
    eventually("it is served", || post("more", "data").starts_with("HTTP/1.1 200 "));
    assert_eq!(world.worker(), worker);
    // One with a folder needs another jail; what has begun in the one before goes on there.
    let folder = root.join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(
        &caps,
        format!(
            "version = 1\n[memory]\nlimit = \"1M\"\n[[folder]]\nhost = \"{}\"\nguest = \"/f\"\n\
             rights = [\"read\", \"write\"]",
            folder.display()
        ),
    )
    .unwrap();
    let makes = root.join("makes.wat");
    fs::write(&makes, MAKES).unwrap();
    std::thread::scope(|scope| {
        let spinning = scope.spawn(|| post("more", "spin"));
        eventually("it runs", || is_busy(worker));
        add(root, "alice", "makes", &makes, &caps);
        eventually("it is served", || post("makes", "make").contains("\"results\":[0]"));
        assert!(folder.join("f").exists());
        assert!(!is_gone(worker));
        let removed = exocell(root).args(["module", "rm", "more"]).status().unwrap();
        assert!(removed.success());
        eventually("it is not served", || post("more", "data").starts_with("HTTP/1.1 401 "));
        assert!(!is_gone(worker));
        kill(worker);
        has(&spinning.join().unwrap(), 502, "signal 9");
    });
    assert!(post("makes", "make").contains("\"results\":[20]"));
}

/// Makes the file `f`, which must not be there, and answers with the errno.
const MAKES: &str = r#"(module
  (import "wasi_snapshot_preview1" "path_open" (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (memory (export "memory") 1) (data (i32.const 0) "f")
  (func (export "make") (result i32)
    (call $open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 5)
      (i64.const 64) (i64.const 0) (i32.const 0) (i32.const 16))))"#;
