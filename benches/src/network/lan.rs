//! A network of the benchmark's own, so that all subjects call the same address:
//! a host, where everything runs, and a cable whose other end gVisor takes.
//!
//! ```text
//! native, cells (by their dialer) ── host 203.0.113.1 === 203.0.113.2 gVisor's netstack
//! ```
//! Nothing of the machine's network is seen or touched, and nothing is left of
//! this one when its processes are gone.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, unshare};
use serde_json::json;
use tempfile::TempDir;

use crate::BenchError;

/// The host's address: of those for documentation (RFC 5737); a cell's link has those for
/// measurements (RFC 2544).
pub const HOST: &str = "203.0.113.1";
const OTHER: &str = "203.0.113.2";
/// The most that gVisor's link takes in one packet, as much as a cell's.
const MTU: &str = "65520";

/// The calling thread, and what it starts, is on the host from now on.
#[derive(Debug)]
pub struct Lan {
    /// Holds the other end, and ends with its standard input: with us.
    keeper: Child,
    bundle: TempDir,
}

impl Lan {
    /// Makes the network.
    ///
    /// # Errors
    /// Without root, or without ip(8).
    pub fn new() -> Result<Self, BenchError> {
        let own = || {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| {
                BenchError::host("a network namespace (the benchmark needs root)")(errno.into())
            })
        };
        // What a thread starts stays where the thread was then.
        own()?;
        let keeper = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let keeper = keeper.map_err(BenchError::host("cat"))?;
        own()?;
        let bundle = tempfile::tempdir().map_err(BenchError::host("a temporary folder"))?;
        let lan = Self { keeper, bundle };
        lan.join()?;
        Ok(lan)
    }

    fn join(&self) -> Result<(), BenchError> {
        let keeper = self.keeper.id().to_string();
        let there = |line: &str| {
            ip(Command::new("nsenter").args(["--target", &keeper, "--net", "ip"]), line)
        };
        let here = |line: &str| ip(&mut Command::new("ip"), line);
        here("link set lo up")?;
        here(&format!(
            "link add cable mtu {MTU} type veth peer name cable mtu {MTU} netns {keeper}"
        ))?;
        here(&format!("addr add {HOST}/30 dev cable"))?;
        here("link set cable up")?;
        there("link set lo up")?;
        there(&format!("addr add {OTHER}/30 dev cable"))?;
        there("link set cable up")
    }

    /// Prepares what [`Self::gvisor`] runs: a program of this machine.
    ///
    /// # Errors
    /// The host's, where the bundle cannot be written.
    pub fn prepare(&self, line: &[&str]) -> Result<(), BenchError> {
        let file = self.bundle.path().join("config.json");
        let text = self.config(line).to_string();
        std::fs::write(&file, text).map_err(BenchError::host(file.display()))
    }

    /// gVisor's command, with its netstack at the other end of the cable.
    ///
    /// Releases up to 2024 take every namespace that shows
    /// /proc/sys/net/core/rmem_default for the machine's own, and want no network
    /// there; Linux shows it in all since 6.9. So they do not get to see it.
    pub fn gvisor(&self) -> Command {
        let bundle = self.bundle.path();
        let script = "mount -t tmpfs none /proc/sys/net/core && exec \"$@\"";
        let sandbox = "runsc --ignore-cgroups --platform=systrap --network=sandbox";
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.keeper.id().to_string(), "--net"]);
        command.args(["unshare", "--mount", "sh", "-c", script, "sh"]);
        command.args(sandbox.split(' ')).arg("--root").arg(bundle.join("state"));
        command.arg("run").arg("--bundle").arg(bundle).arg(container());
        command
    }

    /// The bundle's file (OCI runtime specification, config.md).
    fn config(&self, line: &[&str]) -> serde_json::Value {
        let mount =
            |kind: &str, at: &str| json!({ "destination": at, "type": kind, "source": kind });
        let namespace = |kind: &str| json!({ "type": kind });
        let network = Path::new("/proc").join(self.keeper.id().to_string()).join("ns/net");
        json!({
            "ociVersion": "1.0.2",
            "process": { "user": { "uid": 0, "gid": 0 }, "args": line, "cwd": "/",
                         "env": ["PATH=/usr/bin:/bin"] },
            "root": { "path": "/", "readonly": true },
            "mounts": [mount("proc", "/proc"), mount("tmpfs", "/tmp")],
            "linux": { "namespaces": [
                namespace("pid"), namespace("ipc"), namespace("uts"), namespace("mount"),
                { "type": "network", "path": network },
            ] },
        })
    }
}

/// A name that no other sandbox of this benchmark has.
fn container() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("bench-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

fn ip(command: &mut Command, line: &str) -> Result<(), BenchError> {
    let failed = |status: String, stderr: &[u8]| BenchError::Command {
        command: format!("ip {line}"),
        status,
        stderr: String::from_utf8_lossy(stderr).trim().to_owned(),
    };
    let output = command.args(line.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(BenchError::host("ip (scripts/setup installs it)"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failed(output.status.to_string(), &output.stderr)),
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        // Fails only if it is gone already.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}
