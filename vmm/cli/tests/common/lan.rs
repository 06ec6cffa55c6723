//! A network of a test's own: the host that cells are started on, and beside
//! it a peer with servers, joined by a cable. Nothing of the machine's network
//! is seen or touched.
//!
//! ```text
//! cell ~ (its link) ~ host 192.31.196.1, 2620:4f:8000::1 === peer 192.31.196.80, .81, 2620:4f:8000::80
//! ```
//! The host knows the peer by names of its own /etc/hosts. Needs root, as the
//! set-up of the machine does.

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

/// The host's own address on the cable.
pub const HOST: &str = "192.31.196.1";
/// The peer's, which the host calls `peer.test` and `www.peer.test`.
pub const PEER: &str = "192.31.196.80";
pub const PEER_V6: &str = "2620:4f:8000::80";
/// Another one of the peer's, which the host calls `other.test`.
pub const OTHER: &str = "192.31.196.81";

/// The calling thread, and what it starts, is on the host for as long as its
/// test runs.
pub struct Lan {
    host: OwnedFd,
    peer: OwnedFd,
    /// Holds the peer's network, which a process must be in to be named.
    keeper: Child,
    _files: tempfile::TempDir,
}

fn network() -> OwnedFd {
    std::fs::File::open("/proc/thread-self/ns/net").expect("a network namespace").into()
}

fn ip(line: &str) {
    let status = Command::new("ip").args(line.split(' ')).status();
    assert!(status.expect("ip is installed by scripts/setup").success(), "ip {line}");
}

impl Lan {
    /// Puts the calling thread on a host of its own.
    pub fn new() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "these tests make networks: run them as root");
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("unshare");
        let peer = network();
        let keeper = Command::new("sleep").arg("infinity").stdin(Stdio::null()).spawn().unwrap();
        ip("link set lo up");
        unshare(CloneFlags::CLONE_NEWNET).expect("unshare");
        let host = network();
        let lan = Self { host, peer, keeper, _files: files() };
        ip("link set lo up");
        ip(&format!("link add cable type veth peer name cable netns {}", lan.keeper.id()));
        ip(&format!("addr add {HOST}/24 dev cable"));
        ip("addr add 2620:4f:8000::1/64 dev cable nodad");
        ip("link set cable up");
        // What a cell must not reach, the host does.
        ip("route add 169.254.0.0/16 dev cable");
        ip("-6 route add fd00:ec2::254/128 dev cable");
        lan.at_peer(|| {
            for address in [PEER, OTHER, "169.254.169.254", "169.254.1.1"] {
                ip(&format!("addr add {address}/24 dev cable"));
            }
            for address in [PEER_V6, "fd00:ec2::254"] {
                ip(&format!("addr add {address}/64 dev cable nodad"));
            }
            ip("link set cable up");
        });
        lan
    }

    /// Does `work` at the peer; what it opens or starts stays there.
    pub fn at_peer<T>(&self, work: impl FnOnce() -> T) -> T {
        setns(&self.peer, CloneFlags::CLONE_NEWNET).expect("setns");
        let result = work();
        setns(&self.host, CloneFlags::CLONE_NEWNET).expect("setns");
        result
    }
}

/// The host's /etc/hosts and /etc/resolv.conf.
fn files() -> tempfile::TempDir {
    let files = tempfile::tempdir().unwrap();
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
    let hosts = format!(
        "127.0.0.1 localhost rebound.test\n{PEER} peer.test www.peer.test\n{PEER_V6} peer.test\n\
         {OTHER} other.test\n169.254.169.254 metadata.test\n{HOST} host.test\n\
         64:ff9b:1::7f00:1 translated.test\n203.0.113.7 example.test\n"
    );
    for (name, text) in [("hosts", hosts), ("resolv.conf", "nameserver 192.31.196.80\n".into())] {
        let path = files.path().join(name);
        std::fs::write(&path, text).unwrap();
        let target = format!("/etc/{name}");
        mount(Some(&path), target.as_str(), none, MsFlags::MS_BIND, none).expect("a bind mount");
    }
    files
}

impl Drop for Lan {
    fn drop(&mut self) {
        // Fails only if it is gone already.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}
