//! A server of the Docker Engine API on a state root of its own, and the real
//! docker command against it.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use super::host::{Namespace, namespace, processes, state_root};
use super::{Finished, IMAGE, eventually, finish, given, program, small, text, unique, until};

/// A server, its state root and its socket; all of it ends with the test.
pub struct Server {
    root: tempfile::TempDir,
    child: Option<Child>,
    flags: Vec<String>,
    images: Mutex<Vec<String>>,
}

impl Server {
    /// A server that has this machine's images and guest kernel.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// The same with more flags.
    pub fn with(flags: &[&str]) -> Self {
        let root = tempfile::tempdir().expect("a state root");
        let images = state_root().join("images");
        std::os::unix::fs::symlink(images, root.path().join("images")).expect("a link");
        let flags = flags.iter().map(ToString::to_string).collect();
        let mut server = Self { root, child: None, flags, images: Mutex::default() };
        server.resume();
        server
    }

    /// Starts the server, after a kill too.
    pub fn resume(&mut self) {
        let command = self.exocell(&[]);
        self.serve(command);
    }

    /// The same by `command`, which names the state root in its own way.
    pub fn serve(&mut self, mut command: Command) {
        let mut child = command
            .args(["serve", "--memory", "256m", "--disk", "256m", "--docker"])
            .arg(self.socket())
            .args(&self.flags)
            .stdout(Stdio::piped())
            .spawn()
            .expect("exocell serve");
        let mut said = [0; 8];
        let mut stdout = child.stdout.take().expect("a pipe");
        stdout.read_exact(&mut said).expect("the server says that it serves");
        self.child = Some(child);
    }

    /// Kills the server as nobody may catch it.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
    }

    /// Its state root.
    pub fn root(&self) -> &std::path::Path {
        self.root.path()
    }

    /// The server's process.
    pub fn pid(&self) -> i32 {
        self.child.as_ref().map_or(0, |child| child.id() as i32)
    }

    pub fn socket(&self) -> PathBuf {
        self.root.path().join("docker.sock")
    }

    pub fn url(&self) -> String {
        format!("unix://{}", text(&self.socket()))
    }

    /// A connection of a client that knows better than any client.
    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(self.socket()).expect("the server listens")
    }

    /// `exocell ARGS` on the server's state root.
    pub fn exocell(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.arg("--root").arg(self.root.path()).args(args);
        command.env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
        command
    }

    /// `docker ARGS`, not yet started.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("docker");
        command.args(args).env("DOCKER_HOST", self.url()).env("DOCKER_CONFIG", self.root.path());
        command.env("DOCKER_BUILDKIT", "0");
        command
    }

    /// Runs `docker ARGS` to its end.
    #[track_caller]
    pub fn docker(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args), b"")
    }

    /// Runs `docker run --rm --network none FLAGS IMAGE COMMAND`.
    #[track_caller]
    pub fn run(&self, flags: &[&str], command: &[&str]) -> Finished {
        self.docker(&[&["run", "--rm", "--network", "none"], flags, &[IMAGE], command].concat())
    }

    /// A container that waits to be used; its id.
    #[track_caller]
    pub fn idle(&self, name: &str) -> String {
        let flags = ["run", "-d", "--network", "none", "--name", name, IMAGE, "sleep", "infinity"];
        self.docker(&flags).ok().text().to_owned()
    }

    /// A name for an image, which ends with the server: all servers share their images.
    pub fn image(&self, word: &str) -> String {
        let name = format!("{}:1", unique(word));
        self.images.lock().expect("no test panics here").push(name.clone());
        name
    }

    /// A small image of its own; its name.
    #[track_caller]
    pub fn small(&self) -> String {
        let (image, tree) = (self.image("small"), small::tree());
        let from = format!("{}/", text(tree.path()));
        finish(&mut self.exocell(&["image", "import", &from, "--tag", &image]), b"").ok();
        image
    }

    /// What `docker inspect --format FORMAT KEY` prints.
    #[track_caller]
    pub fn inspect(&self, key: &str, format: &str) -> String {
        self.docker(&["inspect", "--format", format, key]).ok().text().to_owned()
    }

    /// The namespace of a running container's cell.
    #[track_caller]
    pub fn cell(&self, key: &str) -> Namespace {
        let pid = self.inspect(key, "{{.State.Pid}}").parse().expect("a pid");
        namespace(pid).expect("a cell's namespace")
    }

    /// The server's own files of containers.
    pub fn files(&self) -> Vec<String> {
        self.list("docker/containers")
    }

    /// The disks of containers.
    pub fn disks(&self) -> Vec<String> {
        self.list("docker/disks")
    }

    /// The records of cells.
    pub fn records(&self) -> Vec<String> {
        let all = self.list("cells");
        all.into_iter().filter(|name| !name.starts_with('.')).collect()
    }

    fn list(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.path().join(folder)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        for id in self.records() {
            finish(&mut self.exocell(&["rm", "-f", &id]), b"");
        }
        for image in std::mem::take(self.images.get_mut().expect("no test panics here")) {
            finish(&mut self.exocell(&["image", "rm", &image]), b"");
        }
    }
}

/// Asserts that nothing of a cell is left.
#[track_caller]
pub fn gone(cell: &Namespace) {
    eventually("the cell's processes end", || processes(cell).is_empty());
}

/// Whether `docker` is asked something until it says what is wanted.
#[track_caller]
pub fn says(server: &Server, args: &[&str], wanted: &str) {
    let said = until(super::LIMIT, || server.docker(args).text() == wanted);
    assert!(said, "docker {args:?} never said {wanted:?} but {:?}", server.docker(args).text());
}
