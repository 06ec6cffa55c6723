//! A guest's credit: memory that its kernel may take, granted when it asks.
//!
//! ```text
//! guest kernel ── Ask, Give ──> [ credit ] <── limit ── exocell update
//!              <──── Grant ──── [ thread ] <──────────> budget of the state root
//! guest agent  <── "return" ─── [returns ] <─┘
//! ```
//! The guest keeps its own count. The memory file tells whether it does: a guest that
//! holds more than it was granted is ended.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use exocell_agent::client;
use exocell_pager::Member;
use exocell_pager::abi::{self, MESSAGE_BYTES, PAGE_BYTES, Request};
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
/// How long a guest that gets nothing is held, while others are asked to give back.
/// A vCPU waits for that with interrupts off.
const PATIENCE: Duration = Duration::from_secs(1);
/// Where that was in vain, nobody waits again for so long.
const IN_VAIN: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(5);

/// What was granted and what may be, in bytes.
#[derive(Debug)]
pub(super) struct Account {
    pub guarantee: u64,
    pub limit: AtomicU64,
    pub granted: AtomicU64,
}

/// What ends a guest, with the reason.
pub(super) type End = Box<dyn FnOnce(&str) + Send>;

/// Who grants credit to one guest.
struct Lender {
    /// `None` when the guest has closed its end.
    socket: Option<OwnedFd>,
    memory: File,
    account: Arc<Account>,
    /// What it may have now: a lower limit counts once it keeps to it.
    cap: u64,
    member: Option<Member>,
    returns: SyncSender<u64>,
    /// When it last got less than it asked for.
    short_since: Option<Instant>,
    no_patience_until: Instant,
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
        let account = Arc::new(Account {
            guarantee: self.guarantee,
            limit: AtomicU64::new(limit),
            granted: AtomicU64::new(0),
        });
        let (returns, wanted) = sync_channel(1);
        let mut lender = Lender {
            socket: Some(self.socket),
            memory: memory.try_clone().map_err(CellError::host("dup"))?,
            account: account.clone(),
            cap: limit,
            member: self.member,
            returns,
            short_since: None,
            no_patience_until: Instant::now(),
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
            let tick = if self.is_lent() { TICK_LENT } else { TICK };
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
                let granted = self.lend(pages.saturating_mul(PAGE_BYTES))?;
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                if let Some(socket) = &self.socket {
                    // One that does not listen has it all the same.
                    let _ = send(socket.as_raw_fd(), &abi::grant(granted / PAGE_BYTES), flags);
                }
            }
            Some(Request::Give(pages)) => self.take_back(pages.saturating_mul(PAGE_BYTES))?,
            None => return Err("its kernel broke the credit's protocol".to_owned()),
        }
        Ok(())
    }

    /// Whether others may want some of what it has.
    fn is_lent(&self) -> bool {
        self.member.is_some() && self.granted() > self.account.guarantee
    }

    fn granted(&self) -> u64 {
        self.account.granted.load(Ordering::Relaxed)
    }

    /// What it may have altogether.
    fn cap(&mut self) -> u64 {
        let limit = self.account.limit.load(Ordering::Relaxed);
        if limit > self.cap || self.granted() <= limit {
            self.cap = limit;
        }
        self.cap
    }

    /// Of `want` bytes as many as the limit and the budget allow.
    fn lend(&mut self, want: u64) -> Result<u64, String> {
        let want = want.min(self.cap().saturating_sub(self.granted()));
        let granted = self.of_budget(want)?;
        self.account.granted.fetch_add(granted, Ordering::Relaxed);
        // Only whole pages are of use, and parts of a budget may be anything.
        let rest = granted % PAGE_BYTES;
        self.take_back(rest)?;
        Ok(granted - rest)
    }

    fn of_budget(&mut self, want: u64) -> Result<u64, String> {
        let Some(member) = &mut self.member else { return Ok(want) };
        let until = Instant::now() + PATIENCE;
        let in_vain = Instant::now() < self.no_patience_until;
        loop {
            let granted = member.ask(want).map_err(|error| error.to_string())?;
            self.short_since = (granted < want).then(Instant::now);
            if granted > 0 || want == 0 || in_vain {
                return Ok(granted);
            }
            if Instant::now() >= until || !member.is_due().map_err(|error| error.to_string())? {
                self.no_patience_until = Instant::now() + IN_VAIN;
                return Ok(0);
            }
            std::thread::sleep(AGAIN);
        }
    }

    fn take_back(&mut self, bytes: u64) -> Result<(), String> {
        let bytes = bytes.min(self.granted());
        self.account.granted.fetch_sub(bytes, Ordering::Relaxed);
        match &mut self.member {
            Some(member) => member.give(bytes).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    fn look(&mut self) -> Result<(), String> {
        let held =
            exocell_pager::allocated_bytes(&self.memory).map_err(|error| error.to_string())?;
        // It boots before it asks.
        let may = self.granted().max(self.account.guarantee);
        if held > may {
            return Err(format!("it holds {held} bytes of memory, {may} were granted"));
        }
        self.look_at_others().map_err(|error| error.to_string())
    }

    fn look_at_others(&mut self) -> Result<(), exocell_pager::BudgetError> {
        let is_lent = self.is_lent();
        let Some(member) = &mut self.member else { return Ok(()) };
        if self.short_since.is_some_and(|at| at.elapsed() > IN_VAIN) {
            member.settle()?;
            self.short_since = None;
        }
        if is_lent {
            let wanted = member.wanted_back()?;
            if wanted > 0 {
                // It may be at it already.
                let _ = self.returns.try_send(wanted);
            }
        }
        Ok(())
    }
}
