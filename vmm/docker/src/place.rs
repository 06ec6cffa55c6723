//! A connection's place among those that are open, and whether its client is still there.
//!
//! A client may say its last word and go on listening (a half close), so the end of what it
//! says is not its own. Gone it is once its socket is closed both ways, which epoll(7) tells as
//! a hang-up.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exocell_cell::control;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

/// How long a client may take to read the head of an answer, and how often that is looked at.
const READ_MAX: Duration = Duration::from_secs(1);
const READ_LOOK: Duration = Duration::from_millis(1);

/// Held as long as the connection is open, taken over or not, and as long as a call of it runs.
pub type Place = Arc<Seat>;

/// See [`Place`].
pub struct Seat {
    _permit: OwnedSemaphorePermit,
    /// The connection once more. What can be read and written is not listened for: urgent data,
    /// which a unix socket never has, stands for nothing but the hang-up.
    line: AsyncFd<OwnedFd>,
}

impl Seat {
    /// # Errors
    /// There is no descriptor for it.
    pub fn new(permit: OwnedSemaphorePermit, stream: &UnixStream) -> io::Result<Self> {
        let line = stream.as_fd().try_clone_to_owned()?;
        #[expect(deprecated, reason = "sound for a descriptor of its own; what is new is unsafe")]
        let line = AsyncFd::with_interest(line, Interest::PRIORITY)?;
        Ok(Self { _permit: permit, line })
    }

    /// Waits until the client has read what was said, for a second at most. A client that takes
    /// its connection over reads the head with a buffer: what comes with the head is lost to some
    /// (docker-py).
    pub async fn read(&self) {
        let until = Instant::now() + READ_MAX;
        while control::unread(self.line.get_ref()).is_ok_and(|bytes| bytes > 0)
            && Instant::now() < until
        {
            tokio::time::sleep(READ_LOOK).await;
        }
    }

    /// Waits until the client is gone.
    pub async fn gone(&self) {
        // It fails when the server ends.
        let _ = self.line.ready(Interest::PRIORITY).await;
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::Semaphore;

    /// A place, and the two ends of its connection: the server's and the client's.
    pub fn seated() -> (Place, UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        (Arc::new(Seat::new(permit, &ours).unwrap()), ours, theirs)
    }

    async fn is_gone(place: &Seat) -> bool {
        // A turn of the event loop for what has happened.
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let mut gone = pin!(place.gone());
        poll_fn(|context| Poll::Ready(gone.as_mut().poll(context).is_ready())).await
    }

    #[tokio::test]
    async fn what_was_said_is_read_or_waited_for_a_while() {
        let (place, mut ours, mut theirs) = seated();
        place.read().await;
        ours.write_all(b"a head").await.unwrap();
        let mut head = [0; 6];
        let (began, heard) = (Instant::now(), Box::pin(theirs.read_exact(&mut head)));
        let mut read = pin!(place.read());
        let is_read = poll_fn(|context| Poll::Ready(read.as_mut().poll(context).is_ready()));
        assert!(!is_read.await, "nobody has read it");
        heard.await.unwrap();
        read.await;
        assert!(began.elapsed() < READ_MAX);
    }

    #[tokio::test]
    async fn a_client_is_gone_when_it_hung_up_both_ways() {
        let (place, mut ours, mut theirs) = seated();
        assert!(!is_gone(&place).await);
        theirs.write_all(b"words").await.unwrap();
        assert!(!is_gone(&place).await, "it talks");
        theirs.shutdown().await.unwrap();
        assert!(!is_gone(&place).await, "it has said all, and listens");
        let mut heard = Vec::new();
        ours.read_to_end(&mut heard).await.unwrap();
        ours.write_all(b"an answer").await.unwrap();
        assert!(!is_gone(&place).await);
        drop(theirs);
        place.gone().await;
        place.gone().await;
    }
}
