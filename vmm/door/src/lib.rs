//! Connections: how many there are, which of them goes when there is no room, and whether a client
//! is still there.
//!
//! ```text
//! comes ──> waits (for a head, for its answer to be read) ──> a call that is counted ──> waits …
//!             │ there is no room: who waits longest goes         │ a tenant's, within its share
//!             v                                                  v
//!           closed                                      stays until its answer is taken
//! ```
//! A connection owes nothing while it waits: who connects and says little keeps nobody out. Who takes
//! nothing of an answer that is all there is broken off.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep, timeout};

/// How long a connection that was told to go may take until the next one is.
const ROOM_TIME: Duration = Duration::from_millis(20);
/// How long a client may take nothing of an answer that is all there.
const TAKING_MAX: Duration = Duration::from_secs(10);
/// When it is tried again to take a client in that there was no descriptor for.
const AGAIN_TIME: Duration = Duration::from_millis(50);
/// When a client that says nothing is asked whether it is there (tcp(7)): in seconds, and how often.
const ALIVE_IDLE: u32 = 60;
const ALIVE_AGAIN: u32 = 15;
const ALIVE_COUNT: u32 = 4;

/// See the crate's head.
pub struct Door {
    places: Arc<Semaphore>,
    /// Connections of one address, where it is not this machine: a proxy here speaks for many.
    of_one_max: usize,
    taking_max: Duration,
    guests: Mutex<Guests>,
}

#[derive(Default)]
struct Guests {
    /// In the order in which they began to wait.
    waiting: BTreeMap<u64, (IpAddr, Arc<Notify>)>,
    last: u64,
    by_address: HashMap<IpAddr, usize>,
}

impl Door {
    /// One for so many connections at once.
    pub fn new(connections: usize) -> Arc<Self> {
        Arc::new(Self {
            places: Arc::new(Semaphore::new(connections)),
            of_one_max: (connections / 2).max(1),
            taking_max: TAKING_MAX,
            guests: Mutex::default(),
        })
    }

    fn guests(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a client that comes from `address`; `None` where that has as many as it may.
    async fn place(&self, address: IpAddr) -> Option<OwnedSemaphorePermit> {
        let own = self.guests().by_address.get(&address).copied().unwrap_or(0);
        if own >= self.of_one_max && !address.is_loopback() && !self.make_room(Some(address)) {
            return None;
        }
        loop {
            if let Ok(place) = self.places.clone().try_acquire_owned() {
                return Some(place);
            }
            self.make_room(None);
            if let Ok(place) = timeout(ROOM_TIME, self.places.clone().acquire_owned()).await {
                return place.ok();
            }
        }
    }

    /// The next client that there is a place for: its seat, and its connection.
    pub async fn next(
        self: &Arc<Self>,
        listener: &TcpListener,
    ) -> (Arc<Seat>, impl AsyncRead + AsyncWrite + Unpin + Send + use<>) {
        loop {
            let Ok((stream, from)) = listener.accept().await else {
                // Out of descriptors: one that waits gives its own back.
                self.make_room(None);
                sleep(AGAIN_TIME).await;
                continue;
            };
            if let Some(place) = self.place(from.ip()).await {
                return Seat::take(self, place, stream, from.ip());
            }
        }
    }

    /// Tells the one that has waited longest to go, of `address` if one is named. It stays if its
    /// call has just come.
    fn make_room(&self, address: Option<IpAddr>) -> bool {
        let mut guests = self.guests();
        let of = |own: &IpAddr| address.is_none_or(|address| *own == address);
        let found = guests.waiting.iter().find(|(_, (own, _))| of(own)).map(|(number, _)| *number);
        let Some((_, told)) = found.and_then(|number| guests.waiting.remove(&number)) else {
            return false;
        };
        told.notify_one();
        true
    }
}

/// A connection's place, as long as it is open and as long as a call of it runs.
pub struct Seat {
    door: Arc<Door>,
    address: IpAddr,
    line: Arc<OwnedReadHalf>,
    told: Arc<Notify>,
    /// Whether it is broken off rather than ended.
    broken: Arc<AtomicBool>,
    /// Answers that are all there, and not taken yet.
    answers: Arc<AtomicUsize>,
    /// Among those that wait.
    number: Mutex<Option<u64>>,
    _place: OwnedSemaphorePermit,
}

impl Seat {
    /// Takes a client in; its seat, and its connection.
    fn take(
        door: &Arc<Door>,
        place: OwnedSemaphorePermit,
        stream: TcpStream,
        address: IpAddr,
    ) -> (Arc<Self>, impl AsyncRead + AsyncWrite + Unpin + Send + use<>) {
        // One without these is served as well.
        let _ = stream.set_nodelay(true);
        let _ = setsockopt(&stream, sockopt::TcpKeepIdle, &ALIVE_IDLE)
            .and_then(|()| setsockopt(&stream, sockopt::TcpKeepInterval, &ALIVE_AGAIN))
            .and_then(|()| setsockopt(&stream, sockopt::TcpKeepCount, &ALIVE_COUNT))
            .and_then(|()| setsockopt(&stream, sockopt::KeepAlive, &true));
        let (read, write) = stream.into_split();
        let line = Arc::new(read);
        let seat = Arc::new(Self {
            door: door.clone(),
            address,
            line: line.clone(),
            told: Arc::default(),
            broken: Arc::default(),
            answers: Arc::default(),
            number: Mutex::default(),
            _place: place,
        });
        *door.guests().by_address.entry(address).or_default() += 1;
        seat.wait();
        let writing = Writing {
            half: Some(write),
            broken: seat.broken.clone(),
            answers: seat.answers.clone(),
            taking_max: door.taking_max,
            late: None,
        };
        (seat, tokio::io::join(Reading(line), writing))
    }

    /// Has the connection end with a reset (tcp(7), SO_LINGER): its client hears that it was broken
    /// off, and not that an answer has a wrong form.
    pub fn break_off(&self) {
        break_off((*self.line).as_ref(), &self.broken);
    }

    fn number(&self) -> MutexGuard<'_, Option<u64>> {
        self.number.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to wait: it may be told to go.
    fn wait(&self) {
        let mut number = self.number();
        let mut guests = self.door.guests();
        guests.last += 1;
        let last = guests.last;
        if let Some(before) = number.replace(last) {
            guests.waiting.remove(&before);
        }
        guests.waiting.insert(last, (self.address, self.told.clone()));
    }

    fn stop_waiting(&self) {
        if let Some(number) = self.number().take() {
            self.door.guests().waiting.remove(&number);
        }
    }

    /// Until it has to go.
    pub async fn told_to_go(&self) {
        loop {
            self.told.notified().await;
            // A call may have come just before.
            if self.number().is_some() {
                return;
            }
        }
    }

    /// Until its client is gone, or has said its last: clients of HTTP do not do the one without
    /// the other. What it has said by then may not be read yet.
    pub async fn gone(&self) {
        // Urgent data is not listened for: this stands for the end alone. Without the socket's
        // state nobody can say.
        if self.line.ready(Interest::PRIORITY).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.stop_waiting();
        let mut guests = self.door.guests();
        if let Some(count) = guests.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                guests.by_address.remove(&self.address);
            }
        }
    }
}

fn break_off(stream: &TcpStream, broken: &AtomicBool) {
    let now = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    // Else it ends as others do.
    if setsockopt(stream, sockopt::Linger, &now).is_ok() {
        broken.store(true, Ordering::Release);
    }
}

/// An answer that is all there, until it is taken.
pub struct Taking(Arc<AtomicUsize>);

impl Drop for Taking {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The half of a connection that is read, which others look at as well.
struct Reading(Arc<OwnedReadHalf>);

impl AsyncRead for Reading {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream: &TcpStream = (*self.0).as_ref();
        loop {
            ready!(stream.poll_read_ready(context))?;
            match stream.try_read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

/// The other half. It says that nothing more comes when it goes, unless the connection is broken off.
struct Writing {
    half: Option<OwnedWriteHalf>,
    broken: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    taking_max: Duration,
    /// When it is too late to take any of an answer.
    late: Option<Pin<Box<Sleep>>>,
}

impl Writing {
    fn half(&mut self) -> io::Result<Pin<&mut OwnedWriteHalf>> {
        self.half.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// `written`, or the end of a client that takes nothing.
    fn in_time<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        // One that follows a program may be as slow as it likes.
        if written.is_ready() || self.answers.load(Ordering::Acquire) == 0 {
            self.late = None;
            return written;
        }
        let most = self.taking_max;
        ready!(self.late.get_or_insert_with(|| Box::pin(sleep(most))).as_mut().poll(context));
        if let Some(half) = &self.half {
            break_off(half.as_ref(), &self.broken);
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Writing {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = self.half()?.poll_write(context, bytes);
        self.in_time(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.half()?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.half()?.poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.half()?.poll_write_vectored(context, slices);
        self.in_time(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.half.as_ref().is_some_and(OwnedWriteHalf::is_write_vectored)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if self.broken.load(Ordering::Acquire)
            && let Some(half) = self.half.take()
        {
            half.forget();
        }
    }
}

/// One call on a connection: held while it is worked on, and until its answer is taken.
pub struct Work {
    seat: Arc<Seat>,
    held: Mutex<Vec<Box<dyn Send>>>,
    /// Whose it is, once that is known.
    caller: OnceLock<String>,
}

impl Work {
    /// One that nobody's key came with yet.
    pub fn new(seat: &Arc<Seat>) -> Arc<Self> {
        Arc::new(Self { seat: seat.clone(), held: Mutex::default(), caller: OnceLock::new() })
    }

    fn held(&self) -> MutexGuard<'_, Vec<Box<dyn Send>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It counts as `caller`'s, who has `share` for it: its connection stays.
    pub fn count(&self, caller: &str, share: impl Send + 'static) {
        self.caller.get_or_init(|| caller.to_owned());
        self.held().push(Box::new(share));
        self.seat.stop_waiting();
    }

    /// Keeps `what` until it is over.
    pub fn keep(&self, what: impl Send + 'static) {
        self.held().push(Box::new(what));
    }

    /// Whose it is; of one without a key nobody's.
    pub fn caller(&self) -> &str {
        self.caller.get().map_or("", String::as_str)
    }

    /// An answer of it is all there: until this is dropped its client has to take some of it now
    /// and then, or is broken off.
    pub fn taking(&self) -> Taking {
        self.seat.answers.fetch_add(1, Ordering::AcqRel);
        Taking(self.seat.answers.clone())
    }

    /// Until its client is gone.
    pub async fn gone(&self) {
        self.seat.gone().await;
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let held = std::mem::take(&mut *self.held());
        if !held.is_empty() {
            drop(held);
            self.seat.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn guest(door: &Arc<Door>) -> (Arc<Seat>, impl AsyncRead + AsyncWrite, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, from) = listener.accept().await.unwrap();
        let place = door.places.clone().try_acquire_owned().unwrap();
        let (seat, line) = Seat::take(door, place, stream, from.ip());
        (seat, line, theirs)
    }

    async fn is_now(event: impl Future<Output = ()>) -> bool {
        tokio::time::sleep(Duration::from_millis(20)).await;
        tokio::select! { biased; () = event => true, () = async {} => false }
    }

    #[tokio::test]
    async fn who_has_waited_longest_goes_and_a_call_stays() {
        let door = Door::new(3);
        assert!(!door.make_room(None));
        let (a, b, c) = (guest(&door).await, guest(&door).await, guest(&door).await);
        let work = Work::new(&a.0);
        work.count("ann", ());
        assert!(door.make_room(None));
        assert!(!is_now(a.0.told_to_go()).await && !is_now(c.0.told_to_go()).await);
        b.0.told_to_go().await;
        drop(b);
        let next = door.place([127, 0, 0, 1].into()).await;
        assert!(next.is_some(), "there is room again");
        // Its call is over: it waits anew, behind the other.
        drop(work);
        assert!(door.make_room(None));
        c.0.told_to_go().await;
        assert!(!is_now(a.0.told_to_go()).await);
        assert!(door.make_room(None));
        a.0.told_to_go().await;
    }

    #[tokio::test]
    async fn who_comes_next_has_the_place_of_who_has_waited_longest() {
        let door = Door::new(2);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
        }
        let (first, second) = (door.next(&listener).await, door.next(&listener).await);
        let goes = async {
            first.0.told_to_go().await;
            drop(first);
        };
        let (third, ()) = tokio::join!(door.next(&listener), goes);
        assert!(matches!(clients[0].read(&mut [0]).await, Ok(0) | Err(_)));
        assert!(!is_now(second.0.told_to_go()).await && !is_now(third.0.told_to_go()).await);
    }

    #[tokio::test]
    async fn one_address_has_a_part_of_the_places() {
        let door = Door::new(4);
        let [far, other]: [IpAddr; 2] = [[192, 0, 2, 1].into(), [192, 0, 2, 2].into()];
        door.guests().by_address.insert(far, 2);
        assert!(door.place(far).await.is_none(), "none of its own can go");
        assert!(door.place(other).await.is_some());
        door.guests().by_address.insert([127, 0, 0, 1].into(), 2);
        assert!(door.place([127, 0, 0, 1].into()).await.is_some());
    }

    #[tokio::test]
    async fn who_takes_nothing_of_an_answer_is_broken_off() {
        let mut door = Door::new(1);
        Arc::get_mut(&mut door).unwrap().taking_max = Duration::from_millis(20);
        let (seat, line, _theirs) = guest(&door).await;
        let mut line = pin!(line);
        let work = Work::new(&seat);
        let much = vec![0; 64 << 20];
        {
            // What a program says may wait.
            let mut writing = pin!(line.write_all(&much));
            assert!(!is_now(async { drop(writing.as_mut().await) }).await);
            assert!(!is_now(async { drop(writing.as_mut().await) }).await);
        }
        let answer = work.taking();
        let failed = line.write_all(&much).await.unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::TimedOut);
        drop((answer, work));
        assert_eq!(seat.answers.load(Ordering::Acquire), 0);
        assert!(seat.broken.load(Ordering::Acquire));
    }

    #[tokio::test]
    async fn a_client_that_hangs_up_is_gone_whatever_it_said_before() {
        let door = Door::new(1);
        let (seat, mut line, mut theirs) = guest(&door).await;
        assert!(!is_now(seat.gone()).await);
        theirs.write_all(b"GET / HTTP/1.1\r\n\r\nand more").await.unwrap();
        assert!(!is_now(seat.gone()).await, "it talks");
        drop(theirs);
        seat.gone().await;
        let mut said = Vec::new();
        pin!(&mut line).read_to_end(&mut said).await.unwrap();
        assert!(said.ends_with(b"and more"));
        assert!(door.guests().by_address.len() == 1);
        drop(line);
        drop(seat);
        assert!(door.guests().by_address.is_empty() && door.guests().waiting.is_empty());
    }
}
