//! A container's life as the server follows it: who is attached, how it ended,
//! and the session over which the server is the operator of its cell.
//!
//! ```text
//!             start: the session           the end is told
//!  waiting ──────────────────────> following ─────────────> over
//!     attached clients wait           get all it writes      closed
//! ```
//! A server that is started while cells run follows them as an onlooker does.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use exocell_cell::agent::{Kind, TtySize};
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio::time::timeout;

use crate::frames::Chunk;
use crate::input::Input;

/// Chunks that wait for one attached client; then the program waits, as it
/// does for a pipe.
const CHUNKS_WAITING: usize = 64;
/// How soon one who wants a container looks again who shows its files.
const CLAIM_AGAIN: Duration = Duration::from_millis(100);
/// How often a client that holds the program up is looked at.
const HELD_UP: Duration = Duration::from_secs(1);

/// What is known of a container's ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Life {
    /// How often its program ended while this server followed it.
    pub ends: u64,
    /// Of its last end.
    pub code: u8,
    pub removed: bool,
}

/// Knows whether a program is over.
pub trait Overseer: Sync {
    fn is_over(&self) -> impl Future<Output = bool> + Send;
}

/// Counted as long as it is there.
struct Claim<'a>(&'a Mutex<usize>);

impl<'a> Claim<'a> {
    fn new(claims: &'a Mutex<usize>) -> Self {
        *claims.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self(claims)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

/// An idle cell on a container's disk. It ends when its user is done with it, or when the
/// container itself is wanted: a user's client may stop for ever.
pub struct Idle(Mutex<Option<Showing>>);

struct Showing {
    /// Ends the cell and waits until its disk is whole. May block.
    end: Box<dyn FnOnce() + Send>,
    /// Keeps the container from being started meanwhile.
    _held: Option<OwnedMutexGuard<()>>,
}

impl Idle {
    pub fn new(held: Option<OwnedMutexGuard<()>>, end: impl FnOnce() + Send + 'static) -> Self {
        Self(Mutex::new(Some(Showing { end: Box::new(end), _held: held })))
    }

    /// Ends it, where it has not ended. May block.
    pub fn end(&self) {
        let showing = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Showing { end, _held }) = showing {
            end();
        }
    }

    pub fn has_ended(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

#[derive(Default)]
struct Attached {
    following: bool,
    clients: Vec<mpsc::Sender<Chunk>>,
}

/// See the module's head.
pub struct Live {
    pub id: String,
    /// Held while the container is started, stopped or removed, and while an idle cell shows its
    /// files.
    pub changing: Arc<tokio::sync::Mutex<()>>,
    /// The idle cell that shows its files, if there is one.
    idle: Mutex<Weak<Idle>>,
    /// How many want the container itself.
    claims: Mutex<usize>,
    attached: Mutex<Attached>,
    input: Mutex<Option<Arc<Input>>>,
    life: watch::Sender<Life>,
    /// Whether there is a session.
    session: watch::Sender<bool>,
    /// Whether somebody waits for its next start.
    restarting: AtomicBool,
    /// Counts what it wrote; the log has it already.
    written: watch::Sender<u64>,
}

impl Live {
    pub fn new(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            changing: Arc::default(),
            idle: Mutex::default(),
            claims: Mutex::default(),
            attached: Mutex::default(),
            input: Mutex::default(),
            life: watch::Sender::default(),
            session: watch::Sender::default(),
            restarting: AtomicBool::new(false),
            written: watch::Sender::default(),
        }
    }

    fn attached(&self) -> MutexGuard<'_, Attached> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the container itself. Who reaches into its files has `patience` to be done; after
    /// that what he has begun is broken off. Others who would begin meanwhile come after this.
    pub async fn claim(&self, patience: Duration) -> OwnedMutexGuard<()> {
        let _claim = Claim::new(&self.claims);
        let mut changing = pin!(self.changing.clone().lock_owned());
        let mut wait = patience;
        loop {
            if let Ok(held) = timeout(wait, &mut changing).await {
                return held;
            }
            wait = CLAIM_AGAIN;
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
            if let Some(idle) = idle {
                // A server that ends breaks everything off.
                let _ = tokio::task::spawn_blocking(move || idle.end()).await;
            }
        }
    }

    /// Whether somebody wants the container itself.
    pub fn is_claimed(&self) -> bool {
        *self.claims.lock().unwrap_or_else(PoisonError::into_inner) > 0
    }

    /// Notes the idle cell that shows its files.
    pub fn show(&self, idle: &Arc<Idle>) {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(idle);
    }

    pub fn life(&self) -> watch::Receiver<Life> {
        self.life.subscribe()
    }

    pub fn written(&self) -> watch::Receiver<u64> {
        self.written.subscribe()
    }

    /// What the program writes from now on. With `wait`, a program that does
    /// not run yet; without it and with no program the stream is over.
    pub fn attach(&self, wait: bool) -> mpsc::Receiver<Chunk> {
        let (sender, receiver) = mpsc::channel(CHUNKS_WAITING);
        let mut attached = self.attached();
        if attached.following || wait {
            attached.clients.push(sender);
        }
        receiver
    }

    /// Takes the session's writing half. False when there is a session already.
    pub fn begin(&self, input: OwnedWriteHalf) -> bool {
        let mut current = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        let mut attached = self.attached();
        if attached.following {
            return false;
        }
        attached.following = true;
        *current = Some(Arc::new(Input::new(input)));
        self.session.send_replace(true);
        true
    }

    /// Begins to wait for its next start; false where somebody does already.
    pub fn await_restart(&self) -> bool {
        !self.restarting.swap(true, Ordering::Relaxed)
    }

    /// Nobody waits for that any more.
    pub fn restarted(&self) {
        self.restarting.store(false, Ordering::Relaxed);
    }

    pub fn is_followed(&self) -> bool {
        self.attached().following
    }

    /// Hands `chunk` to everyone attached. Clients that stop reading hold the program up, until
    /// `overseer` finds that there is none any more: then all of them are left at once.
    pub async fn tell(&self, chunk: Chunk, overseer: &impl Overseer) {
        self.written.send_modify(|count| *count += 1);
        let mut slow = self.attached().clients.clone();
        loop {
            slow.retain(|client| !self.has_taken(client, &chunk));
            if slow.is_empty() {
                return;
            }
            let room = async {
                for client in &slow {
                    // One that is gone is found out by the next try.
                    let _ = client.reserve().await;
                }
            };
            if timeout(HELD_UP, room).await.is_err() && overseer.is_over().await {
                slow.iter()
                    .filter(|slow| !self.has_taken(slow, &chunk))
                    .for_each(|slow| self.detach(slow));
                return;
            }
        }
    }

    /// Whether `client` has the chunk, or is gone. False where it has no room for it.
    fn has_taken(&self, client: &mpsc::Sender<Chunk>, chunk: &Chunk) -> bool {
        match client.try_send(chunk.clone()) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => false,
            Err(mpsc::error::TrySendError::Closed(_)) => {
                self.detach(client);
                true
            }
        }
    }

    fn detach(&self, client: &mpsc::Sender<Chunk>) {
        self.attached().clients.retain(|other| !other.same_channel(client));
    }

    /// The session is over: nobody is attached any more.
    pub fn close(&self) {
        let input = self.input.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(input) = input {
            input.end();
        }
        *self.attached() = Attached::default();
        self.session.send_replace(false);
    }

    /// Waits until there is a program to give input to.
    pub async fn until_followed(&self) {
        // The sender is in our hands: it does not go.
        let _ = self.session.subscribe().wait_for(|session| *session).await;
    }

    /// Tells those who wait that the program ended.
    pub fn ended(&self, code: u8) {
        self.life.send_modify(|life| {
            life.ends += 1;
            life.code = code;
        });
    }

    /// Tells them that the container is gone, and with `code` that its program ended so, of
    /// which nobody has told them.
    pub fn removed(&self, code: Option<u8>) {
        self.life.send_modify(|life| {
            if let Some(code) = code {
                life.ends += 1;
                life.code = code;
            }
            life.removed = true;
        });
    }

    /// Writes to the program's input; one that is over takes nothing.
    pub async fn stdin(&self, bytes: Bytes) {
        self.send(Kind::Stdin, bytes).await;
    }

    pub async fn stdin_eof(&self) {
        self.send(Kind::StdinEof, Bytes::new()).await;
    }

    async fn send(&self, kind: Kind, bytes: Bytes) {
        if let Some(input) = self.input() {
            input.send(kind, bytes).await;
        }
    }

    pub fn resize(&self, size: TtySize) {
        if let Some(input) = self.input() {
            input.resize(size);
        }
    }

    fn input(&self) -> Option<Arc<Input>> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says the same whenever it is asked.
    struct Always(bool);

    impl Overseer for Always {
        async fn is_over(&self) -> bool {
            self.0
        }
    }

    fn chunk(text: &'static str) -> Chunk {
        Chunk { stderr: false, bytes: text.into() }
    }

    async fn following() -> Live {
        let live = Live::new("x");
        let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
        assert!(live.begin(ours.into_split().1));
        live
    }

    #[tokio::test]
    async fn clients_that_wait_hear_all_and_late_ones_nothing() {
        let live = Live::new("x");
        let mut early = live.attach(true);
        assert!(live.attach(false).recv().await.is_none());
        let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
        assert!(live.begin(ours.into_split().1));
        let mut later = live.attach(false);
        live.tell(chunk("a"), &Always(false)).await;
        live.close();
        assert_eq!(early.recv().await, Some(chunk("a")));
        assert_eq!(later.recv().await, Some(chunk("a")));
        assert_eq!((early.recv().await, later.recv().await), (None, None));
        assert!(live.attach(false).recv().await.is_none());
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_dropped_once_the_program_is_over() {
        let live = following().await;
        let mut stuck = live.attach(false);
        for _ in 0..CHUNKS_WAITING {
            live.tell(chunk("a"), &Always(false)).await;
        }
        live.tell(chunk("b"), &Always(true)).await;
        let mut heard = 0;
        while stuck.recv().await.is_some() {
            heard += 1;
        }
        assert_eq!(heard, CHUNKS_WAITING);
    }

    #[tokio::test]
    async fn clients_that_do_not_read_are_left_all_at_once() {
        /// Counts how often it is asked.
        #[derive(Default)]
        struct Asked(std::sync::atomic::AtomicUsize);

        impl Overseer for Asked {
            async fn is_over(&self) -> bool {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                true
            }
        }

        let live = following().await;
        let mut stuck: Vec<_> = (0..30).map(|_| live.attach(false)).collect();
        for _ in 0..CHUNKS_WAITING {
            live.tell(chunk("a"), &Always(false)).await;
        }
        let mut reading = live.attach(false);
        let overseer = Asked::default();
        live.tell(chunk("b"), &overseer).await;
        live.tell(chunk("c"), &overseer).await;
        live.close();
        assert_eq!(overseer.0.into_inner(), 1);
        assert_eq!(reading.recv().await, Some(chunk("b")));
        assert_eq!(reading.recv().await, Some(chunk("c")));
        for client in &mut stuck {
            let mut heard = 0;
            while client.recv().await.is_some() {
                heard += 1;
            }
            assert_eq!(heard, CHUNKS_WAITING);
        }
    }

    #[tokio::test]
    async fn one_that_is_removed_before_its_end_is_told_has_ended() {
        let live = following().await;
        let life = live.life();
        live.removed(Some(137));
        assert_eq!(*life.borrow(), Life { ends: 1, code: 137, removed: true });
        let live = following().await;
        live.ended(3);
        live.removed(None);
        assert_eq!(*live.life().borrow(), Life { ends: 1, code: 3, removed: true });
    }

    #[tokio::test]
    async fn whoever_wants_a_container_does_not_wait_for_those_who_read_its_files() {
        let live = Live::new("x");
        let held = live.changing.clone().lock_owned().await;
        let (sender, mut ended) = tokio::sync::oneshot::channel::<()>();
        // Its reader is at it for ever.
        let idle = Arc::new(Idle::new(Some(held), move || drop(sender)));
        live.show(&idle);
        assert!(!live.is_claimed() && !idle.has_ended());
        let next = live.changing.clone().lock_owned();
        let mut next = Box::pin(next);
        assert!(timeout(Duration::ZERO, &mut next).await.is_err(), "another waits to read them");
        let reader = async {
            let held = next.await;
            assert!(live.is_claimed(), "it is told to go");
            drop(held);
        };
        let (claimed, ()) = tokio::join!(live.claim(Duration::ZERO), reader);
        assert!(idle.has_ended() && !live.is_claimed());
        assert!(
            ended.try_recv().is_err_and(|e| e == tokio::sync::oneshot::error::TryRecvError::Closed)
        );
        drop(claimed);
        // One who is done in time is not broken off.
        let held = live.changing.clone().lock_owned().await;
        let idle = Arc::new(Idle::new(Some(held), || ()));
        live.show(&idle);
        let done = async {
            tokio::task::yield_now().await;
            assert!(!idle.has_ended());
            idle.end();
        };
        tokio::join!(live.claim(Duration::from_secs(60)), done);
    }

    #[tokio::test]
    async fn ends_are_told_to_those_who_wait() {
        let live = following().await;
        let mut life = live.life();
        live.ended(3);
        life.changed().await.unwrap();
        assert_eq!(*life.borrow(), Life { ends: 1, code: 3, removed: false });
        assert!(live.is_followed());
        live.close();
        assert!(!live.is_followed());
    }
}
