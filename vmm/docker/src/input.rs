//! The way to a program: its input and its terminal's size, as frames on its session's stream.
//!
//! One task writes, so that a frame is whole or not there, and so that nobody waits for a program
//! that does not read but who brings it input.

use bytes::Bytes;
use exocell_cell::agent::{Kind, TtySize};
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::frames::{write_frame, write_json};

/// Frames that wait for the program.
const FRAMES_WAITING: usize = 4;

/// See the module's head.
pub struct Input {
    frames: mpsc::Sender<(Kind, Bytes)>,
    /// The newest one counts.
    size: watch::Sender<Option<TtySize>>,
    writer: AbortHandle,
}

impl Input {
    pub fn new(stream: OwnedWriteHalf) -> Self {
        let (frames, waiting) = mpsc::channel(FRAMES_WAITING);
        let (size, wanted) = watch::channel(None);
        let writer = tokio::spawn(write(stream, waiting, wanted)).abort_handle();
        Self { frames, size, writer }
    }

    /// Hands a frame over, and waits while others wait. False when there is no use.
    pub async fn send(&self, kind: Kind, bytes: Bytes) -> bool {
        self.frames.send((kind, bytes)).await.is_ok()
    }

    pub fn resize(&self, size: TtySize) {
        self.size.send_replace(Some(size));
    }

    /// The program is over: nobody waits for it any more.
    pub fn end(&self) {
        self.writer.abort();
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        self.end();
    }
}

async fn write(
    mut stream: OwnedWriteHalf,
    mut frames: mpsc::Receiver<(Kind, Bytes)>,
    mut wanted: watch::Receiver<Option<TtySize>>,
) {
    loop {
        let written = tokio::select! {
            biased;
            Ok(()) = wanted.changed() => {
                let size = *wanted.borrow_and_update();
                match size {
                    Some(size) => write_json(&mut stream, Kind::Resize, &size).await,
                    None => Ok(()),
                }
            }
            frame = frames.recv() => match frame {
                Some((kind, bytes)) => write_frame(&mut stream, kind, &bytes).await,
                None => return,
            },
        };
        // Its end is told by the other half.
        if written.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::read_frame;
    use std::time::Duration;
    use tokio::net::UnixStream;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_program_that_does_not_read_holds_up_nobody_but_its_feeder() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let input = Input::new(ours.into_split().1);
        let block = Bytes::from(vec![7; 32 << 10]);
        let mut sent = 0;
        while timeout(Duration::from_millis(200), input.send(Kind::Stdin, block.clone()))
            .await
            .is_ok()
        {
            sent += 1;
        }
        input.resize(TtySize { rows: 1, cols: 1 });
        input.resize(TtySize { rows: 24, cols: 80 });
        let mut heard = Vec::new();
        while heard.len() <= sent {
            let frame = read_frame(&mut theirs).await.unwrap().expect("a whole frame");
            if frame.kind == Kind::Resize {
                assert_eq!(frame.json::<TtySize>().unwrap(), TtySize { rows: 24, cols: 80 });
                assert!(heard.len() < sent, "it comes before input that waits");
            }
            heard.push(frame.kind);
        }
        assert_eq!(heard.iter().filter(|kind| **kind == Kind::Resize).count(), 1);
        // Once it is over, who waits is let go.
        let block = Bytes::from(vec![7; 32 << 10]);
        let feeder = async { while input.send(Kind::Stdin, block.clone()).await {} };
        let end = async {
            tokio::task::yield_now().await;
            input.end();
        };
        tokio::join!(feeder, end);
    }
}
