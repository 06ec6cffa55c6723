//! A stream to a guest that is waited for only so long.
//!
//! A guest may answer slowly, a byte at a time, or never. What counts is the time that this side
//! waits, not what it does in between: [`MOVED_BYTES`] have to move, in either direction, in each
//! stretch of waiting of the limit. A reply is shorter than that, so it has the limit as a whole.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::FRAME_BYTES_MAX;

/// How long a guest may take to answer a request.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long a guest may take for [`MOVED_BYTES`] of an archive.
pub const TRANSFER_MAX: Duration = Duration::from_secs(30);
/// What has to move so that the guest is waited for anew, in bytes: more than one frame.
const MOVED_BYTES: usize = 2 * FRAME_BYTES_MAX;

/// A stream whose peer is waited for so long.
#[derive(Debug)]
pub struct Patient {
    stream: UnixStream,
    spent: Mutex<Spent>,
}

#[derive(Debug)]
struct Spent {
    limit: Duration,
    waited: Duration,
    moved: usize,
}

impl Patient {
    /// A stream that waits for `limit` at most.
    pub fn new(stream: UnixStream, limit: Duration) -> Self {
        Self { stream, spent: Mutex::new(Spent { limit, waited: Duration::ZERO, moved: 0 }) }
    }

    fn spent(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to wait anew, for `limit` at most.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self::new(self.stream, limit)
    }

    /// Begins to wait anew, for as long as at first: the guest has said that it is at work.
    pub fn wait_anew(&self) {
        let mut spent = self.spent();
        (spent.moved, spent.waited) = (0, Duration::ZERO);
    }

    /// The stream underneath, which waits for ever.
    ///
    /// # Errors
    /// The time limits cannot be taken off.
    pub fn into_endless(self) -> io::Result<UnixStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }

    /// The stream underneath, to be cut off from another thread.
    pub fn get_ref(&self) -> &UnixStream {
        &self.stream
    }

    fn left(&self) -> io::Result<Duration> {
        let spent = self.spent();
        match spent.limit.checked_sub(spent.waited) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(no_answer(spent.limit)),
        }
    }

    fn count(&self, since: Instant, done: io::Result<usize>) -> io::Result<usize> {
        let mut spent = self.spent();
        spent.waited += since.elapsed();
        let count = match done {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(no_answer(spent.limit));
            }
            other => other?,
        };
        spent.moved += count;
        if spent.moved >= MOVED_BYTES {
            (spent.moved, spent.waited) = (0, Duration::ZERO);
        }
        Ok(count)
    }
}

fn no_answer(limit: Duration) -> io::Error {
    let text = format!(
        "its agent did not answer within {} s; exocell stop, kill and rm -f do not need it",
        limit.as_secs_f32()
    );
    io::Error::new(io::ErrorKind::TimedOut, text)
}

impl Read for &Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        let since = Instant::now();
        self.count(since, (&self.stream).read(buffer))
    }
}

impl Write for &Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        let since = Instant::now();
        self.count(since, (&self.stream).write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::client;

    const SHORT: Duration = Duration::from_millis(700);

    /// A guest that does `misdeed` on its end until the host has given up.
    fn against<T>(
        misdeed: impl Fn(&mut UnixStream) + Send + 'static,
        host: impl FnOnce(&Patient) -> T,
    ) -> T {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let over = std::sync::Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let guest = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                misdeed(&mut theirs);
            }
        });
        let got = host(&Patient::new(ours, SHORT));
        over.store(true, Ordering::Relaxed);
        guest.join().unwrap();
        got
    }

    fn pause() {
        std::thread::sleep(Duration::from_millis(5));
    }

    #[test]
    fn a_guest_that_never_answers_or_a_byte_at_a_time_is_given_up() {
        let silent = against(|_| pause(), |stream| client::stats(stream, stream));
        assert!(silent.unwrap_err().to_string().contains("did not answer within 0.7 s"));
        // The beginning of a frame of 64 KiB, and then a byte every 5 ms.
        let begun = AtomicBool::new(false);
        let slow = move |stream: &mut UnixStream| {
            let bytes: &[u8] =
                if begun.swap(true, Ordering::Relaxed) { b" " } else { &[2, 0, 0, 1, 0] };
            let _ = stream.write(bytes);
            pause();
        };
        let dripped = against(slow, |stream| client::stats(stream, stream));
        assert!(dripped.unwrap_err().to_string().contains("did not answer"));
        let frame = |stream: &mut UnixStream| {
            let _ = stream.write(&[9, 1, 0, 0, 0, 0]);
            pause();
        };
        let mut got = Vec::new();
        let endless =
            against(frame, |stream| client::download(stream, stream, "/x", &mut got, 1 << 30));
        assert!(endless.unwrap_err().to_string().contains("did not answer"));
    }

    #[test]
    fn a_guest_that_does_not_listen_is_given_up() {
        let deaf = against(|_| pause(), |mut stream| stream.write_all(&[0; 8 << 20]));
        assert_eq!(deaf.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_long_transfer_takes_longer_than_one_answer_and_a_pause_of_ours_costs_nothing() {
        let steady = |stream: &mut UnixStream| {
            let _ = stream.write_all(&[7; 16 << 10]);
            std::thread::sleep(Duration::from_millis(30));
        };
        let read = against(steady, |mut stream| {
            let mut buffer = vec![0; 16 << 10];
            let mut total = 0;
            while total < 768 << 10 {
                total += stream.read(&mut buffer)?;
            }
            std::thread::sleep(2 * SHORT);
            stream.read_exact(&mut buffer)
        });
        assert!(read.is_ok());
    }
}
