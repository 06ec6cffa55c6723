//! A containerd of a test's own, and the real `ctr` against it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use sha2::Digest;

use super::{Finished, eventually, finish, program, small, text, unique};

/// The runtime whose shim the test's `exocell` is.
const RUNTIME: &str = "io.containerd.exocell.v1";
const SHIM: &str = "containerd-shim-exocell-v1";
/// What the images are called there: the second waits for ever, as the first of a pod does.
pub const NAME: &str = "docker.io/exocell/small:latest";
pub const PAUSE: &str = "docker.io/exocell/pause:latest";
/// Programs of the images beside those of [`small`].
const PROGRAMS: [&str; 11] =
    ["head", "id", "mkdir", "pwd", "readlink", "stty", "touch", "tty", "uname", "wc", "env"];

/// An instance with folders and a socket of its own; all of it ends with the test.
pub struct Containerd {
    folder: tempfile::TempDir,
    child: Option<Child>,
    snapshotter: &'static str,
}

impl Containerd {
    /// One that has a small image. `config` is of the shim's file.
    pub fn start(config: &str) -> Self {
        let mut containerd = Self::start_with(config, |_| {
            "disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n".to_owned()
        });
        // Not every file system has an overlay over it.
        let plugins = containerd.ctr(&["plugins", "ls"]).ok();
        let is_there = |line: &str| line.contains("overlayfs") && line.trim_end().ends_with("ok");
        if !plugins.text().lines().any(is_there) {
            containerd.snapshotter = "native";
        }
        let archive = containerd.path("image.tar");
        write_images(&archive);
        let import = ["images", "import", "--snapshotter", containerd.snapshotter];
        containerd.ctr(&[&import[..], &[text(&archive)]].concat()).ok();
        std::fs::remove_file(archive).expect("the archive goes");
        containerd
    }

    /// One without images, whose configuration says what `more` makes for its folder.
    pub fn start_with(config: &str, more: impl FnOnce(&Path) -> String) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        std::fs::create_dir(at.join("bin")).expect("a folder");
        std::os::unix::fs::symlink(program(), at.join("bin").join(SHIM)).expect("a link");
        std::fs::write(at.join("exocell.toml"), config).expect("a file");
        let own = format!(
            "version = 2\nroot = \"{0}/root\"\nstate = \"{0}/state\"\n{1}\
             [grpc]\naddress = \"{0}/sock\"\n\
             [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{0}/opt\"\n",
            at.display(),
            more(at)
        );
        std::fs::write(at.join("config.toml"), own).expect("a file");
        let mut containerd = Self { folder, child: None, snapshotter: "overlayfs" };
        containerd.resume();
        containerd
    }

    /// Starts containerd, after a kill too.
    pub fn resume(&mut self) {
        let search = std::env::var("PATH").unwrap_or_default();
        let log = std::fs::File::options().create(true).append(true).open(self.path("log"));
        let log = log.expect("a log");
        let child = Command::new("containerd")
            .arg("--config")
            .arg(self.path("config.toml"))
            .env("PATH", format!("{}:{search}:/usr/sbin", self.path("bin").display()))
            .env("EXOCELL_CONTAINERD_CONFIG", self.path("exocell.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .spawn()
            .expect("containerd (scripts/setup installs it)");
        self.child = Some(child);
        eventually("containerd answers", || self.ctr(&["version"]).code == 0);
    }

    /// Kills containerd as nobody may catch it; its shims stay.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The bundle of a container.
    pub fn bundle(&self, id: &str) -> PathBuf {
        self.path("state/io.containerd.runtime.v2.task/default").join(id)
    }

    /// `ctr ARGS`.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.path("sock")).args(args);
        command
    }

    /// Runs `ctr ARGS` to its end.
    #[track_caller]
    pub fn ctr(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args), b"")
    }

    /// `ctr run FLAGS IMAGE ID ARGS`.
    pub fn run_command(&self, flags: &[&str], id: &str, args: &[&str]) -> Command {
        let fixed = ["run", "--runtime", RUNTIME, "--snapshotter", self.snapshotter];
        self.command(&[&fixed[..], flags, &[NAME, id], args].concat())
    }

    /// Runs a script in a container that is removed with its end.
    #[track_caller]
    pub fn shell(&self, flags: &[&str], script: &str) -> Finished {
        let flags = [&["--rm"], flags].concat();
        finish(&mut self.run_command(&flags, &unique("shell"), &["sh", "-c", script]), b"")
    }

    /// A container that waits to be ended.
    #[track_caller]
    pub fn waits(&self, flags: &[&str]) -> String {
        let id = unique("waits");
        let flags = [&["--detach"], flags].concat();
        finish(&mut self.run_command(&flags, &id, &["sleep", "1000000"]), b"").ok();
        id
    }

    /// A program beside a container's own.
    #[track_caller]
    pub fn exec(&self, id: &str, script: &str) -> Finished {
        self.ctr(&["task", "exec", "--exec-id", &unique("exec"), id, "sh", "-c", script])
    }

    /// Ends a container and removes it.
    #[track_caller]
    pub fn remove(&self, id: &str) {
        self.ctr(&["task", "delete", "--force", id]).ok();
        self.ctr(&["container", "delete", id]).ok();
    }

    /// What `ctr task ls` says of a container: its pid and its state.
    #[track_caller]
    pub fn task(&self, id: &str) -> Option<(i32, String)> {
        let listed = self.ctr(&["task", "ls"]).ok();
        let mut lines = listed.text().lines().map(|line| line.split_whitespace().collect());
        let found: Vec<&str> = lines.find(|words: &Vec<&str>| words.first() == Some(&id))?;
        Some((found.get(1)?.parse().ok()?, found.get(2)?.to_string()))
    }

    /// The shim of a container.
    pub fn shim(&self, id: &str) -> Option<i32> {
        let wanted = format!("-id {id} -address {}", self.path("sock").display());
        let is_shim = |pid: &i32| {
            let line = super::host::command_line(*pid);
            line.starts_with(SHIM) && line.contains(&wanted) && line.contains("serve")
        };
        super::host::pids().into_iter().find(is_shim)
    }

    /// What the shims have said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if self.child.is_some() {
            let listed = self.ctr(&["task", "ls", "-q"]);
            for id in listed.text().lines() {
                self.ctr(&["task", "delete", "--force", id]);
            }
        }
        self.kill();
        if std::thread::panicking() {
            eprintln!("containerd said:\n{}", self.log());
        }
    }
}

/// Writes the images as docker saves them.
fn write_images(archive: &Path) {
    let tree = small::tree_with(&PROGRAMS);
    let commands: [(&str, &[&str]); 2] = [(NAME, &["sh"]), (PAUSE, &["sleep", "1000000"])];
    write_archive(archive, tree.path(), &commands);
}

/// Writes images of one tree as docker saves them: their names, and what they run.
pub fn write_archive(archive: &Path, tree: &Path, images: &[(&str, &[&str])]) {
    let mut layer = tar::Builder::new(Vec::new());
    layer.follow_symlinks(false);
    layer.append_dir_all(".", tree).expect("a layer");
    let layer = layer.into_inner().expect("a layer");
    let digest = |bytes: &[u8]| {
        let digest = sha2::Sha256::digest(bytes);
        digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let mut files = vec![("layer.tar".to_owned(), layer.clone())];
    let mut manifest = Vec::new();
    for (name, command) in images {
        let config = serde_json::json!({
            "architecture": "amd64", "os": "linux",
            "config": { "Env": ["PATH=/bin"], "Cmd": command },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", digest(&layer))] },
        });
        let config = config.to_string().into_bytes();
        let file = format!("{}.json", digest(&config));
        let tag = name.trim_start_matches("docker.io/");
        manifest.push(serde_json::json!({
            "Config": file, "RepoTags": [tag], "Layers": ["layer.tar"],
        }));
        files.push((file, config));
    }
    let manifest = serde_json::Value::from(manifest).to_string().into_bytes();
    files.push(("manifest.json".to_owned(), manifest));
    let mut to = tar::Builder::new(std::fs::File::create(archive).expect("an archive"));
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        to.append_data(&mut header, name, &content[..]).expect("an archive");
    }
    to.finish().expect("an archive");
}
