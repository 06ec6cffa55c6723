//! A guest's credit: memory that its kernel may take, granted when it asks.
//!
//! ```text
//! guest kernel ── Ask, Give ──> [ credit ] <── limit ── exocell update
//!              <──── Grant ──── [ thread ] <──────────> budget of the state root
//! guest agent  <── "return" ─── [returns ] <─┘
//! ```
//! The guest keeps its own count. The memory file tells whether it does: a guest that
//! holds more than it was granted is ended.

use std::fmt::Display;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use exocell_agent::client;
use exocell_pager::abi::{self, MESSAGE_BYTES, PAGE_BYTES, Request};
use exocell_pager::{Account, Credit, Member};
use exocell_vmm::devices::VsockHandle;
use exocell_vmm::jail::{self, ThreadClass};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};

use super::{memory, thread};
use crate::CellError;

/// How often what a guest holds is looked at.
const TICK: Duration = Duration::from_millis(500);
/// How often what others are short of, by a guest that was lent something.
const TICK_LENT: Duration = Duration::from_millis(100);
/// What ends a guest, with the reason.
pub(super) type End = Box<dyn FnOnce(&str) + Send>;

/// Who grants credit to one guest.
struct Lender {
    /// `None` when the guest has closed its end.
    socket: Option<OwnedFd>,
    memory: File,
    credit: Credit,
    returns: SyncSender<u64>,
}

/// What a guest's credit comes from, before the guest is there.
pub(super) struct Reserved {
    guarantee: u64,
    member: Option<Member>,
    socket: OwnedFd,
    pub guest_end: OwnedFd,
}

impl Reserved {
    /// Of `guarantee` bytes, and what the budget of `member` lends.
    pub fn new(guarantee: u64, member: Option<Member>) -> Result<Self, CellError> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (socket, guest_end) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|errno| {
                CellError::host("cannot make the guest kernel's socket")(errno.into())
            })?;
        Ok(Self { guarantee, member, socket, guest_end })
    }

    /// Starts the credit thread, and closes the guest's end; `end` is called with the
    /// reason if the guest has to end. The receiver is for [`pass_on`].
    pub fn grant(
        self,
        memory: &File,
        end: End,
    ) -> Result<(Arc<Account>, Receiver<u64>), CellError> {
        let limit = memory.metadata().map_err(CellError::host("cannot size guest memory"))?.len();
        let account = Account::new(self.guarantee, limit);
        let (returns, wanted) = sync_channel(1);
        let mut lender = Lender {
            socket: Some(self.socket),
            memory: memory.try_clone().map_err(CellError::host("dup"))?,
            credit: Credit::new(account.clone(), self.member),
            returns,
        };
        thread("credit", move || {
            if jail::restrict_calls(ThreadClass::Credit).is_err() {
                return end("its credit cannot be kept");
            }
            if let Err(why) = lender.serve() {
                end(&why);
            }
        })?;
        Ok((account, wanted))
    }
}

/// Asks the guest for memory that others are due; it gives what it can.
pub(super) fn pass_on(agent: VsockHandle, wanted: Receiver<u64>) -> Result<(), CellError> {
    let passing = thread("returns", move || {
        while let Ok(bytes) = wanted.recv() {
            // One that does not answer, or not yet, is asked again.
            if let Ok(stream) = memory::connect(&agent) {
                let _ = client::give_back(&stream, &stream, bytes);
            }
        }
    });
    passing.map(drop)
}

impl Lender {
    /// Does not return but with what is wrong with the guest.
    fn serve(&mut self) -> Result<(), String> {
        let mut looked = Instant::now();
        loop {
            let tick = if self.credit.is_lent() { TICK_LENT } else { TICK };
            if self.is_asked(tick.saturating_sub(looked.elapsed())) {
                self.answer()?;
            }
            if looked.elapsed() >= tick {
                looked = Instant::now();
                self.look()?;
            }
        }
    }

    fn is_asked(&self, wait: Duration) -> bool {
        let Some(socket) = &self.socket else {
            std::thread::sleep(wait);
            return false;
        };
        let mut waited = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let wait = PollTimeout::try_from(wait).unwrap_or(PollTimeout::ZERO);
        poll(&mut waited, wait).is_ok_and(|ready| ready > 0)
    }

    fn answer(&mut self) -> Result<(), String> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let mut message = [0; 2 * MESSAGE_BYTES];
        let length = match recv(socket.as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => {
                self.socket = None;
                return Ok(());
            }
            Ok(length) => length,
            Err(_) => return Ok(()),
        };
        match Request::parse(&message[..length]) {
            Some(Request::Ask(pages)) => {
                let granted = self.credit.ask(pages.saturating_mul(PAGE_BYTES)).map_err(told)?;
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                // One that does not listen has it all the same.
                let _ = send(socket.as_raw_fd(), &abi::grant(granted / PAGE_BYTES), flags);
            }
            Some(Request::Give(pages)) => {
                self.credit.give(pages.saturating_mul(PAGE_BYTES)).map_err(told)?;
            }
            None => return Err("its kernel broke the credit's protocol".to_owned()),
        }
        Ok(())
    }

    fn look(&mut self) -> Result<(), String> {
        let held = exocell_pager::allocated_bytes(&self.memory).map_err(told)?;
        self.credit.check(held).map_err(told)?;
        let wanted = self.credit.wanted_back().map_err(told)?;
        if wanted > 0 {
            // It may be at it already.
            let _ = self.returns.try_send(wanted);
        }
        Ok(())
    }
}

fn told(error: impl Display) -> String {
    error.to_string()
}
