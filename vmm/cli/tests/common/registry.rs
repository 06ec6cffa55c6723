//! Debian's registry server on loopback, with a login.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use super::{eventually, text};

/// The user `user` and the password `secret`, as htpasswd(1) writes them down (bcrypt).
const USER: &str = "user:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";

/// A registry that lets one user in.
pub struct Registry {
    child: Child,
    /// Its host and port.
    pub place: String,
    _dir: tempfile::TempDir,
}

impl Registry {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let place = port.expect("a port").to_string();
        let (files, users) = (dir.path().join("files"), dir.path().join("users"));
        let config = dir.path().join("config.yml");
        fs::write(&users, USER).expect("the users");
        let lines = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             http:\n  addr: {place}\nauth:\n  htpasswd:\n    realm: r\n    path: {}\n",
            text(&files),
            text(&users)
        );
        fs::write(&config, lines).expect("a configuration");
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry is missing: scripts/setup installs it");
        eventually("the registry listens", || TcpStream::connect(&place).is_ok());
        Self { child, place, _dir: dir }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
