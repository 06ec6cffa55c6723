//! A server of E2B's protocol on a state root of its own, and clients of it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::host::state_root;
use super::{finish, given, program, run, small, text, unique};

/// A server and its state root; its sandboxes end with the test.
pub struct Server {
    root: tempfile::TempDir,
    child: Option<Child>,
    flags: Vec<String>,
    /// As many as it may have open, if it is fewer than usual.
    descriptors: Option<u32>,
    pub address: String,
}

/// An image of a few megabytes in the store, as the template `small`; it goes with the test.
pub struct Small(String);

impl Small {
    pub fn new() -> Self {
        let (name, tree) = (format!("{}:1", unique("e2b")), small::tree());
        let from = format!("{}/", text(tree.path()));
        run(["image", "import", &from, "--tag", &name]).ok();
        Self(name)
    }

    pub fn template(&self) -> String {
        format!("small={}", self.0)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        run(["image", "rm", &self.0]);
    }
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }
}

impl Server {
    /// A server that has this machine's images and guest kernel.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// The same with more flags.
    pub fn with(flags: &[&str]) -> Self {
        Self::limited(flags, None)
    }

    /// The same with so many descriptors.
    pub fn limited(flags: &[&str], descriptors: Option<u32>) -> Self {
        let root = tempfile::tempdir().expect("a state root");
        let images = state_root().join("images");
        std::os::unix::fs::symlink(images, root.path().join("images")).expect("a link");
        let flags = flags.iter().map(ToString::to_string).collect();
        let address = "127.0.0.1:0".to_owned();
        let mut server = Self { root, child: None, flags, descriptors, address };
        server.resume();
        server
    }

    /// Starts the server, after a kill too, where it was.
    pub fn resume(&mut self) {
        let is_named = self.flags.iter().any(|flag| flag == "--memory");
        let memory: &[&str] = if is_named { &[] } else { &["--memory", "256m"] };
        let mut command = self.exocell(&["serve", "--disk", "256m", "--e2b", &self.address]);
        command.args(&self.flags).args(memory);
        if let Some(descriptors) = self.descriptors {
            command = within(descriptors, &command);
        }
        let mut child = command.stdout(Stdio::piped()).spawn().expect("exocell serve");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("the server says that it serves");
        self.child = Some(child);
        let address = line.trim().strip_prefix("exocell serves http://");
        self.address = address.unwrap_or_else(|| panic!("it said {line:?}")).to_owned();
    }

    /// Kills the server as nobody may catch it.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// How many descriptors it has open.
    pub fn open(&self) -> usize {
        self.count("fd")
    }

    pub fn threads(&self) -> usize {
        self.count("task")
    }

    fn count(&self, what: &str) -> usize {
        fs::read_dir(format!("/proc/{}/{what}", self.pid())).expect("the server runs").count()
    }

    /// The memory that it has, in KiB.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn key(&self) -> String {
        let key = fs::read_to_string(self.root.path().join("e2b/key")).expect("a key");
        key.trim().to_owned()
    }

    /// `exocell ARGS` on the server's state root.
    pub fn exocell(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.arg("--root").arg(self.root.path()).args(args);
        command.env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
        command
    }

    /// A client of E2B's, with what it needs to find the server.
    pub fn client(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("E2B_API_URL", self.url()).env("E2B_SANDBOX_URL", self.url());
        command.env("E2B_API_KEY", self.key());
        command
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(90))).expect("a time");
        stream
    }

    /// Says `words` on a connection, and reads all that is answered.
    pub fn say(&self, words: &[u8]) -> Answer {
        let mut stream = self.connect();
        // Who is refused early is not listened to.
        let _ = stream.write_all(words);
        read(&mut stream)
    }

    /// A call with the server's key and more headers.
    pub fn call(&self, line: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut head = format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
        let is_named = |name: &str| headers.iter().any(|(own, _)| own.eq_ignore_ascii_case(name));
        if !is_named("x-api-key") {
            head += &format!("X-API-KEY: {}\r\n", self.key());
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {}\r\n\r\n", body.len());
        self.say(&[head.as_bytes(), body].concat())
    }

    /// A new sandbox: its id, and its token.
    pub fn sandbox(&self) -> (String, String) {
        let made = self.call("POST /v2/sandboxes", &[], br#"{"templateID": "base"}"#);
        assert_eq!(made.status, 201, "{}", made.text());
        let text = |name: &str| made.json()[name].as_str().expect("a text").to_owned();
        (text("sandboxID"), text("envdAccessToken"))
    }

    /// A call of Connect with one answer.
    pub fn ask(&self, (id, token): &(String, String), verb: &str, body: &str) -> Answer {
        let headers = [
            ("E2b-Sandbox-Id", id.as_str()),
            ("X-Access-Token", token),
            ("Content-Type", "application/json"),
        ];
        self.call(&format!("POST /{verb}"), &headers, body.as_bytes())
    }

    /// The records of cells.
    pub fn records(&self) -> Vec<String> {
        self.list("cells").into_iter().filter(|name| !name.starts_with('.')).collect()
    }

    /// What is written down of sandboxes.
    pub fn notes(&self) -> Vec<String> {
        self.list("e2b/sandboxes")
    }

    fn list(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.path().join(folder)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// A file in its state root.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.root.path().join(name);
        fs::write(&path, text).expect("a file");
        path
    }
}

/// `command` with so many descriptors at most.
fn within(descriptors: u32, command: &Command) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n \"$0\" && exec \"$@\"", &descriptors.to_string()]);
    limited.arg(command.get_program()).args(command.get_args());
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    limited
}

/// Reads an answer whose connection is closed after it.
pub fn read(stream: &mut TcpStream) -> Answer {
    let mut whole = Vec::new();
    // A reset after the answer is as good.
    let _ = stream.read_to_end(&mut whole);
    let end = whole.windows(4).position(|end| end == b"\r\n\r\n").unwrap_or(whole.len());
    let head = String::from_utf8_lossy(&whole[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let mut body = whole.get(end + 4..).unwrap_or_default().to_vec();
    if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        body = unchunked(&body);
    }
    Answer { status, head, body }
}

fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(end) = body.windows(2).position(|end| end == b"\r\n") {
        let size = std::str::from_utf8(&body[..end]).ok();
        let size = size.and_then(|size| usize::from_str_radix(size, 16).ok()).unwrap_or(0);
        let Some(chunk) = body.get(end + 2..end + 2 + size).filter(|chunk| !chunk.is_empty())
        else {
            break;
        };
        whole.extend(chunk);
        body = body.get(end + 4 + size..).unwrap_or_default();
    }
    whole
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        for id in self.records() {
            finish(&mut self.exocell(&["rm", "-f", &id]), b"");
        }
    }
}
