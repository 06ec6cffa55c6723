//! A service that runs, and its clients.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::BenchError;

/// Adds two numbers.
const ADDS: &str = r#"(module (memory (export "memory") 1 1000)
  (func (export "add") (param i32 i32) (result i32) (i32.add (local.get 0) (local.get 1))))"#;
/// Uses a page of its memory and waits for a minute.
const WAITS: &str = r#"(module
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1 1000)
  (func (export "wait") (result i32)
    (i32.store (i32.const 4096) (i32.const 1))
    (i32.store (i32.const 16) (i32.const 1))
    (i64.store (i32.const 24) (i64.const 60000000000))
    (call $poll (i32.const 0) (i32.const 128) (i32.const 1) (i32.const 256))))"#;
const CAPS: &str = "version = 1\n[memory]\nlimit = \"64M\"\n[time]\ndeadline = \"120s\"";
const WAITS_CAPS: &str =
    "version = 1\n[memory]\nlimit = \"64M\"\n[time]\ndeadline = \"120s\"\n[clock]";
/// Calls that wait have all begun by then.
const SETTLE: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(60);

/// Ends with its owner.
pub struct Served {
    name: String,
    socket: PathBuf,
    keys: Vec<String>,
    server: Child,
}

/// What clients did in a turn.
pub struct Turn {
    pub calls: u64,
    pub took: Duration,
}

impl Served {
    /// Serves modules of so many tenants by `program`, on a state root below `folder`.
    pub fn start(
        name: &str,
        program: &Path,
        folder: &Path,
        tenants: u32,
        flags: &[&str],
    ) -> Result<Self, BenchError> {
        let root = folder.join(name);
        fs::create_dir_all(&root).map_err(BenchError::host(root.display()))?;
        let write = |file: &str, text: &str| {
            let path = root.join(file);
            fs::write(&path, text).map_err(BenchError::host(path.display())).map(|()| path)
        };
        let modules = [
            ("add", write("adds.wat", ADDS)?, write("adds.toml", CAPS)?),
            ("wait", write("waits.wat", WAITS)?, write("waits.toml", WAITS_CAPS)?),
        ];
        let command = || {
            let mut command = Command::new(program);
            command.env("EXOCELL_ROOT", &root).stdin(Stdio::null());
            command
        };
        let mut keys = Vec::new();
        for tenant in 0..tenants {
            let tenant = tenant.to_string();
            for (prefix, file, caps) in &modules {
                let mut add = command();
                add.args(["module", "add", "--tenant"]).arg(format!("t{tenant}"));
                add.arg("--caps").arg(caps).arg(format!("{prefix}-{tenant}")).arg(file);
                let added = add.output().map_err(BenchError::host(program.display()))?;
                if !added.status.success() {
                    return Err(failed(name, String::from_utf8_lossy(&added.stderr).trim()));
                }
                // A tenant's key is told with its first module.
                if *prefix == "add" {
                    keys.push(String::from_utf8_lossy(&added.stdout).trim().to_owned());
                }
            }
        }
        let socket = root.join("http.sock");
        let mut serve = command();
        serve.args(["serve", "--http"]).arg(&socket).args(flags).stdout(Stdio::piped());
        let mut server = serve.spawn().map_err(BenchError::host(program.display()))?;
        let said = server.stdout.take();
        let served = Self { name: name.to_owned(), socket, keys, server };
        let mut line = String::new();
        let read = said.map(|said| BufReader::new(said).read_line(&mut line));
        match read {
            Some(Ok(1..)) => Ok(served),
            _ => Err(failed(name, "it does not serve")),
        }
    }

    fn connect(&self) -> Result<UnixStream, BenchError> {
        let stream = UnixStream::connect(&self.socket);
        let stream = stream.map_err(BenchError::host(self.socket.display()))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(BenchError::host("a client"))?;
        Ok(stream)
    }

    /// To the module that is named after what it does.
    fn request(&self, tenant: usize, function: &str, body: &str) -> Result<Vec<u8>, BenchError> {
        let key = self.keys.get(tenant).ok_or_else(|| failed(&self.name, "no such tenant"))?;
        let length = body.len();
        let request = format!(
            "POST /v1/call/{function}-{tenant}/{function} HTTP/1.1\r\n\
             Authorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        Ok(request.into_bytes())
    }

    /// One call of each tenant, so that each has what it needs.
    pub fn call_each(&self) -> Result<(), BenchError> {
        for tenant in 0..self.keys.len() {
            let mut client = Client::new(self, tenant)?;
            client.call()?;
        }
        Ok(())
    }

    /// Calls for so long by so many clients, each of which sends its next request when it has its
    /// answer.
    pub fn calls(&self, clients: u32, time: Duration) -> Result<Turn, BenchError> {
        let begun = Instant::now();
        let end = begun + time;
        let counts: Result<Vec<u64>, BenchError> = std::thread::scope(|scope| {
            let started: Vec<_> = (0..clients as usize)
                .map(|index| {
                    scope.spawn(move || {
                        let mut client = Client::new(self, index % self.keys.len().max(1))?;
                        let mut count = 0_u64;
                        while Instant::now() < end {
                            client.call()?;
                            count += 1;
                        }
                        Ok(count)
                    })
                })
                .collect();
            let died = |_| failed(&self.name, "a client died");
            started.into_iter().map(|client| client.join().map_err(died)?).collect()
        });
        Ok(Turn { calls: counts?.iter().sum(), took: begun.elapsed() })
    }

    /// What `look` sees while each tenant has so many calls that wait.
    pub fn with_waiting<T>(
        &self,
        each: u32,
        look: impl FnOnce(&Self) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let mut streams = Vec::new();
        for tenant in (0..self.keys.len()).flat_map(|tenant| (0..each).map(move |_| tenant)) {
            let mut stream = self.connect()?;
            let request = self.request(tenant, "wait", "[]")?;
            stream.write_all(&request).map_err(BenchError::host("a client"))?;
            streams.push(stream);
        }
        std::thread::sleep(SETTLE);
        let seen = look(self)?;
        for stream in streams {
            // Their answers come when they come.
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok(seen)
    }

    /// The service's processes.
    fn processes(&self) -> BTreeSet<u32> {
        let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let parents: Vec<(u32, u32)> =
            numbers.filter_map(|pid| Some((pid, parent_of(pid)?))).collect();
        let mut found = BTreeSet::from([self.server.id()]);
        loop {
            let count = found.len();
            let children: Vec<u32> = parents
                .iter()
                .filter(|(_, parent)| found.contains(parent))
                .map(|(pid, _)| *pid)
                .collect();
            found.extend(children);
            if found.len() == count {
                return found;
            }
        }
    }

    /// CPU time of all of its threads so far.
    pub fn cpu_ns(&self) -> Result<u64, BenchError> {
        let mut sum = 0_u64;
        for pid in self.processes() {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            for task in tasks {
                // One that has ended meanwhile had little.
                let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
                let first = text.split(' ').next().and_then(|word| word.parse::<u64>().ok());
                sum = sum.saturating_add(first.unwrap_or_default());
            }
        }
        Ok(sum)
    }

    /// Its processes' proportional shares of memory.
    pub fn pss_bytes(&self) -> Result<f64, BenchError> {
        let mut sum_kib = 0.0;
        for pid in self.processes() {
            let path = format!("/proc/{pid}/smaps_rollup");
            let text = fs::read_to_string(&path).map_err(BenchError::host(path))?;
            let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
            let kib = line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse().ok());
            sum_kib += kib.unwrap_or(0.0);
        }
        Ok(sum_kib * 1024.0)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A connection of one tenant's.
struct Client<'a> {
    served: &'a Served,
    stream: UnixStream,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl<'a> Client<'a> {
    fn new(served: &'a Served, tenant: usize) -> Result<Self, BenchError> {
        let request = served.request(tenant, "add", "[40, 2]")?;
        Ok(Self { served, stream: served.connect()?, request, answer: vec![0; 4096] })
    }

    fn call(&mut self) -> Result<(), BenchError> {
        let failure = || BenchError::host(format!("a client of {}", self.served.name));
        self.stream.write_all(&self.request).map_err(failure())?;
        let length = self.stream.read(&mut self.answer).map_err(failure())?;
        let answer = self.answer.get(..length).unwrap_or_default();
        if answer.starts_with(b"HTTP/1.1 200 ") {
            return Ok(());
        }
        Err(failed(&self.served.name, String::from_utf8_lossy(answer)))
    }
}

fn parent_of(pid: u32) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may have anything in it: the state, then the parent.
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn failed(subject: &str, why: impl ToString) -> BenchError {
    BenchError::Subject { subject: subject.to_owned(), why: why.to_string() }
}
