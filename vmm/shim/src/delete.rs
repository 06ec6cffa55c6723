//! `delete`: removes what a shim that was killed has left, without its help; tells how the container
//! ended.
//!
//! There is little: the cell ends when its session does, the depot was in the shim's mount
//! namespace. The cell may be about to end, or its supervisor may have been killed as well, so that
//! nobody has removed its record.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::SystemTime;

use containerd_shim_protos::api::DeleteResponse;
use containerd_shim_protos::protobuf::{Message, MessageField};

use crate::args::Args;
use crate::cgroups::Home;
use crate::config::Config;
use crate::error::{Result, ShimError};
use crate::events::timestamp;
use crate::group::Group;
use crate::{bundle, cell};

/// What a container's code is whose shim was killed.
const KILLED: u32 = 128 + 9;

/// Cleans up after a shim, and prints containerd's answer.
pub fn delete(args: &Args) -> Result<()> {
    let folder = args.bundle()?;
    let annotations = bundle::annotations(&folder).unwrap_or_default();
    let group = Group::of(args, &annotations)?;
    // One that lives ends its containers itself: this is one of a pod that others are in.
    if UnixStream::connect(group.socket()).is_err() {
        cell::remove(&Config::read()?.layout(), group.cell_id());
        let _ = std::fs::remove_file(group.socket());
        let _ = std::fs::remove_dir(group.depot());
        if let Ok(Some(home)) = Home::of(&bundle::cgroups_path(&folder)) {
            home.remove();
        }
    }
    let answer = DeleteResponse {
        exit_status: KILLED,
        exited_at: MessageField::some(timestamp(SystemTime::now())),
        ..DeleteResponse::default()
    };
    let text = answer.write_to_bytes().map_err(ShimError::host("cannot write the answer"))?;
    std::io::stdout().write_all(&text).map_err(ShimError::host("cannot answer containerd"))
}
