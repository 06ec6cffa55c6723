//! A cell's log, line by line, while it is written and after.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use exocell_agent::{Frame, FrameError, FrameReader, Kind};

use crate::clock;

/// A line longer than this is several, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;
/// So much is read at a time, in bytes.
const READ_BYTES: usize = 64 << 10;

/// What of a log is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    pub stdout: bool,
    pub stderr: bool,
    /// Whether each line begins with its time.
    pub timestamps: bool,
    /// Milliseconds since 1970.
    pub since: u64,
    pub until: u64,
    /// Only so many lines at the end.
    pub tail: Option<usize>,
}

impl Wanted {
    /// Everything of these streams.
    pub fn streams(stdout: bool, stderr: bool) -> Self {
        Self { stdout, stderr, timestamps: false, since: 0, until: u64::MAX, tail: None }
    }

    fn takes(&self, line: &Line) -> bool {
        (if line.stderr { self.stderr } else { self.stdout })
            && (self.since..=self.until).contains(&line.time_ms)
    }

    fn shown(&self, mut line: Line) -> Line {
        if self.timestamps {
            let time = format!("{} ", clock::rfc3339_ms(line.time_ms)).into_bytes();
            line.bytes.splice(..0, time);
        }
        line
    }

    /// The line as it is to be shown, if it is wanted.
    pub fn choose(self, line: Line) -> Option<Line> {
        self.takes(&line).then(|| self.shown(line))
    }
}

/// A line of a program's output, its newline with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub stderr: bool,
    /// When it began, in milliseconds since 1970.
    pub time_ms: u64,
    pub bytes: Vec<u8>,
}

/// Makes lines of frames, one at a time. The two streams do not mix within a line.
#[derive(Clone, Default)]
struct Lines {
    time_ms: u64,
    open: [Option<Line>; 2],
    /// Output that is not in a line yet: whether it is of standard error, its bytes, and how many
    /// of them are in lines.
    piece: (bool, Vec<u8>, usize),
}

impl Lines {
    /// Takes a frame. The lines of the last one must all have been taken.
    fn take(&mut self, frame: Frame) {
        match frame.kind {
            Kind::Time => {
                if let Ok(time) = frame.payload.try_into() {
                    self.time_ms = u64::from_le_bytes(time);
                }
            }
            Kind::Stdout | Kind::Stderr => {
                self.piece = (frame.kind == Kind::Stderr, frame.payload, 0);
            }
            _ => {}
        }
    }

    /// The next line that is finished.
    fn next(&mut self) -> Option<Line> {
        let time_ms = self.time_ms;
        let (stderr, bytes, used) = &mut self.piece;
        let (stderr, open) = (*stderr, &mut self.open[usize::from(*stderr)]);
        while let Some(part) = bytes[*used..].split_inclusive(|byte| *byte == b'\n').next() {
            let line = open.get_or_insert_with(|| Line { stderr, time_ms, bytes: Vec::new() });
            line.bytes.extend(part);
            *used += part.len();
            if part.ends_with(b"\n") || line.bytes.len() >= LINE_BYTES_MAX {
                return open.take();
            }
        }
        None
    }
}

/// A file of a log, how far it was read, and how far it is to be read.
#[derive(Clone)]
struct Part {
    file: Arc<File>,
    at: u64,
    end: u64,
}

/// A log that is read while it is written: `log.old`, then `log`, which may become `log.old` at
/// any moment. Its lines come one at a time: of the log, which is the guest's to fill, no more
/// than a frame and a line of each stream is held.
#[derive(Clone)]
pub struct Tail {
    directory: PathBuf,
    /// The last one is kept: it tells what was written since.
    parts: VecDeque<Part>,
    lines: Lines,
    /// Read, but not yet a whole frame.
    bytes: Vec<u8>,
}

impl Tail {
    /// The log in the directory of a cell's record, as far as it is written now.
    ///
    /// # Errors
    /// fstat(2).
    pub fn open(directory: &Path) -> io::Result<Self> {
        let mut tail = Self {
            directory: directory.to_owned(),
            parts: VecDeque::new(),
            lines: Lines::default(),
            bytes: Vec::new(),
        };
        tail.look()?;
        Ok(tail)
    }

    /// Finds what was written since.
    ///
    /// # Errors
    /// fstat(2).
    pub fn look(&mut self) -> io::Result<()> {
        // The new one first: if it becomes the old one meanwhile, it is found twice, not never.
        let [log, old] = ["log", "log.old"].map(|name| File::open(self.directory.join(name)).ok());
        let mut found: Vec<File> = old.into_iter().chain(log).collect();
        if let [old, log] = &*found
            && is_same(old, log)?
        {
            found.pop();
        }
        let mut known = 0;
        if let Some(last) = self.parts.back() {
            for (at, file) in found.iter().enumerate() {
                if is_same(&last.file, file)? {
                    known = at + 1;
                }
            }
        }
        let new = found.drain(known..).map(|file| Part { file: Arc::new(file), at: 0, end: 0 });
        self.parts.extend(new);
        // After that: of a file that has a successor this is the end.
        for part in &mut self.parts {
            part.end = part.file.metadata()?.len();
        }
        Ok(())
    }

    /// The next line that was finished when the log was last looked at.
    ///
    /// # Errors
    /// pread(2).
    pub fn line(&mut self) -> io::Result<Option<Line>> {
        loop {
            if let Some(line) = self.lines.next() {
                return Ok(Some(line));
            }
            match self.frame()? {
                Some(frame) => self.lines.take(frame),
                None => return Ok(None),
            }
        }
    }

    /// A line that has no newline and will get none.
    pub fn rest(&mut self) -> Option<Line> {
        self.lines.open.iter_mut().find_map(Option::take)
    }

    /// Leaves out all but the last lines, as many as are wanted. With `rest` the unfinished ones
    /// count. The log is read twice for that: how many lines there are is the guest's to choose.
    ///
    /// # Errors
    /// pread(2).
    pub fn skip(&mut self, wanted: &Wanted, rest: bool) -> io::Result<()> {
        let Some(tail) = wanted.tail else { return Ok(()) };
        let (mut ahead, mut count) = (self.clone(), 0_usize);
        while let Some(line) = ahead.line()? {
            count += usize::from(wanted.takes(&line));
        }
        while rest && let Some(line) = ahead.rest() {
            count += usize::from(wanted.takes(&line));
        }
        let mut left_out = count.saturating_sub(tail);
        while left_out > 0 {
            let line = match self.line()? {
                None if rest => self.rest(),
                line => line,
            };
            let Some(line) = line else { return Ok(()) };
            left_out -= usize::from(wanted.takes(&line));
        }
        Ok(())
    }

    /// The next frame; of a file that does not go on in frames the rest is left out.
    fn frame(&mut self) -> io::Result<Option<Frame>> {
        loop {
            let mut rest = io::Cursor::new(self.bytes.as_slice());
            match FrameReader::new(&mut rest).read() {
                Ok(Some(frame)) => {
                    let whole = rest.position() as usize;
                    self.bytes.drain(..whole);
                    return Ok(Some(frame));
                }
                Ok(None) | Err(FrameError::Truncated) => {
                    if !self.fill()? {
                        return Ok(None);
                    }
                }
                Err(_) => {
                    self.bytes.clear();
                    if let Some(part) = self.parts.front_mut() {
                        part.at = part.end;
                    }
                }
            }
        }
    }

    /// Reads on. False where that is all.
    fn fill(&mut self) -> io::Result<bool> {
        loop {
            let is_last = self.parts.len() < 2;
            let Some(part) = self.parts.front_mut() else { return Ok(false) };
            let most = part.end.saturating_sub(part.at).min(READ_BYTES as u64) as usize;
            let held = self.bytes.len();
            self.bytes.resize(held + most, 0);
            let count = part.file.read_at(&mut self.bytes[held..], part.at)?;
            self.bytes.truncate(held + count);
            part.at += count as u64;
            if count > 0 || is_last {
                return Ok(count > 0);
            }
            self.parts.pop_front();
            self.bytes.clear();
        }
    }
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_agent::FrameWriter;

    fn line(time_ms: u64, stderr: bool, text: &str) -> Line {
        Line { stderr, time_ms, bytes: text.into() }
    }

    fn written(file: &Path, frames: &[(Kind, &[u8])]) {
        let file = File::options().create(true).append(true).open(file).unwrap();
        let mut writer = FrameWriter::new(file);
        for (kind, payload) in frames {
            writer.write(*kind, payload).unwrap();
        }
    }

    fn all(log: &mut Tail) -> Vec<Line> {
        std::iter::from_fn(|| log.line().unwrap()).collect()
    }

    fn text(lines: impl IntoIterator<Item = Line>) -> String {
        lines.into_iter().map(|line| String::from_utf8(line.bytes).unwrap()).collect()
    }

    #[test]
    fn frames_become_lines_of_one_stream_with_their_times() {
        let place = tempfile::tempdir().unwrap();
        let times = [5u64, 6].map(u64::to_le_bytes);
        let frames: [(Kind, &[u8]); 5] = [
            (Kind::Time, &times[0]),
            (Kind::Stdout, b"a"),
            (Kind::Stderr, b"b\nc"),
            (Kind::Time, &times[1]),
            (Kind::Stdout, b"d\n\n"),
        ];
        written(&place.path().join("log"), &frames);
        let mut log = Tail::open(place.path()).unwrap();
        let done = all(&mut log);
        assert_eq!(done, [line(5, true, "b\n"), line(5, false, "ad\n"), line(6, false, "\n")]);
        assert_eq!((log.rest(), log.rest()), (Some(line(5, true, "c")), None));
    }

    #[test]
    fn a_log_is_followed_through_its_files_as_far_as_it_was_looked_at() {
        let place = tempfile::tempdir().unwrap();
        let [old, new] = ["log.old", "log"].map(|name| place.path().join(name));
        let mut log = Tail::open(place.path()).unwrap();
        assert_eq!(text(all(&mut log)), "");
        written(&old, &[(Kind::Stdout, b"1\n")]);
        written(&new, &[(Kind::Stdout, b"2\n")]);
        log.look().unwrap();
        written(&new, &[(Kind::Stdout, b"3\n4")]);
        let mut later = log.clone();
        assert_eq!(text(all(&mut log)), "1\n2\n");
        // Half of a frame is none.
        let mut half = File::options().append(true).open(&new).unwrap();
        std::io::Write::write_all(&mut half, &[Kind::Stdout as u8, 2, 0, 0]).unwrap();
        log.look().unwrap();
        assert_eq!(text(all(&mut log)), "3\n");
        std::io::Write::write_all(&mut half, b"\0\n5").unwrap();
        // What was read to its end is old now, and what was never looked at is older.
        std::fs::rename(&new, &old).unwrap();
        written(&new, &[(Kind::Stdout, b"\n6\n")]);
        log.look().unwrap();
        assert_eq!(text(all(&mut log)), "4\n5\n6\n");
        later.look().unwrap();
        assert_eq!(text(all(&mut later)), "1\n2\n3\n4\n5\n6\n");
    }

    #[test]
    fn what_is_no_frame_ends_a_file_and_not_the_log() {
        let place = tempfile::tempdir().unwrap();
        written(&place.path().join("log.old"), &[(Kind::Stdout, b"1\n")]);
        let mut old = File::options().append(true).open(place.path().join("log.old")).unwrap();
        std::io::Write::write_all(&mut old, &[0; 100]).unwrap();
        written(&place.path().join("log"), &[(Kind::Stdout, b"2\n")]);
        assert_eq!(text(all(&mut Tail::open(place.path()).unwrap())), "1\n2\n");
    }

    #[test]
    fn what_is_wanted_is_chosen_before_it_is_counted() {
        let place = tempfile::tempdir().unwrap();
        let times = [1u64, 2, 3].map(u64::to_le_bytes);
        let frames: [(Kind, &[u8]); 6] = [
            (Kind::Time, &times[0]),
            (Kind::Stdout, b"a\n"),
            (Kind::Time, &times[1]),
            (Kind::Stderr, b"b\n"),
            (Kind::Time, &times[2]),
            (Kind::Stdout, b"c\nd"),
        ];
        written(&place.path().join("log"), &frames);
        let every = Wanted::streams(true, true);
        let texts = |wanted: Wanted, rest: bool| {
            let mut log = Tail::open(place.path()).unwrap();
            log.skip(&wanted, rest).unwrap();
            let mut lines = all(&mut log);
            lines.extend(std::iter::from_fn(|| log.rest()).filter(|_| rest));
            text(lines.into_iter().filter_map(|line| wanted.choose(line)))
        };
        assert_eq!(texts(Wanted { tail: Some(1), stdout: false, ..every }, true), "b\n");
        assert_eq!(texts(Wanted { tail: Some(1), until: 2, ..every }, true), "b\n");
        assert_eq!(texts(Wanted { since: 2, ..every }, false), "b\nc\n");
        assert_eq!(texts(Wanted { tail: Some(0), ..every }, true), "");
        assert_eq!(texts(Wanted { tail: Some(2), ..every }, true), "c\nd");
        assert_eq!(texts(Wanted { tail: Some(2), ..every }, false), "b\nc\n");
        assert_eq!(texts(Wanted { tail: Some(9), ..every }, true), "a\nb\nc\nd");
        let stamped = texts(Wanted { timestamps: true, until: 1, ..every }, false);
        assert_eq!(stamped, "1970-01-01T00:00:00.001000000Z a\n");
    }
}
