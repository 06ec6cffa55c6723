//! `start`: finds or makes the shim process of a container, and tells containerd its address.
//!
//! containerd says what it wants in one of two ways: by flags and its environment (up to 2.2), or by
//! a `BootstrapParams` message on standard input (from 2.3; the flags come as well). The answer is
//! of the same kind: an address (version 2 of the task service), JSON (version 3), or a
//! `BootstrapResult`.

use std::io::{IsTerminal, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use serde_json::json;

use crate::args::Args;
use crate::bundle;
use crate::error::{Result, ShimError};
use crate::group::{self, Group};
use crate::{NAME, RUNTIME};

/// The longest message that is read, in bytes, as containerd's own shims have it.
const INPUT_BYTES_MAX: u64 = 10 << 20;
/// containerd's socket for events, and the newest version of the task service that it knows.
pub const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";
const MAX_VERSION: &str = "MAX_SHIM_VERSION";
/// What the shim process says on its standard output when it serves; else it says why not.
pub const READY: &str = "ready";
/// The file of a bundle by which containerd up to 1.7 finds the shim again after its restart.
const ADDRESS_FILE: &str = "address";

/// How containerd is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The bare address: version 2.
    Address,
    /// JSON with the version.
    Json,
    /// A `BootstrapResult`.
    Message,
}

/// What containerd wants, in whichever way it said so.
#[derive(Debug, PartialEq)]
struct Wanted {
    /// containerd's socket for events.
    ttrpc_address: String,
    answer: Answer,
}

impl Wanted {
    fn read(
        input: &[u8],
        args: &Args,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        // The options of a runtime, which older versions send, read as such a message as well, but
        // not as one for this container.
        let params = BootstrapParams::parse_from_bytes(input)
            .ok()
            .filter(|said| said.instance_id == args.id && said.namespace == args.namespace);
        let wanted = match params {
            Some(said) => {
                Self { ttrpc_address: said.containerd_ttrpc_address, answer: Answer::Message }
            }
            None => {
                let newest = environment(MAX_VERSION).and_then(|text| text.parse::<u32>().ok());
                Self {
                    ttrpc_address: environment(TTRPC_ADDRESS).unwrap_or_default(),
                    answer: if newest >= Some(3) { Answer::Json } else { Answer::Address },
                }
            }
        };
        match wanted.ttrpc_address.is_empty() {
            false => Ok(wanted),
            true => Err(ShimError::invalid(format!(
                "containerd does not say where its events go ({TTRPC_ADDRESS})"
            ))),
        }
    }

    fn answer(&self, address: &str) -> Result<Vec<u8>> {
        match self.answer {
            Answer::Address => Ok(address.as_bytes().to_vec()),
            Answer::Json => {
                let said = json!({ "version": 3, "address": address, "protocol": "ttrpc" });
                Ok(said.to_string().into_bytes())
            }
            Answer::Message => {
                let result = BootstrapResult {
                    version: 3,
                    address: address.to_owned(),
                    protocol: "ttrpc".to_owned(),
                    ..BootstrapResult::default()
                };
                result.write_to_bytes().map_err(ShimError::host("cannot write the answer"))
            }
        }
    }
}

/// Starts the shim of a container, unless its pod has one; prints its address.
pub fn start(args: &Args) -> Result<()> {
    let wanted = Wanted::read(&read_input()?, args, |name| std::env::var(name).ok())?;
    let folder = args.bundle()?;
    let group = Group::of(args, &bundle::annotations(&folder)?)?;
    group::make_run_directory()?;
    let socket = group.socket();
    if UnixStream::connect(&socket).is_err() {
        if group.id != args.id {
            return Err(ShimError::state(format!(
                "the pod {} of this container has no shim any more; make the pod anew",
                group.id
            )));
        }
        spawn(args, &folder, &socket, &wanted.ttrpc_address)?;
    } else if group.id == args.id {
        return Err(ShimError::exists(format!("container {} has a shim already", args.id)));
    }
    let address = format!("unix://{}", socket.display());
    write_address(&folder, &address)?;
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(&wanted.answer(&address)?)
        .and_then(|()| stdout.flush())
        .map_err(ShimError::host("cannot answer containerd"))
}

/// What containerd sends; nothing from a terminal.
fn read_input() -> Result<Vec<u8>> {
    let stdin = std::io::stdin();
    let mut input = Vec::new();
    if !stdin.is_terminal() {
        let read = stdin.lock().take(INPUT_BYTES_MAX).read_to_end(&mut input);
        read.map_err(ShimError::host("cannot read what containerd sends"))?;
    }
    Ok(input)
}

/// Starts the process that serves, in the bundle of the first container; returns when it does.
fn spawn(args: &Args, folder: &Path, socket: &Path, ttrpc_address: &str) -> Result<()> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(ShimError::host(format!("cannot remove {}", socket.display()))(error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(socket)
        .map_err(ShimError::host(format!("cannot listen at {}", socket.display())))?;
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(NAME)
        .current_dir(folder)
        .env(TTRPC_ADDRESS, ttrpc_address)
        .args(["-namespace", &args.namespace, "-id", &args.id, "-address", &args.address])
        .args(args.debug.then_some("-debug"))
        .arg("serve")
        .stdin(OwnedFd::from(listener))
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let failed = "cannot start the shim process";
    let mut child = command.spawn().map_err(ShimError::host(failed))?;
    let mut said = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut said).map_err(ShimError::host(failed))?;
    }
    match said.trim() {
        READY => Ok(()),
        why => {
            let _ = std::fs::remove_file(socket);
            let _ = child.wait();
            Err(ShimError::internal(format!("{failed}: {why}")))
        }
    }
}

/// In the place of the old one at once: containerd may read it at any time.
fn write_address(folder: &Path, address: &str) -> Result<()> {
    let new = folder.join(".address");
    std::fs::write(&new, address)
        .and_then(|()| std::fs::rename(&new, folder.join(ADDRESS_FILE)))
        .map_err(ShimError::host("cannot write the bundle's file address"))
}

/// Says what the runtime is, as a message.
pub fn tell_info() -> Result<()> {
    let mut info = RuntimeInfo { name: RUNTIME.to_owned(), ..RuntimeInfo::default() };
    info.version.mut_or_insert_default().version = env!("CARGO_PKG_VERSION").to_owned();
    let text = info.write_to_bytes().map_err(ShimError::host("cannot write the answer"))?;
    std::io::stdout().write_all(&text).map_err(ShimError::host("cannot answer containerd"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use containerd_shim_protos::protobuf::well_known_types::any::Any;

    fn args() -> Args {
        Args { namespace: "n".to_owned(), id: "i".to_owned(), ..Args::default() }
    }

    fn old(newest: Option<&'static str>) -> impl Fn(&str) -> Option<String> {
        move |name| match name {
            TTRPC_ADDRESS => Some("/c.sock.ttrpc".to_owned()),
            MAX_VERSION => newest.map(str::to_owned),
            _ => None,
        }
    }

    #[test]
    fn both_ways_of_starting_are_answered_in_kind() {
        let flags = Wanted::read(b"", &args(), old(None)).unwrap();
        assert_eq!(flags.answer("unix:///s").unwrap(), b"unix:///s");
        let options = Any { type_url: "n.Options".to_owned(), ..Any::default() };
        let options = options.write_to_bytes().unwrap();
        let newer = Wanted::read(&options, &args(), old(Some("4"))).unwrap();
        let said = newer.answer("unix:///s").unwrap();
        let said: serde_json::Value = serde_json::from_slice(&said).unwrap();
        assert_eq!((&said["version"], &said["address"]), (&json!(3), &json!("unix:///s")));
        let params = BootstrapParams {
            instance_id: "i".to_owned(),
            namespace: "n".to_owned(),
            containerd_ttrpc_address: "/new.ttrpc".to_owned(),
            ..BootstrapParams::default()
        };
        let wanted = Wanted::read(&params.write_to_bytes().unwrap(), &args(), |_| None).unwrap();
        assert_eq!(wanted.ttrpc_address, "/new.ttrpc");
        let said = wanted.answer("unix:///s").unwrap();
        let said = BootstrapResult::parse_from_bytes(&said).unwrap();
        assert_eq!((said.version, said.address.as_str()), (3, "unix:///s"));
    }

    #[test]
    fn a_containerd_without_events_is_refused() {
        let error = Wanted::read(b"", &args(), |_| None).unwrap_err().to_string();
        assert!(error.contains(TTRPC_ADDRESS), "{error}");
    }
}
