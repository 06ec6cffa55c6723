//! A host that is short of memory has guests drop what files left in theirs.
//!
//! Each supervisor looks by itself and asks for the same share, so no cell gives for
//! another. Only guests whose memory goes back when it is free are asked.

use std::time::Duration;

use exocell_agent::client;
use exocell_pager::Pressure;
use exocell_vmm::devices::VsockHandle;

use super::{memory, thread};
use crate::CellError;

/// How often the host is looked at.
const PERIOD: Duration = Duration::from_secs(3);
/// How often while it is short, and the guest asked.
const PERIOD_SHORT: Duration = Duration::from_secs(1);

/// Starts the thread that looks.
pub(super) fn watch(mut host: Pressure, agent: VsockHandle) -> Result<(), CellError> {
    let watching = thread("pressure", move || {
        loop {
            if !host.is_high() {
                std::thread::sleep(PERIOD);
                continue;
            }
            // A guest that does not answer, or not yet, is asked again.
            if let Ok(stream) = memory::connect(&agent) {
                let _ = client::drop_cold(&stream, &stream);
            }
            std::thread::sleep(PERIOD_SHORT);
        }
    });
    watching.map(drop)
}
