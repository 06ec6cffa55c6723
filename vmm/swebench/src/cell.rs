//! The cell of one instance, driven through the `exocell` command.
//!
//! ```text
//! exocell run -i --rm IMAGE cat <── standard input: held open by this process
//! exocell exec ... (patch, tests)
//! ```
//! `cat` ends when its input does, and the cell ends with it: whatever ends
//! this process, also a kill, ends its cells.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How much of a program's output is kept, in bytes.
const OUTPUT_MAX: u64 = 64 << 20;
/// How long an ended cell may take to be gone.
const END_MAX: Duration = Duration::from_secs(10);

/// How to call the command: the executable and its state root.
#[derive(Debug, Clone)]
pub struct Exocell {
    pub executable: PathBuf,
    pub root: PathBuf,
}

impl Exocell {
    /// `exocell --root ROOT WORDS`
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(words).arg("--root").arg(&self.root);
        command
    }
}

/// How a program in a cell ended.
#[derive(Debug)]
pub struct Ended {
    /// What it wrote on both streams, in the order in which it came.
    pub output: String,
    /// `None` when it was out of time.
    pub code: Option<i32>,
}

impl Ended {
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

/// A running cell; it ends with this value.
pub struct Cell {
    exocell: Exocell,
    name: String,
    run: Child,
    input: Option<ChildStdin>,
}

impl Cell {
    /// Starts a cell of `image` called `name` and waits until it runs. A cell
    /// of that name which an earlier run left is removed.
    ///
    /// # Errors
    /// What `exocell run` says.
    pub fn start(
        exocell: &Exocell,
        name: &str,
        image: &str,
        flags: &[String],
    ) -> Result<Self, String> {
        // Mostly there is none.
        let _ = exocell.command(&["rm", "-f", name]).output();
        let mut command = exocell.command(&["run", "--rm", "-i", "--name", name]);
        command.args(flags).args(["--entrypoint", "/bin/sh", image, "-c", "cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = command.spawn().map_err(|error| format!("cannot run exocell: {error}"))?;
        let input = run.stdin.take();
        let mut cell = Self { exocell: exocell.clone(), name: name.to_owned(), run, input };
        if cell.echoes("ready\n") { Ok(cell) } else { Err(cell.last_words()) }
    }

    /// Whether what is written to the cell's program comes back.
    fn echoes(&mut self, line: &str) -> bool {
        let (Some(input), Some(output)) = (&mut self.input, self.run.stdout.take()) else {
            return false;
        };
        let mut back = String::new();
        input.write_all(line.as_bytes()).is_ok()
            && BufReader::new(output.take(line.len() as u64)).read_line(&mut back).is_ok()
            && back == line
    }

    /// What the command said before it ended.
    fn last_words(mut self) -> String {
        self.input = None;
        let mut words = Vec::new();
        if let Some(errors) = self.run.stderr.take() {
            // What could be read is told.
            let _ = errors.take(OUTPUT_MAX).read_to_end(&mut words);
        }
        let words = String::from_utf8_lossy(&words);
        let words = words.trim().trim_start_matches("exocell: ");
        if words.is_empty() { "the cell ended at once".to_owned() } else { words.to_owned() }
    }

    /// Runs `words` in `folder` as root until they end, or for `limit`.
    ///
    /// # Errors
    /// The command cannot be run.
    pub fn exec(
        &self,
        folder: &str,
        words: &[&str],
        input: &[u8],
        limit: Option<Duration>,
    ) -> io::Result<Ended> {
        let (mut output, both) = io::pipe()?;
        let mut command = self.exocell.command(&["exec", "-i", "-u", "root", "-w", folder]);
        command.arg(&self.name).args(words);
        command.stdin(Stdio::piped()).stdout(both.try_clone()?).stderr(both);
        let mut child = command.spawn()?;
        drop(command); // holds the pipe's other end
        let (input, stdin) = (input.to_vec(), child.stdin.take());
        // A program need not read its input.
        let writer = std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&input)));
        let (sender, heard) = channel();
        std::thread::spawn(move || sender.send(drain(&mut output)));
        let in_time = match limit {
            Some(limit) => heard.recv_timeout(limit),
            None => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let timed_out = in_time.is_err();
        if timed_out {
            child.kill()?;
        }
        let status = child.wait()?;
        // Nobody reads what is not written yet.
        let _ = writer.join();
        let output = in_time.or_else(|_| heard.recv()).unwrap_or_default();
        let output = String::from_utf8_lossy(&output).into_owned();
        Ok(Ended {
            output,
            code: if timed_out { None } else { Some(status.code().unwrap_or(137)) },
        })
    }

    /// Writes the file `path`, whose folder is there.
    pub fn write(&self, path: &str, content: &str) -> io::Result<()> {
        let words = ["sh", "-c", "cat > \"$0\"", path];
        let ended = self.exec("/", &words, content.as_bytes(), None)?;
        match ended.is_success() {
            true => Ok(()),
            false => Err(io::Error::other(ended.output.trim().to_owned())),
        }
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        drop(self.input.take());
        let removed = self.exocell.command(&["rm", "-f", &self.name]).output();
        // One that is gone already is what is wanted.
        drop(removed);
        let patience = Instant::now() + END_MAX;
        while matches!(self.run.try_wait(), Ok(None)) {
            if Instant::now() > patience {
                // It waits for a supervisor that does not end.
                let _ = self.run.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The first bytes that come, until no more come.
fn drain(source: &mut impl Read) -> Vec<u8> {
    let mut kept = Vec::new();
    // An output that cannot be read has ended.
    let _ = source.take(OUTPUT_MAX).read_to_end(&mut kept);
    let lost = io::copy(source, &mut io::sink()).unwrap_or(0);
    if lost > 0 {
        kept.extend_from_slice(format!("\n[{lost} more bytes are left out]\n").as_bytes());
    }
    kept
}
